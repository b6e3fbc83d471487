"""Training of a model on a log: fit, evaluate, publish."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.data_parallel import DataParallelGroup
from models.data.interactions import Interactions
from models.evaluation.splits import Holdout
from models.recommender.artifact import TrainedModel
from models.training.checkpoint import CheckpointError
from models.training.fit import fit
from models.training.log_profile import hold_out
from models.training.presets import Preset
from models.training.training_run import TrainingProgress, TrainingResult
from service.domain.errors import ModelRejected
from service.runtime import durable_files
from service.runtime.memory import trim
from service.snapshots.registry import Registry
from service.training.gate import JUDGED_FILE, CurrentModel, decide, judged_file
from service.training.judgement import judge
from service.training.process_group import is_rank_zero, process_count, process_group
from service.training.training_corpus import StageProgressCallback, TrainingCorpus
from service.training.verdict_sentence import training_sentence

_log = logging.getLogger(__name__)

_TRIM_INTERVAL = 32  # steps between two returns of freed memory to the system
MIN_EVENTS = 100  # with fewer, a model is no better than content and popularity


def train(
    corpus: TrainingCorpus,
    registry: Registry,
    encoder: str,
    *,
    preset: Preset,
    seed: int = 0,
    activate: bool = True,
    caller_activates: bool = False,
    progress: StageProgressCallback | None = None,
    checkpoint: Path | None = None,
    processes: int | None = None,
    announce: Callable[[Preset], None] | None = None,
    count_forgotten: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Fit on all but each user's last events, evaluate on these, publish what ranks them best.

    What is published has been trained on these events too, in the training's final epochs: they
    are the newest that there are, and of a short history many. It becomes current only if it is
    better than what is served, by `service.training.gate`.

    Collective over the shards of the corpus's log: their processes train and judge together, and
    the first one publishes.

    Args:
        corpus: the log and the texts of its items.
        registry: to publish the model in.
        encoder: name of the text encoder.
        preset: configuration of the model and of its training.
        seed: of the training.
        activate: make the model current if it is better than what is served.
        caller_activates: the caller does so, if the verdict is that it `is_served`.
        progress: called as the training proceeds.
        checkpoint: file of the training's state, written after every epoch. An existing one of the
            same events and settings is resumed. It is removed at the end.
        processes: number of processes that share the work; by default the fastest number. Of a log
            in shards they are those of the shards.
        announce: called before the training, with the preset as it is for these events.
        count_forgotten: returns the number of users who were forgotten since the corpus was read;
            the model has learned from them, and its metadata have the number.

    Returns:
        dict: the version, its metrics and those of the baselines, the verdict, and a sentence that
            says it; empty in processes other than rank 0.

    Raises:
        ModelRejected: there are too few events, or popularity, which is served without a model
            too, ranks as well; nothing is published.
    """
    if corpus.events < MIN_EVENTS:
        raise ModelRejected(
            f"{corpus.events} events are too few to train on; {MIN_EVENTS} are needed"
        )
    # The newest events are the validation cases: the service has no use for a test set.
    history, cases = hold_out(corpus.log)
    if not corpus.log.shards.any(len(cases) > 0):
        raise ModelRejected(_without_cases(corpus.log))
    used = preset.as_trained(history, cases)
    if announce is not None:
        announce(used)
    fitted = fit_model(
        history,
        corpus.content,
        cases,
        preset,
        seed,
        progress,
        checkpoint,
        processes,
        every_event=corpus.log,
    )
    # Seen items are candidates as in the choice of the epoch.
    exclude_seen = not fitted.model.config.repeat_consumption
    found = judge(
        fitted,
        corpus.content,
        history,
        corpus.log,
        cases,
        log=corpus.log,
        exclude_seen=exclude_seen,
        progress=progress,
    )
    if progress is not None:
        progress("comparing with what is served", 0, 0, None)
    served = CurrentModel.read(registry, encoder, corpus.log.shards)
    verdict = decide(found, corpus, served, exclude_seen=exclude_seen)
    if not (activate or caller_activates):
        verdict = replace(verdict, is_served=False)
    judged = judged_file(found, corpus, exclude_seen=exclude_seen)
    outcome, item_counts = found.as_dict(), corpus.log.liked().total_item_counts()
    if not (is_rank_zero() and corpus.log.shards.is_first):
        return {}
    if found.popular_is_best:
        _remove_checkpoint(checkpoint)
        asked = found.next
        raise ModelRejected(
            f"the model reaches NDCG@10 {asked.heed.ndcg:.4f} on held-out events, {asked.best} "
            f"{asked.baselines[asked.best].ndcg:.4f}: it is not published, and "
            f"{'popularity' if served is None else served.version} stays served"
        )
    outcome |= {
        "verdict": verdict.as_dict(),
        "has_times": corpus.has_times,
        "without_time": corpus.without_time,
        "epochs": len(fitted.history),
        "epochs_asked": preset.train_config.asked_epochs,
    }
    outcome["sentence"] = training_sentence(outcome)
    metadata = {
        "preset": preset.name,
        "epoch": fitted.epoch,
        "seconds": round(fitted.seconds, 1),
        "seed": seed,
        "weights": fitted.weights._asdict(),
        "model_config": found.model.config.as_dict(),
    }
    if len(corpus.shard_events) > 1:
        metadata["shard_events"] = list(corpus.shard_events)
    if count_forgotten is not None and (forgotten := count_forgotten()):
        metadata["forgotten_users"] = forgotten
        _log.warning(
            "%d users were forgotten while the model was trained, and are in its training set; the "
            "next training leaves them out",
            forgotten,
        )
    trained = TrainedModel(
        found.model,
        corpus.item_ids,
        item_counts,
        encoder,
        metadata,
        corpus.types[: found.model.config.n_event_types],
    )
    size = {"items": len(corpus.item_ids), "events": corpus.events}
    version = registry.publish(
        {**trained.to_files(), JUDGED_FILE: judged},
        {**outcome, **size, **metadata},
        activate=activate and verdict.is_served,
    )
    _remove_checkpoint(checkpoint)
    return {
        "version": version,
        **outcome,
        "seconds": fitted.seconds,
        "preset": str(used),
    }


