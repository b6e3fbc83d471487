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

from models.compute.data_parallel import ALONE, Team
from models.compute.device import training_device
from models.data.interactions import Interactions
from models.evaluation.full_ranking import Metrics, evaluate
from models.evaluation.model_ranker import RecommenderRanker
from models.evaluation.splits import Holdout
from models.recommender.config import RecommenderConfig
from models.recommender.recommender import Recommender
from models.training.checkpoint import Best, CannotResume, Checkpoint, fingerprint
from models.training.count_statistics import memorise
from models.training.eta import Clock
from models.training.log_profile import questions
from models.training.losses import Losses
from models.training.stage import Pace, Stage, Trainer

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
    warmup: int = 200  # steps
    batch_tokens: int = 6_400  # padded positions
    attention_tokens: int = 1_600  # the same while the target attention is trained
    drop_id: float = 0.1  # items that lose their id for one step, so that text alone works
    request_time: float = 0.75  # share of windows that see the target's own time, as a service does
    average: float = 0.998  # decay of the running mean of the weights, which is what is served
    negatives: int = 4_096  # sampled beyond `full_softmax` items
    full_softmax: int = 20_000

    def in_baskets(self) -> TrainConfig:
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
class Progress:
    """Where training stands; handed to the callback after every step."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    seconds: float  # since the start
    left: float  # seconds, at the pace so far
    validation: Metrics | None  # the latest


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model and how it got there."""

    model: Recommender  # the best epoch's weights, in eval mode
    validation: Metrics | None
    epoch: int  # the one whose weights these are
    history: list[dict[str, float]]
    seconds: float


