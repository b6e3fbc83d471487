"""`fit`: trains a recommender on an event log, with validation, early stop and progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.compute.device import training_device
from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.config import RecommenderConfig
from models.recommender.recommender import Recommender
from models.training.checkpoint import BestEpoch, Checkpoint, CheckpointError, fingerprint
from models.training.count_statistics import fit_statistics
from models.training.eta import Stopwatch
from models.training.log_profile import prediction_task
from models.training.losses import TrainingLosses
from models.training.stage import Stage, StageSchedule, StageTrainer

_CASES = 64  # of the validation at once, few enough for the members of a team to have alike many
_ALIKE = 4  # times smaller batches are where targets come in baskets


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How to train. Every default was chosen on validation data."""

    epochs: int = 20  # of the encoder, the item tower and the transitions
    attention_epochs: int = 1  # of the target attention, the rest held still
    patience: int = 3  # validations without a better NDCG before training stops
    validate_every: int = 2  # epochs
    validation_users: int = 3_000  # at most, drawn once under the seed
    learning_rate: float = 1e-3
    warmup_steps: int = 200  # steps
    batch_tokens: int = 6_400  # padded positions
    attention_batch_tokens: int = 1_600  # the same while the target attention is trained
    id_dropout: float = 0.1  # items that lose their id for one step, so that text alone works
    request_time_share: float = (
        0.75  # share of windows that see the target's own time, as a service does
    )
    ema_decay: float = 0.998  # decay of the running mean of the weights, which is what is served
    sampled_negatives: int = 4_096  # sampled beyond `full_softmax` items
    full_softmax_items: int = 20_000

    def for_next_basket(self) -> TrainConfig:
        """The same for a model that is asked for baskets.

        Targets of one basket ask one question, so that a batch of the same size asks fewer: they
        are smaller, and with the more steps that makes, half of the epochs do.
        """
        return replace(
            self,
            epochs=max(1, self.epochs // 2),
            validate_every=1,
            batch_tokens=max(1, self.batch_tokens // _ALIKE),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where training stands; handed to the callback after every step."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    seconds: float  # since the start
    remaining: float  # seconds, at the pace so far
    validation: RankingMetrics | None  # the latest


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A trained model and how it got there."""

    model: Recommender  # the best epoch's weights, in eval mode
    validation: RankingMetrics | None
    epoch: int  # the one whose weights these are
    history: list[dict[str, float]]
    seconds: float


def fit(
    log: Interactions,
    content: NDArray[np.float32],
    *,
    model_config: RecommenderConfig | None = None,
    train_config: TrainConfig = TrainConfig(),
    validation: Holdout | None = None,
    seed: int = 0,
    progress: Callable[[TrainingProgress], None] | None = None,
    save: Callable[[bytes], None] | None = None,
    resume: bytes | None = None,
    group: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a recommender by full cross-entropy over the catalogue at every event.

    First the encoder, the item tower and the transitions; then the target attention on top, the
    rest held still. Beyond `config.full_softmax` items the partition function is estimated from
    uniform negatives and the batch's own targets, each stratum with its exact weight.

    Args:
        log: the events to learn from.
        content: text embeddings of all items [log.n_items, d]; zero rows for items without text.
        shape: the model's shape; by default one for this number of items and this d. The types of
            events are the log's, whatever it says of them.
        config: how to train.
        validation: cases to choose the epoch on; without them the last epoch is taken.
        seed: the same seed, data, thread count and size of the team give the same model.
        progress: called after every step, in the leader alone.
        save: called after every epoch with what `resume` takes, in the leader alone.
        resume: goes on from there, to the same model as if it had not been interrupted.
        team: the processes that train together, each with the same arguments.

    Raises:
        ValueError: when no user has two events, the later of them liked, content or shape do not
            fit the log, content is not finite, or a weight is not greater than 0.
        CannotResume: when `resume` is damaged or of another training.
    """
    width = model_config.content_dim if model_config else content.shape[-1]
    if content.shape != (log.n_items, width):
        raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
    if not np.isfinite(content).all():
        raise ValueError("content must be finite")
    model_config = model_config or RecommenderConfig(n_items=log.n_items, content_dim=width)
    if model_config.n_items != log.n_items:
        raise ValueError(f"the shape has {model_config.n_items} items, the log {log.n_items}")
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
    # As a context a device costs every call a little: only where it is not the default anyway.
    with torch.random.fork_rng([device] if on_gpu else []), device if on_gpu else nullcontext():
        torch.manual_seed(seed)
        run = _Run(
            log, content, model_config, train_config, validation, seed, progress, save, group
        )
        return run.fit(None if resume is None else Checkpoint.from_bytes(resume))


class _Run:
    """One training run."""

    def __init__(
        self,
        log: Interactions,
        content: NDArray[np.float32],
        shape: RecommenderConfig,
        config: TrainConfig,
        validation: Holdout | None,
        seed: int,
        progress: Callable[[TrainingProgress], None] | None,
        save: Callable[[bytes], None] | None,
        group: DataParallelGroup,
    ) -> None:
        self._log, self._content, self._config = log, content, config
        self._seed, self._team = seed, group
        self._progress = progress if group.is_rank_zero else None
        self._save = save if group.is_rank_zero else None
        self._name = fingerprint(log, content, validation, shape, config, seed)
        with torch.device("cpu"):  # drawn there, so that the seed means the same everywhere
            self._model = Recommender(shape)
            fit_statistics(self._model, log)
        self._model.to(training_device(group.rank))
        self._losses = TrainingLosses(
            self._model,
            log,
            content,
            id_dropout=config.id_dropout,
            request_time_share=config.request_time_share,
            full_softmax_items=config.full_softmax_items,
            sampled_negatives=config.sampled_negatives,
        )
        if validation is not None and len(validation) > config.validation_users:
            chosen = np.zeros(len(validation), dtype=np.bool_)
            drawn = np.random.default_rng(seed).permutation(len(validation))
            chosen[drawn[: config.validation_users]] = True
            validation = validation.where(chosen)
        # Of no cases every figure is nan, and no epoch the best.
        self._validation = validation if validation is not None and len(validation) else None
        self._best = BestEpoch()
        self._latest: RankingMetrics | None = None
        self._history: list[dict[str, float]] = []
        self._clock = Stopwatch()

    def fit(self, resume: Checkpoint | None) -> TrainingResult:
        """All stages, from the checkpoint on. Raises `CannotResume` for one of another run."""
        if resume is not None and resume.run != self._name:
            raise CheckpointError("the checkpoint is of another training: other events or settings")
        stages = self._stages()
        names = [stage.name for stage in stages]
        for stage in stages[names.index(resume.stage) if resume is not None else 0 :]:
            self._stage(stage, stages, resume)
            resume = None
        return TrainingResult(
            model=self._model.requires_grad_(True).eval().cpu(),
            validation=self._best.metrics,
            epoch=self._best.epoch,
            history=self._history,
            seconds=self._clock.seconds,
        )

    def _stages(self) -> list[Stage]:
        model, config = self._model, self._config
        attention: list[nn.Module] = [model.item_norm, model.cross_attention, model.recency]
        if model.type_bias is not None:
            attention.append(model.type_bias)
        rest = [part for part in model.children() if part not in attention]
        if model.encoder is None:
            tokens = config.attention_batch_tokens
            return [
                Stage("attention", config.epochs, tokens, [*rest, *attention], trains_prior=True)
            ]
        stages = [Stage("sequence", config.epochs, config.batch_tokens, rest, trains_prior=True)]
        if config.attention_epochs:
            epochs, tokens = config.attention_epochs, config.attention_batch_tokens
            stages.append(Stage("attention", epochs, tokens, attention, trains_prior=False))
        return stages

    def _stage(self, stage: Stage, stages: list[Stage], resume: Checkpoint | None) -> None:
        """Train what the stage learns; the model ends as the best epoch so far left it."""
        config, model = self._config, self._model
        model.requires_grad_(False)
        for part in stage.modules:
            part.requires_grad_(True)
        for prior in (model.prior, model.new_prior, model.recent_popularity_weight):
            if prior is not None:
                prior.requires_grad_(stage.trains_prior)
        pace = StageSchedule(config.learning_rate, config.warmup_steps, config.ema_decay)
        streams = (self._seed, stages.index(stage))
        trainer = StageTrainer(model, self._log, stage, pace, streams, self._team)
        before = sum(earlier.epochs for earlier in stages[: stages.index(stage)])
        total = sum(each.epochs for each in stages)
        first, stale = 1, 0
        if resume is not None:
            first, stale = resume.epoch + 1, resume.validations_since_best
            self._restore(trainer, resume)
        loss_of = self._losses.sequence if stage.name == "sequence" else self._losses.attention
        for epoch in range(first, stage.epochs + 1):
            if stale >= config.patience:
                break
            loss = 0.0
            for step, steps, loss in trainer.epoch(epoch, loss_of):
                if self._progress is not None:
                    share = (before + epoch - 1 + step / steps) / total
                    self._progress(
                        TrainingProgress(
                            before + epoch,
                            total,
                            step,
                            steps,
                            loss,
                            self._clock.seconds,
                            self._clock.remaining(share),
                            self._latest,
                        )
                    )
            record = {"epoch": float(before + epoch), "loss": loss}
            due = epoch % config.validate_every == 0 or epoch == stage.epochs
            if self._validation is not None and (due or stage.name == "attention"):
                self._latest = metrics = self._validate(trainer.ema, self._validation)
                record |= {"hr": metrics.hr, "ndcg": metrics.ndcg}
                if self._best.metrics is None or metrics.ndcg > self._best.metrics.ndcg:
                    self._best = BestEpoch(_weights(trainer.ema), before + epoch, metrics)
                    stale = 0
                else:
                    stale += 1
            elif self._validation is None:
                self._best = BestEpoch(_weights(trainer.ema), before + epoch, None)
            self._history.append(record)
            if self._save is not None:
                self._save(self._checkpoint(stage, epoch, stale, trainer).to_bytes())
        model.load_state_dict(self._best.weights, strict=False)

    def _validate(self, model: Recommender, cases: Holdout) -> RankingMetrics:
        ranker = ModelRanker(model, self._content, reduced_precision=True)
        new = not model.config.repeat_consumption
        return evaluate(ranker, cases, exclude_seen=new, batch_size=_CASES, group=self._team)

    def _checkpoint(
        self, stage: Stage, epoch: int, stale: int, trainer: StageTrainer
    ) -> Checkpoint:
        return Checkpoint(
            run=self._name,
            stage=stage.name,
            epoch=epoch,
            validations_since_best=stale,
            weights=_weights(self._model),
            ema=_weights(trainer.ema),
            optimiser=trainer.state(),
            best=self._best,
            latest=self._latest,
            history=self._history,
        )

    def _restore(self, trainer: StageTrainer, kept: Checkpoint) -> None:
        self._model.load_state_dict(kept.weights, strict=False)
        trainer.ema.load_state_dict(kept.ema, strict=False)
        trainer.restore(kept.optimiser)
        self._best, self._latest = kept.best, kept.latest
        self._history = list(kept.history)


def _weights(model: Recommender) -> dict[str, Tensor]:
    """A copy of the parameters by name; what was counted is counted again."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}
