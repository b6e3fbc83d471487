"""Train a recommender on an event log, with validation, early stopping and checkpoints.

A training has stages, each with its optimiser, its moving average of the weights and its batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.compute.checkpoint import Stopwatch
from models.compute.device import SINGLE_PROCESS, Processes, training_device
from models.data.interactions import Interactions, quantile
from models.data.windows import batch_shard, batch_windows, tile_windows
from models.encoder.history_encoder import PooledDropout
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout, draw_cases
from models.recommender.co_occurrence import count_transitions
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.training.checkpoint import BestEpoch, Checkpoint, CheckpointError, fingerprint
from models.training.held_out_weights import (
    HeldOutWeights,
    apply_held_out_weights,
    fit_held_out_weights,
)
from models.training.losses import TrainingLosses
from models.training.presets import TrainConfig, TrainingPlan

_GAP_QUANTILE = 0.999  # of the gaps between events, beyond which request times are clamped


def fit_statistics(model: Recommender, log: Interactions) -> None:
    _count(model, log)
    prior = _log_popularity(log)
    with torch.no_grad():
        model.prior.copy_(prior)
        model.new_prior.copy_(prior.mean())


def update_statistics(model: Recommender, before: Interactions, log: Interactions) -> None:
    """Count the longer `log` of a model trained on `before`.

    The trained prior of an item moves with its popularity.
    """
    _count(model, log)
    change = _log_popularity(log) - _log_popularity(before)
    with torch.no_grad():
        model.prior.add_(change.to(model.prior.device))


def _count(model: Recommender, log: Interactions) -> None:
    config = model.config
    model.statistics.load(
        count_transitions(log, config.transitions_per_item, model.statistics.cooccurrence_window),
        _max_request_gap(log),
        RecentPopularity(log).latest if config.next_basket else None,
    )


def _log_popularity(log: Interactions) -> Tensor:
    """The initial prior: the log of each item's share, 0 for an item of mean popularity.

    The steps of a small log would not learn it, nor those of a large catalogue's rare items.
    """
    if not log.n_items:
        return torch.zeros(1)
    counts = torch.from_numpy(log.liked().total_item_counts() + 1).float()
    return torch.log(counts / counts.mean())


def _max_request_gap(log: Interactions) -> int:
    gaps = np.diff(log.timestamps)[np.diff(log.users) == 0]
    if not log.shards.any(len(gaps) > 0):
        return 0
    return int(quantile(gaps, _GAP_QUANTILE, log.shards))


LossFunction = Callable[[NDArray[np.int64]], tuple[Tensor, float]]
"""Maps windows (first event, end) [n, 2] to their mean loss and the sum of the target weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A part of training with its own events, loss and parameters."""

    name: str
    log: Interactions
    epochs: int
    batch_tokens: int  # padded positions of a batch
    modules: list[nn.Module]  # that are trained
    trains_prior: bool
    is_exact: bool  # by the softmax without the target in the queries


class StageTrainer:
    """Trains the parameters that require a gradient, on one rank.

    All random draws follow from the seed, the epoch and the rank, so that a training can
    resume from the end of any epoch.
    """

    def __init__(
        self,
        model: Recommender,
        stage: Stage,
        config: TrainConfig,
        seed: tuple[int, ...],
        group: Processes = SINGLE_PROCESS,
    ) -> None:
        self._model, self._stage, self._config = model, stage, config
        self._seed, self._group = seed, group
        self._trained: list[Tensor] = [part for part in model.parameters() if part.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._trained, config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.ema = copy.deepcopy(model).eval()  # exponential moving average of the weights
        self._averages: list[Tensor] = [
            average
            for average, part in zip(self.ema.parameters(), model.parameters(), strict=True)
            if part.requires_grad
        ]
        self._step = 0
        self._steps = stage.epochs * max(1, len(self._batches(0)))

    def epoch(self, number: int, loss: LossFunction) -> Iterator[tuple[int, int, float]]:
        """Train epoch `number`, yielding (step, steps, mean loss so far) after every step."""
        batches = self._batches(number)
        torch.manual_seed(self._derive_seed(number, 1 + self._group.index))
        for module in self._model.children():  # frozen modules run without dropout
            module.train(any(part.requires_grad for part in module.parameters()))
        for module in self._model.modules():
            if isinstance(module, PooledDropout):
                module.redraw()
        total = weight = 0.0
        for step, windows in enumerate(batches, 1):
            step_loss, step_weight = self._descend(windows, loss)
            total, weight = total + step_loss * step_weight, weight + step_weight
            yield step, len(batches), total / weight if weight else 0.0

    def _descend(self, windows: NDArray[np.int64], loss: LossFunction) -> tuple[float, float]:
        """Take one step; returns the loss over all ranks and the sum of their target weights."""
        self._optimiser.zero_grad(set_to_none=True)
        # If the log is in several shards, the windows are this rank's share already.
        is_shared = self._stage.log.shards.count == 1
        shard = self._group.shard(windows) if is_shared else windows
        reported, weight = torch.zeros(()), 0.0
        if len(shard):
            own_loss, weight = loss(shard)
            own_loss.backward()  # type: ignore[no-untyped-call]
            reported = own_loss.detach().float()
        if self._group.count > 1:
            for part in self._trained:  # all ranks must reduce the same tensors
                if part.grad is None:
                    part.grad = torch.zeros_like(part)
        gradients = [part.grad for part in self._trained if part.grad is not None]
        total = self._group.all_reduce_mean([*gradients, reported], weight)
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = self._config.learning_rate * self._schedule()
        self._optimiser.step()
        self._step += 1
        decay = min(self._config.ema_decay, self._step / (9 + self._step))
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._trained, 1 - decay)
        return float(reported), total

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "optimiser": self._optimiser.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._optimiser.load_state_dict(state["optimiser"])

    def _schedule(self) -> float:
        """The learning rate's factor: linear warm-up, then a cosine to 5 %."""
        warmup = min(self._config.warmup_steps, max(1, self._steps // 10))
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._steps)))
        return min(1.0, (self._step + 1) / warmup) * (0.05 + 0.95 * decay)

    def _batches(self, epoch: int) -> list[NDArray[np.int64]]:
        """Draw the batches of an epoch: the same on all ranks, or equally many of their shards."""
        log, longest = self._stage.log, self._model.config.window + 1
        tokens, shards = self._stage.batch_tokens, log.shards
        common = np.random.default_rng(self._derive_seed(epoch, 0))
        if shards.count == 1:
            return batch_windows(tile_windows(log, longest, common), tokens, common)
        stream = 1 + shards.count + shards.index  # after those of the ranks' steps
        own = np.random.default_rng(self._derive_seed(epoch, stream))
        return batch_shard(tile_windows(log, longest, own), tokens, shards, own, common)

    def _derive_seed(self, epoch: int, stream: int) -> int:
        sequence = np.random.SeedSequence((*self._seed, epoch, stream))
        return int(sequence.generate_state(1, np.uint64)[0])