def _without_cases(log: Interactions) -> str:
    """Say why no event can be held out."""
    if not len(log.liked()) and len(log):
        return (
            "every event is a dislike or a return: without an event of another type there is "
            "nothing to recommend by"
        )
    liked = " that are no dislikes or returns" if log.disliked.any() else ""
    return f"no user has three events{liked}: one is held out, and two are needed to learn from"


def fit_model(
    log: Interactions,
    content: NDArray[np.float32],
    cases: Holdout | None,
    preset: Preset,
    seed: int,
    progress: StageProgressCallback | None,
    checkpoint: Path | None = None,
    processes: int | None = None,
    *,
    every_event: Interactions | None = None,
) -> TrainingResult:
    """Call `models.training.fit.fit` in each of the processes that share the work or the log.

    The arguments are as in `train` and in `fit`; content is [N, D]. Raises `ProcessGroupError`
    when a process of the group ended early.
    """
    work = (log, content, cases, preset, seed, every_event)
    if log.shards.count > 1:
        return _fit(
            DataParallelGroup(log.shards.index, log.shards.count), *work, progress, checkpoint
        )
    size = processes or process_count(
        torch.get_num_threads(),
        tokens=preset.train_config.batch_tokens,
        work=len(log) * preset.train_config.epochs,
        weights=log.n_items * preset.dim,
    )
    with process_group(size, _fit, *work) as group:
        return _fit(group, *work, progress, checkpoint)


def _fit(
    group: DataParallelGroup,
    log: Interactions,
    content: NDArray[np.float32],
    cases: Holdout | None,
    preset: Preset,
    seed: int,
    every_event: Interactions | None = None,
    progress: StageProgressCallback | None = None,
    checkpoint: Path | None = None,
) -> TrainingResult:
    """Take part in a training, or in the rest of one whose checkpoint exists."""
    announces_resumption = False

    def on_step(step: TrainingProgress) -> None:
        nonlocal announces_resumption
        if announces_resumption and progress is not None:  # the checkpoint has proved to fit
            announces_resumption = False
            progress("resuming from the checkpoint", 0, 0, None)
        if step.step % _TRIM_INTERVAL == 0:
            trim()
        if progress is not None:
            done = (step.epoch - 1) * step.steps + step.step
            progress("training", done, step.epochs * step.steps, step)

    run = partial(
        fit,
        log,
        content,
        model_config=preset.model_config(log.n_items, content.shape[1]),
        train_config=preset.train_config,
        validation=cases,
        every_event=every_event,
        seed=seed,
        progress=on_step,
        save=None if checkpoint is None else partial(_write_checkpoint, checkpoint),
        group=group,
    )
    exists = checkpoint is not None and checkpoint.exists()
    data = group.broadcast(lambda: checkpoint.read_bytes() if checkpoint and exists else None)
    if data is not None:
        announces_resumption = True
        try:
            return run(resume=data)
        except CheckpointError as error:
            announces_resumption = False
            if group.is_rank_zero:
                _log.warning("training starts from the beginning: %s", error)
    return run()


def _write_checkpoint(checkpoint: Path, data: bytes) -> None:
    """Write the checkpoint if the disk has room: training can proceed without one."""
    try:
        durable_files.replace(checkpoint, data)
    except OSError as error:
        _log.warning("the checkpoint could not be written: %s", error)


def _remove_checkpoint(checkpoint: Path | None) -> None:
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
