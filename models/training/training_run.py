"""A training: its stages, the validation that chooses the epoch, and its checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.compute.data_parallel import DataParallelGroup
from models.compute.device import training_device
from models.compute.progress import Stopwatch
from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout, draw_cases
from models.recommender.recommender import Recommender, RecommenderConfig
from models.training.checkpoint import BestEpoch, Checkpoint, CheckpointError, fingerprint
from models.training.count_statistics import fit_statistics, update_statistics
from models.training.held_out_weights import (
    HeldOutWeights,
    apply_held_out_weights,
    fit_held_out_weights,
)
from models.training.losses import TrainingLosses
from models.training.stage import Stage, StageTrainer
from models.training.train_config import TrainConfig

_VALIDATION_BATCH = 64  # cases, few enough for all ranks to have about as many batches


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a running training, passed to the callback after every step."""

    epoch: int  # from 1, of all stages together
    epochs: int  # that there will be, if no further stage stops early
    step: int  # of the epoch, from 1
    steps: int
    loss: float  # mean of the epoch so far
    remaining: float  # seconds, at the pace so far
    validation: RankingMetrics | None  # the latest


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A trained model and its validation history."""

    model: Recommender  # in eval mode, trained on all events that the training was given
    validated: Recommender  # with the best epoch's weights; `model` itself without final epochs
    validation: RankingMetrics | None  # of `validated`, on at most `validation_users` cases
    epoch: int  # the best one
    weights: HeldOutWeights  # of the parts of the score, as the validation cases chose them
    history: list[dict[str, float]]
    seconds: float


class TrainingRun:
    """One training: its model, losses and best epoch so far."""

    def __init__(
        self,
        log: Interactions,
        content: NDArray[np.float32],
        model_config: RecommenderConfig,
        config: TrainConfig,
        validation: Holdout | None,
        every_event: Interactions | None,
        seed: int,
        progress: Callable[[TrainingProgress], None] | None,
        save: Callable[[bytes], None] | None,
        group: DataParallelGroup,
    ) -> None:
        self._log, self._content, self._config = log, content, config
        self._every_event = every_event
        self._seed, self._group = seed, group
        self._progress = progress if group.is_rank_zero else None
        self._save = save if group.is_rank_zero else None
        self._fingerprint = fingerprint(
            [log] if every_event is None else [log, every_event],
            content,
            validation,
            model_config,
            config,
            seed,
        )
        with torch.device("cpu"):  # so that a seed gives the same initial weights on any device
            self._model = Recommender(model_config)
            for part in self._model.parameters():  # machines may draw them differently
                log.shards.broadcast_tensor(part.detach())
            fit_statistics(self._model, log)
        self._model.to(training_device(group.rank))
        self._validation: Holdout | None = None
        self._weight_cases: Holdout | None = None
        # Without cases every metric is nan, and no epoch would be the best.
        if validation is not None and log.shards.any(len(validation) > 0):
            self._validation = draw_cases(validation, config.validation_users, seed)
            # The epoch is the best for the cases it was chosen by: more judge without favour.
            self._weight_cases = draw_cases(validation, config.weight_cases, seed)
        self._losses: TrainingLosses | None = None
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
        validated = self._model
        for stage in stages[names.index(resume.stage) if resume is not None else 0 :]:
            if stage.log is not self._log:
                if resume is not None:
                    self._model.load_state_dict(resume.best.weights, strict=False)
                validated = copy.deepcopy(self._model)
                update_statistics(self._model, self._log, stage.log)
            self._train(stage, stages, resume)
            resume = None
        validation = self._best.metrics
        weights = HeldOutWeights()
        if self._validation is not None and self._weight_cases is not None:
            weights = fit_held_out_weights(
                validated.eval(),
                self._content,
                self._weight_cases,
                self._log,
                batch_size=_VALIDATION_BATCH,
                group=self._group,
            )
            if self._model is not validated:
                apply_held_out_weights(self._model, weights, stages[-1].log, self._group)
            if weights.similarity or any(weights.offsets):
                validation = self._validate(validated, self._validation)
        return TrainingResult(
            model=_ready(self._model),
            validated=_ready(validated),
            validation=validation,
            epoch=self._best.epoch,
            weights=weights,
            history=self._history,
            seconds=self._stopwatch.seconds,
        )

    def _stages(self) -> list[Stage]:
        model, config, log = self._model, self._config, self._log
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
        if self._every_event is not None and config.final_epochs:
            stages.append(replace(final, log=self._every_event))
        return stages

    def _train(self, stage: Stage, stages: list[Stage], resume: Checkpoint | None) -> None:
        """Train one stage; the model ends with the weights of the best epoch so far.

        The final stage has no cases to validate, and ends with the weights of its last epoch.
        """
        config, model, number = self._config, self._model, stages.index(stage)
        is_final = stage.log is not self._log
        model.requires_grad_(False)
        for part in stage.modules:
            part.requires_grad_(True)
        for prior in (model.prior, model.new_prior, model.recent_popularity_weight):
            if prior is not None:
                prior.requires_grad_(stage.trains_prior)
        trainer = StageTrainer(model, stage, config, (self._seed, number), self._group)
        later = sum(each.epochs for each in stages[number + 1 :])
        first, validations_since_best = 1, 0
        if resume is not None:
            first, validations_since_best = resume.epoch + 1, resume.validations_since_best
            self._restore(trainer, resume)
        if self._losses is None or is_final:
            self._losses = TrainingLosses(model, stage.log, self._content, config)
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
                self._report(count, total, step, steps, mean)
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

    def _report(self, epoch: int, epochs: int, step: int, steps: int, loss: float) -> None:
        if self._progress is None:
            return
        remaining = self._stopwatch.remaining((epoch - 1 + step / steps) / epochs)
        self._progress(TrainingProgress(epoch, epochs, step, steps, loss, remaining, self._latest))

    def _validate(self, model: Recommender, cases: Holdout) -> RankingMetrics:
        return evaluate(
            ModelRanker(model, self._content, reduced_precision=True, two_stage=True),
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
    """Return the model on the CPU, in eval mode."""
    return model.requires_grad_(True).eval().cpu()


def _weights(model: Recommender) -> dict[str, Tensor]:
    """Copy the parameters by name; buffers are counted from the log again."""
    return {name: part.detach().clone() for name, part in model.named_parameters()}