_VALIDATION_BATCH = 64  # cases, few enough for all ranks to have about equally many batches


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    epoch: int  # from 1, of all stages together
    epochs: int  # that there will be, if no further stage stops early
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    remaining: float  # seconds, at the pace so far
    validation: RankingMetrics | None  # the latest


@dataclass(frozen=True, slots=True)
class TrainingResult:
    plan: TrainingPlan  # with the event types, the task and the epochs of its log
    model: Recommender  # in eval mode, trained on all events that the training was given
    validated: Recommender  # with the best epoch's weights; `model` itself without final epochs
    validation: RankingMetrics | None  # of `validated`, on at most `validation_users` cases
    epoch: int  # the best one
    weights: HeldOutWeights  # of the parts of the score, as the validation cases chose them
    history: list[dict[str, float]]
    seconds: float


class TrainingRun:
    def __init__(
        self,
        plan: TrainingPlan,
        group: Processes,
        progress: Callable[[TrainingProgress], None] | None,
        save: Callable[[bytes], None] | None,
    ) -> None:
        self._plan, self._group = plan, group
        self._progress = progress if group.is_first else None
        self._save = save if group.is_first else None
        log, validation, config = plan.log, plan.validation, plan.train_config
        self._fingerprint = fingerprint(
            [log] if plan.every_event is None else [log, plan.every_event],
            plan.content,
            validation,
            plan.model_config,
            config,
            plan.seed,
        )
        with torch.device("cpu"):  # so that a seed gives the same initial weights on any device
            self._model = Recommender(plan.model_config)
            for part in self._model.parameters():  # machines may draw them differently
                log.shards.broadcast_tensor(part.detach())
            fit_statistics(self._model, log)
        self._model.to(training_device(group.index))
        self._validation: Holdout | None = None
        self._weight_cases: Holdout | None = None
        # Without cases every metric is nan, and no epoch would be the best.
        if validation is not None and log.shards.any(len(validation) > 0):
            self._validation = draw_cases(validation, config.validation_users, plan.seed)
            # The epoch is the best for the cases it was chosen by: more judge without favour.
            self._weight_cases = draw_cases(validation, config.weight_cases, plan.seed)
        self._losses: TrainingLosses | None = None
        self._best = BestEpoch()
        self._latest: RankingMetrics | None = None
        self._history: list[dict[str, float]] = []
        self._stopwatch = Stopwatch()

    def fit(self, resume: Checkpoint | None) -> TrainingResult:
        if resume is not None and resume.run != self._fingerprint:
            raise CheckpointError("the checkpoint is of another training: other events or settings")
        stages = self._stages()
        names = [stage.name for stage in stages]
        validated = self._model
        for stage in stages[names.index(resume.stage) if resume is not None else 0 :]:
            if stage.log is not self._plan.log:
                if resume is not None:
                    self._model.load_state_dict(resume.best.weights, strict=False)
                validated = copy.deepcopy(self._model)
                update_statistics(self._model, self._plan.log, stage.log)
            self._train(stage, stages, resume)
            resume = None
        validation = self._best.metrics
        weights = HeldOutWeights()
        if self._validation is not None and self._weight_cases is not None:
            weights = fit_held_out_weights(
                validated.eval(),
                self._plan.content,
                self._weight_cases,
                self._plan.log,
                batch_size=_VALIDATION_BATCH,
                group=self._group,
            )
            if self._model is not validated:
                apply_held_out_weights(self._model, weights, stages[-1].log, self._group)
            if weights.similarity or any(weights.offsets):
                validation = self._validate(validated, self._validation)
        return TrainingResult(
            plan=self._plan,
            model=_ready(self._model),
            validated=_ready(validated),
            validation=validation,
            epoch=self._best.epoch,
            weights=weights,
            history=self._history,
            seconds=self._stopwatch.seconds,
        )

    def _stages(self) -> list[Stage]:
        model, config, log = self._model, self._plan.train_config, self._plan.log
        everything = list(model.children())
        if model.encoder is None:
            tokens = config.attention_batch_tokens
            stages = [Stage("sampled", log, config.epochs, tokens, everything, True, False)]
        else:
            tokens = config.batch_tokens
            stages = [Stage("full", log, config.epochs, tokens, everything, True, True)]
        final = replace(stages[0], name="final", epochs=config.final_epochs)
        if model.encoder is not None:
            parts = [
                model.item_norm, model.cross_attention, model.state_attention, model.recency,
                model.type_bias,
            ]  # fmt: skip
            attention: list[nn.Module] = [part for part in parts if part is not None]
            # The exact softmax leaves the target out of the queries: it would undo what the stage
            # before has fitted with the target.
            rest = [part for part in everything if part not in attention]
            final = replace(final, modules=rest)
            if config.attention_epochs:
                epochs, tokens = config.attention_epochs, config.attention_batch_tokens
                stages.append(Stage("sampled", log, epochs, tokens, attention, False, False))
        if self._plan.every_event is not None and config.final_epochs:
            stages.append(replace(final, log=self._plan.every_event))
        return stages

    def _train(self, stage: Stage, stages: list[Stage], resume: Checkpoint | None) -> None:
        """Train one stage; the model ends with the weights of the best epoch so far.

        The final stage has no cases to validate, and ends with the weights of its last epoch.
        """
        config, model, number = self._plan.train_config, self._model, stages.index(stage)
        is_final = stage.log is not self._plan.log
        model.requires_grad_(False)
        for part in stage.modules:
            part.requires_grad_(True)
        for prior in (model.prior, model.new_prior, model.recent_popularity_weight):
            if prior is not None:
                prior.requires_grad_(stage.trains_prior)
        trainer = StageTrainer(model, stage, config, (self._plan.seed, number), self._group)
        later = sum(each.epochs for each in stages[number + 1 :])
        first, validations_since_best = 1, 0
        if resume is not None:
            first, validations_since_best = resume.epoch + 1, resume.validations_since_best
            self._restore(trainer, resume)
        if self._losses is None or is_final:
            self._losses = TrainingLosses(model, stage.log, self._plan.content, config)
        losses = self._losses
        loss = losses.full_softmax if stage.is_exact else losses.sampled_softmax
        for epoch in range(first, stage.epochs + 1):
            if validations_since_best >= config.patience:
                break
            # An earlier stage may have stopped early, so that the epochs done are counted.
            count = len(self._history) + 1
            total = count + stage.epochs - epoch + later
            mean = 0.0
            for step, steps, mean in trainer.epoch(epoch, loss):
                if self._progress is not None:
                    remaining = self._stopwatch.remaining((count - 1 + step / steps) / total)
                    self._progress(
                        TrainingProgress(
                            epoch=count,
                            epochs=total,
                            step=step,
                            steps=steps,
                            loss=mean,
                            remaining=remaining,
                            validation=self._latest,
                        )
                    )
            record = {"epoch": float(count), "loss": mean}
            due = epoch % config.validate_every == 0 or epoch == stage.epochs
            if self._validation is not None and not is_final and (due or stage.name == "sampled"):
                self._latest = metrics = self._validate(trainer.ema, self._validation)
                record |= {"hr": metrics.hr, "ndcg": metrics.ndcg}
                if self._best.metrics is None or metrics.ndcg > self._best.metrics.ndcg:
                    self._best = BestEpoch(_weights(trainer.ema), count, metrics)
                    validations_since_best = 0
                else:
                    validations_since_best += 1
            elif self._validation is None and not is_final:
                self._best = BestEpoch(_weights(trainer.ema), count, None)
            self._history.append(record)
            if self._save is not None:
                self._save(
                    Checkpoint(
                        run=self._fingerprint,
                        stage=stage.name,
                        epoch=epoch,
                        validations_since_best=validations_since_best,
                        weights=_weights(model),
                        ema=_weights(trainer.ema),
                        optimiser=trainer.state(),
                        best=self._best,
                        latest=self._latest,
                        history=self._history,
                    ).to_bytes()
                )
        weights = _weights(trainer.ema) if is_final else self._best.weights
        model.load_state_dict(weights, strict=False)

    def _validate(self, model: Recommender, cases: Holdout) -> RankingMetrics:
        return evaluate(
            ModelRanker(model, self._plan.content, reduced_precision=True, two_stage=True),
            cases,
            exclude_seen=not model.config.repeat_consumption,
            batch_size=_VALIDATION_BATCH,
            group=self._group,
        )

    def _restore(self, trainer: StageTrainer, checkpoint: Checkpoint) -> None:
        self._model.load_state_dict(checkpoint.weights, strict=False)
        trainer.ema.load_state_dict(checkpoint.ema, strict=False)
        trainer.restore(checkpoint.optimiser)
        self._best, self._latest = checkpoint.best, checkpoint.latest
        self._history = list(checkpoint.history)


