"""Training of a model on a log: fit, evaluate, publish, and say what it was worth."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.compute.device import Processes
from models.data.interactions import Interactions
from models.recommender.artifact import TrainedModel
from models.training.checkpoint import CheckpointError
from models.training.fit import TrainingProgress, TrainingResult, fit
from models.training.log_profile import hold_out
from models.training.presets import Preset, TrainingPlan
from service.domain.errors import ModelRejected
from service.runtime import durable_files
from service.runtime.memory import trim
from service.snapshots.registry import Registry
from service.training.judgement import JUDGED_FILE, CurrentModel, decide, judge, judged_file
from service.training.process_group import process_count, process_group
from service.training.training_corpus import StageProgressCallback, TrainingCorpus

_ENOUGH = 100  # users, from which shares are said of 100


def training_sentence(result: Mapping[str, Any]) -> str:
    """Say how what was trained compares with what was served, and what is served now.

    `result` is the metadata of a model version, with the `verdict` of `service.training.judgement`.
    """
    found = result["verdict"]
    against, is_served = found["against"], found["is_served"]
    other = f"the best baseline, {against}"
    if found["against_model"]:
        other = f"{against}, served until now" if is_served else f"the served model {against}"
    elif against.startswith("popularity"):
        other = f"{against}, which answers without a model"
    subject, few = "", found["outcome"] == "unknown"
    if result["served"] != "heed":
        subject = f"{result['served']}, published in place of the trained model, is "
    if few:
        users = "1 user" if found["users"] == 1 else f"{found['users']} users"
        if found["against_model"]:
            users += " that the served model has not learned from"
        head = (
            f"The held-out events of {users} are too few to tell whether {subject or 'it is '}"
            f"better than {other}"
        )
    else:
        outcome = found["outcome"] if subject else found["outcome"].capitalize()
        head = f"{subject}{outcome} than {other}: {_figures(result)}"
    if not is_served:
        stays = against if found["against_model"] else "popularity"
        tail = f"{stays} stays served, and this version is kept: heed models activate serves it"
    elif found["against_model"] or found["outcome"] == "better":
        tail = "it is served"
    else:
        popular = result["metrics"]["popularity_ndcg"]
        tail = f"it is served, since popularity, which answers without a model, has {popular:.4f}"
    sentences = [f"{head}; {tail}.", _share_sentence(result), _epochs_sentence(result)]
    if result["has_times"] and (count := result["without_time"]):
        sentences.append(
            f"Events without a time of their own were learned from as older than all others: "
            f"{count:,}."
        )
    return " ".join(filter(None, sentences))


def _figures(result: Mapping[str, Any]) -> str:
    found = result["verdict"]
    cases = "held-out events" if result["has_times"] else "held-out events, drawn at random"
    if found["new_items"]:
        cases += " on items new to their user"
    if not result["has_times"]:
        cases += " since most have no time of their own"
    difference = found["ndcg"] - found["other"]
    return (
        f"NDCG@10 {found['ndcg']:.4f} instead of {found['other']:.4f} on {found['cases']:,} "
        f"{cases} (difference {difference:+.4f}, 95 % interval {found['low']:+.4f} to "
        f"{found['high']:+.4f})"
    )


def _share_sentence(result: Mapping[str, Any]) -> str:
    found = result.get("new_items", result)
    users, share = result["verdict"]["users"], found["metrics"]["user_hr"]
    if result["verdict"]["outcome"] == "unknown":
        return ""
    target = "the next item"
    if not result["has_times"]:
        target = "the held-out item"
    elif result["next_basket"]:
        target = "something of the next basket"
    if found is not result:
        target += " that is new to the user"
    return f"Its ten recommendations hold {target} for {share_of(users, share)}."


def _epochs_sentence(result: Mapping[str, Any]) -> str:
    trained, asked = result["epochs"], result["epochs_asked"]
    if asked is None or trained >= asked:
        return ""
    return (
        f"The training stopped after {trained} of {asked} epochs, since the validation did not "
        "improve any more."
    )


def share_of(users: int, share: float, name: str = "users") -> str:
    """Say a share of users, of 100 only if there are that many."""
    if users < _ENOUGH:
        return f"{share * users:.3g} of {users} {name}"
    return f"{100 * share:.0f} of 100 {name}"


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
    progress: StageProgressCallback = lambda *_: None,
    checkpoint: Path | None = None,
    processes: int | None = None,
    announce: Callable[[Preset], None] | None = None,
    count_forgotten: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Fit on all but each user's last events, evaluate on these, publish what ranks them best.

    The published model has been trained on these events too, in the final epochs: they are the
    newest that there are, and of a short history many. It becomes current only if
    `service.training.judgement` finds it better than what is served, and with `activate`;
    `caller_activates` leaves that to the caller, by `is_served` of the verdict.

    `checkpoint` is the file of the training's state, written after every epoch, resumed if it is of
    the same events and settings, and removed at the end. `processes` share the work, by default the
    fastest number. `announce` is called before the training with the preset as it is for these
    events. `count_forgotten` returns the number of users who were forgotten since the corpus was
    read: the model has learned from them, and its metadata have the number.

    Collective over the shards of the corpus's log: their processes train and judge together, and
    the first one publishes. Returns the version, its metrics and those of the baselines, the
    verdict, and a sentence that says it; nothing in processes other than rank 0. Raises
    ModelRejected, and publishes nothing, if there are too few events or popularity ranks as well.
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
    plan = preset.plan(history, corpus.content, cases, every_event=corpus.log, seed=seed)
    fitted = fit_model(plan, progress, checkpoint, processes)
    # Seen items are candidates as in the choice of the epoch.
    exclude_seen = not fitted.model.config.repeat_consumption
    found = judge(fitted, exclude_seen=exclude_seen, progress=progress)
    progress("comparing with what is served", 0, 0, None)
    served = CurrentModel.read(registry, encoder, corpus.log.shards)
    verdict = decide(found, corpus, served, exclude_seen=exclude_seen)
    if not (activate or caller_activates):
        verdict = replace(verdict, is_served=False)
    judged = judged_file(found, corpus, exclude_seen=exclude_seen)
    outcome, item_counts = found.as_dict(), corpus.log.liked().total_item_counts()
    if not corpus.log.shards.is_first:
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
    if not len(log.liked()) and len(log):
        return (
            "every event is a dislike or a return: without an event of another type there is "
            "nothing to recommend by"
        )
    liked = " that are no dislikes or returns" if log.disliked.any() else ""
    return f"no user has three events{liked}: one is held out, and two are needed to learn from"


def fit_model(
    plan: TrainingPlan,
    progress: StageProgressCallback = lambda *_: None,
    checkpoint: Path | None = None,
    processes: int | None = None,
) -> TrainingResult:
    """Call `models.training.fit.fit` in each of the processes that share the work or the log.

    Arguments are as in `train`. Raises `ProcessGroupError` when a process ended early.
    """
    shards, config = plan.log.shards, plan.train_config
    if shards.count > 1:
        return _fit(shards, plan, progress, checkpoint)
    size = processes or process_count(
        torch.get_num_threads(),
        tokens=config.batch_tokens,
        work=len(plan.log) * config.epochs,
        weights=plan.log.n_items * plan.model_config.dim,
    )
    with process_group(size, _fit, plan) as group:
        return _fit(group, plan, progress, checkpoint)


def _fit(
    group: Processes,
    plan: TrainingPlan,
    progress: StageProgressCallback = lambda *_: None,
    checkpoint: Path | None = None,
) -> TrainingResult:
    announces_resumption = False

    def on_step(step: TrainingProgress) -> None:
        nonlocal announces_resumption
        if announces_resumption:  # the checkpoint has proved to fit
            announces_resumption = False
            progress("resuming from the checkpoint", 0, 0, None)
        if step.step % _TRIM_INTERVAL == 0:
            trim()
        done = (step.epoch - 1) * step.steps + step.step
        progress("training", done, step.epochs * step.steps, step)

    save = None if checkpoint is None else partial(_write_checkpoint, checkpoint)
    run = partial(fit, plan, progress=on_step, save=save, group=group)
    exists = checkpoint is not None and checkpoint.exists()
    data = group.broadcast(lambda: checkpoint.read_bytes() if checkpoint and exists else None)
    if data is not None:
        announces_resumption = True
        try:
            return run(resume=data)
        except CheckpointError as error:
            announces_resumption = False
            if group.is_first:
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