def fit(
    log: Interactions,
    content: NDArray[np.float32],
    *,
    shape: RecommenderConfig | None = None,
    config: TrainConfig = TrainConfig(),
    validation: Holdout | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    save: Callable[[bytes], None] | None = None,
    resume: bytes | None = None,
    team: Team = ALONE,
) -> Fitted:
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
    width = shape.content if shape else content.shape[-1]
    if content.shape != (log.n_items, width):
        raise ValueError(f"content must be [{log.n_items}, {width}], got {list(content.shape)}")
    if not np.isfinite(content).all():
        raise ValueError("content must be finite")
    shape = shape or RecommenderConfig(items=log.n_items, content=width)
    if shape.items != log.n_items:
        raise ValueError(f"the shape has {shape.items} items, the log {log.n_items}")
    shape = shape.typed(log.n_types, dislike=log.dislike, disliked=bool(log.disliked.any()))
    shape = replace(shape, **questions(log, validation)._asdict())
    config = config.in_baskets() if shape.baskets else config
    if np.any(log.weights <= 0):
        raise ValueError("weights must be greater than 0: they enter as their logarithm")
    if not np.any(~log.disliked & (log.positions > 0)):
        raise ValueError("no user has two events: there is nothing to learn an order from")
    device = training_device(team.rank)
    on_gpu = device.type == "cuda"
    # As a context a device costs every call a little: only where it is not the default anyway.
    with torch.random.fork_rng([device] if on_gpu else []), device if on_gpu else nullcontext():
        torch.manual_seed(seed)
        run = _Run(log, content, shape, config, validation, seed, progress, save, team)
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
        progress: Callable[[Progress], None] | None,
        save: Callable[[bytes], None] | None,
        team: Team,
    ) -> None:
        self._log, self._content, self._config = log, content, config
        self._seed, self._team = seed, team
        self._progress = progress if team.leads else None
        self._save = save if team.leads else None
        self._name = fingerprint(log, content, validation, shape, config, seed)
        with torch.device("cpu"):  # drawn there, so that the seed means the same everywhere
            self._model = Recommender(shape)
            memorise(self._model, log)
        self._model.to(training_device(team.rank))
        self._losses = Losses(
            self._model,
            log,
            content,
            drop_id=config.drop_id,
            request_time=config.request_time,
            full_softmax=config.full_softmax,
            negatives=config.negatives,
        )
        if validation is not None and len(validation) > config.validation_users:
            chosen = np.zeros(len(validation), dtype=np.bool_)
            drawn = np.random.default_rng(seed).permutation(len(validation))
            chosen[drawn[: config.validation_users]] = True
            validation = validation.where(chosen)
        # Of no cases every figure is nan, and no epoch the best.
        self._validation = validation if validation is not None and len(validation) else None
        self._best = Best()
        self._latest: Metrics | None = None
        self._history: list[dict[str, float]] = []
        self._clock = Clock()

    def fit(self, resume: Checkpoint | None) -> Fitted:
        """All stages, from the checkpoint on. Raises `CannotResume` for one of another run."""
        if resume is not None and resume.run != self._name:
            raise CannotResume("the checkpoint is of another training: other events or settings")
        stages = self._stages()
        names = [stage.name for stage in stages]
        for stage in stages[names.index(resume.stage) if resume is not None else 0 :]:
            self._stage(stage, stages, resume)
            resume = None
        return Fitted(
            model=self._model.requires_grad_(True).eval().cpu(),
            validation=self._best.metrics,
            epoch=self._best.epoch,
            history=self._history,
            seconds=self._clock.seconds,
        )

    def _stages(self) -> list[Stage]:
        model, config = self._model, self._config
        attention: list[nn.Module] = [model.norm, model.cross, model.recency]
        if model.kind_bias is not None:
            attention.append(model.kind_bias)
        rest = [part for part in model.children() if part not in attention]
        if model.encoder is None:
            tokens = config.attention_tokens
            return [Stage("attention", config.epochs, tokens, [*rest, *attention], prior=True)]
        stages = [Stage("sequence", config.epochs, config.batch_tokens, rest, prior=True)]
        if config.attention_epochs:
            epochs, tokens = config.attention_epochs, config.attention_tokens
            stages.append(Stage("attention", epochs, tokens, attention, prior=False))
        return stages

    def _stage(self, stage: Stage, stages: list[Stage], resume: Checkpoint | None) -> None:
        """Train what the stage learns; the model ends as the best epoch so far left it."""
        config, model = self._config, self._model
        model.requires_grad_(False)
        for part in stage.learns:
            part.requires_grad_(True)
        for prior in (model.prior, model.new_prior, model.trend):
            if prior is not None:
                prior.requires_grad_(stage.prior)
        pace = Pace(config.learning_rate, config.warmup, config.average)
        streams = (self._seed, stages.index(stage))
        trainer = Trainer(model, self._log, stage, pace, streams, self._team)
        before = sum(earlier.epochs for earlier in stages[: stages.index(stage)])
        total = sum(each.epochs for each in stages)
        first, stale = 1, 0
        if resume is not None:
            first, stale = resume.epoch + 1, resume.stale
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
                        Progress(
                            before + epoch,
                            total,
                            step,
                            steps,
                            loss,
                            self._clock.seconds,
                            self._clock.left(share),
                            self._latest,
                        )
                    )
            record = {"epoch": float(before + epoch), "loss": loss}
            due = epoch % config.validate_every == 0 or epoch == stage.epochs
            if self._validation is not None and (due or stage.name == "attention"):
                self._latest = metrics = self._validate(trainer.mean, self._validation)
                record |= {"hr": metrics.hr, "ndcg": metrics.ndcg}
                if self._best.metrics is None or metrics.ndcg > self._best.metrics.ndcg:
                    self._best = Best(_weights(trainer.mean), before + epoch, metrics)
                    stale = 0
                else:
                    stale += 1
            elif self._validation is None:
                self._best = Best(_weights(trainer.mean), before + epoch, None)
            self._history.append(record)
            if self._save is not None:
                self._save(self._checkpoint(stage, epoch, stale, trainer).to_bytes())
        model.load_state_dict(self._best.weights, strict=False)

    def _validate(self, model: Recommender, cases: Holdout) -> Metrics:
        ranker = RecommenderRanker(model, self._content, narrow=True)
        new = not model.config.again
        return evaluate(ranker, cases, exclude_seen=new, batch=_CASES, team=self._team)

    def _checkpoint(self, stage: Stage, epoch: int, stale: int, trainer: Trainer) -> Checkpoint:
        return Checkpoint(
            run=self._name,
            stage=stage.name,
            epoch=epoch,
            stale=stale,
            weights=_weights(self._model),
            mean=_weights(trainer.mean),
            trainer=trainer.state(),
            best=self._best,
            latest=self._latest,
            history=self._history,
        )

    def _restore(self, trainer: Trainer, kept: Checkpoint) -> None:
        self._model.load_state_dict(kept.weights, strict=False)
        trainer.mean.load_state_dict(kept.mean, strict=False)
        trainer.restore(kept.trainer)
        self._best, self._latest = kept.best, kept.latest
        self._history = list(kept.history)


def _weights(model: Recommender) -> dict[str, Tensor]:
    """A copy of the parameters by name; what was counted is counted again."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}