def _ready(model: Recommender) -> Recommender:
    return model.requires_grad_(True).eval().cpu()


def _weights(model: Recommender) -> dict[str, Tensor]:
    """Copy the parameters by name; buffers are counted from the log again."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}


def fit(
    plan: TrainingPlan,
    *,
    progress: Callable[[TrainingProgress], None] | None = None,
    save: Callable[[bytes], None] | None = None,
    resume: bytes | None = None,
    group: Processes = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a recommender by full cross-entropy over the catalogue at every event.

    First everything but the target's part of the queries, by the exact softmax; then the attention
    with the target in its queries, by a sampled softmax and with everything else frozen. Beyond
    `train_config.full_softmax_items` items the partition function of the first is estimated from
    uniform negatives and the batch's own targets, each stratum with its exact weight.

    Given `plan.every_event`, the best epoch's model is at last trained on that log, with the counts
    of that log, for `train_config.final_epochs` epochs: in a short history the validation case is
    much of what there is to learn, and the newest.

    Rank zero calls `progress` after every step, and `save` after every epoch with bytes for
    `resume`, which continues to the same model as an uninterrupted training. Each process of
    `group` is given the same plan, and trains on a share of every batch; or, if the logs are
    shards, on the events of its own users.

    Raises ValueError if no user has two events, the later of them liked, and for content, weights
    or a `model_config` that do not fit; `CheckpointError` for a checkpoint that is damaged or of
    another training.
    """
    shards = plan.log.shards
    if shards.count > 1 and (shards.index, shards.count) != (group.index, group.count):
        raise ValueError(f"shard {shards.index} of {shards.count} is not that of {group}")
    plan = plan.checked()
    device = training_device(group.index)
    on_gpu = device.type == "cuda"
    # A default device costs every call a little, so the context is entered for a GPU only.
    with torch.random.fork_rng([device] if on_gpu else []), device if on_gpu else nullcontext():
        torch.manual_seed(plan.seed)
        run = TrainingRun(plan, group, progress, save)
        return run.fit(None if resume is None else Checkpoint.from_bytes(resume))
