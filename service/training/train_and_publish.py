"""From a log to a published model: fit, judge, publish."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.data_parallel import DataParallelGroup
from models.data.interactions import Interactions
from models.evaluation.baselines import Popularity
from models.evaluation.full_ranking import RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.artifact import TrainedModel
from models.training.checkpoint import CheckpointError
from models.training.fit import TrainingProgress, TrainingResult, fit
from models.training.log_profile import hold_out
from models.training.presets import Preset
from service.domain.errors import ModelRejected
from service.runtime import durable_files
from service.runtime.malloc_trim import trim
from service.snapshots.registry import Registry
from service.training.process_group import fitting, leads, team
from service.training.training_corpus import Corpus, StageProgressCallback

_log = logging.getLogger(__name__)

_TRIMMED = 32  # steps between two givings back of freed memory
ENOUGH_EVENTS = 100  # fewer say nothing that content does not say better


def train(
    corpus: Corpus,
    registry: Registry,
    encoder: str,
    *,
    preset: Preset,
    seed: int = 0,
    activate: bool = True,
    told: StageProgressCallback | None = None,
    checkpoint: Path | None = None,
    processes: int | None = None,
) -> dict[str, Any]:
    """Fit on all but what each user did last, judge on that, publish what beats popularity.

    Args:
        corpus: what is learned from.
        registry: where the model is published.
        encoder: the name of the text encoder.
        preset: the model's shape and its training.
        seed: of the training.
        activate: whether the model becomes current.
        told: called as work goes on.
        checkpoint: where the training's state is kept after every epoch; one that is there, of the
            same events and settings, is gone on from. It is removed at the end.
        processes: that share the work; by default as many as make it faster.

    Returns:
        dict: the version and its metrics; nothing in a process that another leads.

    Raises:
        ModelRejected: when there is too little to learn from, or the model does not beat
            popularity; nothing is published.
    """
    if len(corpus.log) < ENOUGH_EVENTS:
        raise ModelRejected(
            f"{len(corpus.log)} events are too few to train on; {ENOUGH_EVENTS} are needed"
        )
    # What is newest is the validation: the service has no use for a test set.
    history, cases = hold_out(corpus.log)
    if not len(cases):
        raise ModelRejected("no user has three events: there is no order to learn or to judge by")
    done = fitted(history, corpus.content, cases, preset, seed, told, checkpoint, processes)
    if not leads():
        return {}
    new = not done.model.config.repeat_consumption  # as the epoch was chosen
    popularity = evaluate(Popularity.fit(history), cases, exclude_seen=new)
    ranker = ModelRanker(done.model, corpus.content)
    judged = evaluate(ranker, cases, exclude_seen=new)
    metrics = _numbers(judged) | {
        "popularity_ndcg": popularity.ndcg,
        "popularity_hr": popularity.hr,
    }
    if judged.ndcg <= popularity.ndcg:
        _forget(checkpoint)
        raise ModelRejected(
            f"the model reaches NDCG@10 {judged.ndcg:.4f} on validation, popularity "
            f"{popularity.ndcg:.4f}: it is not published"
        )
    trained = TrainedModel(
        done.model,
        corpus.item_ids,
        history.liked().item_counts(),
        encoder,
        _described(done, preset, seed),
        corpus.types[: done.model.config.n_event_types],
    )
    version = registry.publish(
        trained.to_files(),
        {"metrics": metrics, "items": len(corpus.item_ids), "events": len(corpus.log),
         **_described(done, preset, seed)},
        activate=activate,
    )  # fmt: skip
    _forget(checkpoint)
    return {
        "version": version,
        "metrics": metrics,
        "seconds": done.seconds,
        "preset": str(preset),
    }


def fitted(
    log: Interactions,
    content: NDArray[np.float32],
    cases: Holdout | None,
    preset: Preset,
    seed: int,
    told: StageProgressCallback | None,
    checkpoint: Path | None = None,
    processes: int | None = None,
) -> TrainingResult:
    """`models.training.fit.fit`, going on from the checkpoint where there is one of this training.

    Args:
        log: the events.
        content: text embeddings of the items.
        cases: of the validation.
        preset: the model's shape and its training.
        seed: of the training.
        told: called as work goes on.
        checkpoint: where the training's state is kept.
        processes: that share the work, this one among them; by default as many as make it faster.

    Raises:
        TeamBroken: when one of the processes ended early.
    """
    work = (log, content, cases, preset, seed)
    size = processes or fitting(
        torch.get_num_threads(),
        tokens=preset.train_config.batch_tokens,
        work=len(log) * preset.train_config.epochs,
        weights=log.n_items * preset.dim,
    )
    with team(size, _fit, *work) as members:
        return _fit(members, *work, told, checkpoint)


def _fit(
    members: DataParallelGroup,
    log: Interactions,
    content: NDArray[np.float32],
    cases: Holdout | None,
    preset: Preset,
    seed: int,
    told: StageProgressCallback | None = None,
    checkpoint: Path | None = None,
) -> TrainingResult:
    """What each of the processes does."""

    def pass_on(progress: TrainingProgress) -> None:
        if progress.step % _TRIMMED == 0:
            trim()
        if told is not None:
            _pass_on(told, progress)

    def run(resume: bytes | None) -> TrainingResult:
        return fit(
            log,
            content,
            model_config=preset.model_config(log.n_items, content.shape[1]),
            train_config=preset.train_config,
            validation=cases,
            seed=seed,
            progress=pass_on,
            save=None if checkpoint is None else lambda data: _keep(checkpoint, data),
            resume=resume,
            group=members,
        )

    def kept() -> bytes | None:
        if checkpoint is None or not checkpoint.exists():
            return None
        return checkpoint.read_bytes()

    data = members.broadcast(kept)
    if data is not None:
        if told is not None:
            told("going on from the checkpoint", 0, 0, None)
        try:
            return run(data)
        except CheckpointError as error:
            _log.warning("training starts anew: %s", error)
    return run(None)


def _keep(checkpoint: Path, data: bytes) -> None:
    """Training can go on without a checkpoint; what it publishes needs room of its own."""
    try:
        durable_files.replace(checkpoint, data)
    except OSError as error:
        _log.warning("the checkpoint could not be written: %s", error)


def _forget(checkpoint: Path | None) -> None:
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)


def _pass_on(told: StageProgressCallback, progress: TrainingProgress) -> None:
    done = (progress.epoch - 1) * progress.steps + progress.step
    told("training", done, progress.epochs * progress.steps, progress)


def _described(fitted: TrainingResult, preset: Preset, seed: int) -> dict[str, Any]:
    return {
        "preset": preset.name,
        "epoch": fitted.epoch,
        "seconds": round(fitted.seconds, 1),
        "seed": seed,
        "model_config": fitted.model.config.as_dict(),
    }


def _numbers(metrics: RankingMetrics) -> dict[str, float]:
    return {
        "hr": metrics.hr,
        "ndcg": metrics.ndcg,
        "mrr": metrics.mrr,
        "coverage": metrics.coverage,
        "cases": float(metrics.n_cases),
    }
