"""Trains a recommender on an event log, with validation, early stopping and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.compute.device import training_device
from models.compute.progress import Stopwatch
from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.config import RecommenderConfig
from models.recommender.recommender import Recommender
from models.training.checkpoint import BestEpoch, Checkpoint, CheckpointError, fingerprint
from models.training.count_statistics import fit_statistics
from models.training.log_profile import prediction_task
from models.training.losses import TrainingLosses
from models.training.stage import Stage, StageTrainer
from models.training.train_config import TrainConfig

_VALIDATION_BATCH = 64  # cases, few enough for all ranks to have about as many batches


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a running training, passed to the callback after every step."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    remaining: float  # seconds, at the pace so far
    validation: RankingMetrics | None  # the latest


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A trained model and its validation history."""

    model: Recommender  # with the best epoch's weights, in eval mode
    validation: RankingMetrics | None  # of the best epoch
    epoch: int  # the best one
    history: list[dict[str, float]]
    seconds: float


def fit(
    log: Interactions,
    content: NDArray[np.float32],
    *,
    model_config: RecommenderConfig,
    train_config: TrainConfig,
    validation: Holdout | None = None,
    seed: int = 0,
    progress: Callable[[TrainingProgress], None] | None = None,
    save: Callable[[bytes], None] | None = None,
    resume: bytes | None = None,
    group: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a recommender by full cross-entropy over the catalogue at every event.

    First everything but the target's part of the queries, by the exact softmax; then the attention
    with the target in its queries, by a sampled softmax and with everything else frozen. Beyond
    `train_config.full_softmax_items` items the partition function of the first is estimated from
    uniform negatives and the batch's own targets, each stratum with its exact weight.

    Args:
        log: the training events.
        content: text embeddings of all items [log.n_items, d]; zero rows for items without text.
        model_config: its event types and prediction task are replaced by those of the log and the
            validation cases.
        train_config: hyperparameters.
        validation: cases that choose the epoch; without them the last epoch is taken.
        seed: the same seed, data, thread count and world size give the same model.
        progress: called after every step, on rank zero alone.
        save: called after every epoch with bytes for `resume`, on rank zero alone.
        resume: a checkpoint, to continue to the same model as an uninterrupted training.
        group: the data-parallel processes, each called with the same arguments.

    Raises:
        ValueError: if no user has two events, the later of them liked; if content or
            `model_config` do not fit the log; if content is not finite or a weight not above 0.
        CheckpointError: if `resume` is damaged or of another training.
    """
    width = model_config.content_dim
    if content.shape != (log.n_items, width):
        raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
    if not np.isfinite(content).all():
        raise ValueError("content must be finite")
    if model_config.n_items != log.n_items:
        raise ValueError(f"the model has {model_config.n_items} items, the log {log.n_items}")
    model_config = model_config.with_event_types(
        log.n_types, dislike_type=log.dislike_type, has_dislikes=bool(log.disliked.any())
    )
    model_config = replace(model_config, **prediction_task(log, validation)._asdict())
    train_config = train_config.for_next_basket() if model_config.next_basket else train_config
    if np.any(log.weights <= 0):
        raise ValueError("weights must be greater than 0: they enter as their logarithm")
    if not np.any(~log.disliked & (log.positions > 0)):
        raise ValueError("no user has two events: there is nothing to learn an order from")
    device = training_device(group.rank)
    on_gpu = device.type == "cuda"
    # A default device costs every call a little, so the context is entered for a GPU only.
    with torch.random.fork_rng([device] if on_gpu else []), device if on_gpu else nullcontext():
        torch.manual_seed(seed)
        run = _TrainingRun(
            log, content, model_config, train_config, validation, seed, progress, save, group
        )
        return run.fit(None if resume is None else Checkpoint.from_bytes(resume))


class _TrainingRun:
    """One training: its model, losses and best epoch so far."""

    def __init__(
        self,
        log: Interactions,
        content: NDArray[np.float32],
        model_config: RecommenderConfig,
        config: TrainConfig,
        validation: Holdout | None,
        seed: int,
        progress: Callable[[TrainingProgress], None] | None,
        save: Callable[[bytes], None] | None,
        group: DataParallelGroup,
    ) -> None:
        self._log, self._content, self._config = log, content, config
        self._seed, self._group = seed, group
        self._progress = progress if group.is_rank_zero else None
        self._save = save if group.is_rank_zero else None
        self._fingerprint = fingerprint(log, content, validation, model_config, config, seed)
        with torch.device("cpu"):  # so that a seed gives the same initial weights on any device
            self._model = Recommender(model_config)
            fit_statistics(self._model, log)
        self._model.to(training_device(group.rank))
        self._losses = TrainingLosses(self._model, log, content, config)
        if validation is not None and len(validation) > config.validation_users:
            chosen = np.zeros(len(validation), dtype=np.bool_)
            drawn = np.random.default_rng(seed).permutation(len(validation))
            chosen[drawn[: config.validation_users]] = True
            validation = validation.where(chosen)
        # Without cases every metric is nan, and no epoch would be the best.
        self._validation = validation if validation is not None and len(validation) else None
        self._best = BestEpoch()
        self._latest: RankingMetrics | None = None
        self._history: list[dict[str, float]] = []
        self._stopwatch = Stopwatch()

    def fit(self, resume: Checkpoint | None) -> TrainingResult:
        """Train all stages, or those from the checkpoint on.

        Raises `CheckpointError` for a checkpoint of another training.
        """
        if resume is not None and resume.run != self._fingerprint:
            raise CheckpointError("the checkpoint is of another training: other events or settings")
        stages = self._stages()
        names = [stage.name for stage in stages]
        for stage in stages[names.index(resume.stage) if resume is not None else 0 :]:
            self._train(stage, stages, resume)
            resume = None
        return TrainingResult(
            model=self._model.requires_grad_(True).eval().cpu(),
            validation=self._best.metrics,
            epoch=self._best.epoch,
            history=self._history,
            seconds=self._stopwatch.seconds,
        )

    def _stages(self) -> list[Stage]:
        model, config = self._model, self._config
        every, tokens = list(model.children()), config.attention_batch_tokens
        if model.encoder is None:
            return [Stage("sampled", config.epochs, tokens, every, trains_prior=True)]
        stages = [Stage("full", config.epochs, config.batch_tokens, every, trains_prior=True)]
        if config.attention_epochs:
            attention: list[nn.Module | None] = [
                model.item_norm, model.cross_attention, model.state_attention, model.recency,
                model.type_bias,
            ]  # fmt: skip
            parts = [part for part in attention if part is not None]
            epochs = config.attention_epochs
            stages.append(Stage("sampled", epochs, tokens, parts, trains_prior=False))
        return stages

    def _train(self, stage: Stage, stages: list[Stage], resume: Checkpoint | None) -> None:
        """Train one stage; the model ends with the weights of the best epoch so far."""
        config, model, number = self._config, self._model, stages.index(stage)
        model.requires_grad_(False)
        for part in stage.modules:
            part.requires_grad_(True)
        for prior in (model.prior, model.new_prior, model.recent_popularity_weight):
            if prior is not None:
                prior.requires_grad_(stage.trains_prior)
        trainer = StageTrainer(model, self._log, stage, config, (self._seed, number), self._group)
        before = sum(earlier.epochs for earlier in stages[:number])
        total = sum(each.epochs for each in stages)
        first, validations_since_best = 1, 0
        if resume is not None:
            first, validations_since_best = resume.epoch + 1, resume.validations_since_best
            self._restore(trainer, resume)
        losses = self._losses
        loss = losses.full_softmax if stage.name == "full" else losses.sampled_softmax
        for epoch in range(first, stage.epochs + 1):
            if validations_since_best >= config.patience:
                break
            mean = 0.0
            for step, steps, mean in trainer.epoch(epoch, loss):
                self._report(before + epoch, total, step, steps, mean)
            record = {"epoch": float(before + epoch), "loss": mean}
            due = epoch % config.validate_every == 0 or epoch == stage.epochs
            if self._validation is not None and (due or stage.name == "sampled"):
                self._latest = metrics = self._validate(trainer.ema, self._validation)
                record |= {"hr": metrics.hr, "ndcg": metrics.ndcg}
                if self._best.metrics is None or metrics.ndcg > self._best.metrics.ndcg:
                    self._best = BestEpoch(_weights(trainer.ema), before + epoch, metrics)
                    validations_since_best = 0
                else:
                    validations_since_best += 1
            elif self._validation is None:
                self._best = BestEpoch(_weights(trainer.ema), before + epoch, None)
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
        model.load_state_dict(self._best.weights, strict=False)

    def _report(self, epoch: int, epochs: int, step: int, steps: int, loss: float) -> None:
        if self._progress is None:
            return
        remaining = self._stopwatch.remaining((epoch - 1 + step / steps) / epochs)
        self._progress(TrainingProgress(epoch, epochs, step, steps, loss, remaining, self._latest))

    def _validate(self, model: Recommender, cases: Holdout) -> RankingMetrics:
        return evaluate(
            ModelRanker(model, self._content, reduced_precision=True),
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


def _weights(model: Recommender) -> dict[str, Tensor]:
    """Copy the parameters by name; buffers are counted from the log again."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}
