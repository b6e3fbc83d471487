"""Comparison of Heed with the baselines of an evaluation task, and ablation of its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.baselines import WeekPopularity, baseline_makers
from models.evaluation.full_ranking import Ranker, RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.training.fit import TrainingResult
from models.training.log_profile import has_repeat_consumption, hold_out_rule
from models.training.presets import Preset
from service.domain.errors import ModelRejected
from service.lab import protocols
from service.lab.protocols import EvaluationTask, of_new_items
from service.training.judgement import HEED, judge
from service.training.train_and_publish import fit_model
from service.training.training_corpus import StageProgressCallback


@dataclass(slots=True, eq=False)
class ModelResults:
    test: list[RankingMetrics] = field(default_factory=list)  # without the target's time
    # Given the target's time; empty for models that do not use it.
    test_with_time: list[RankingMetrics] = field(default_factory=list)
    validation: list[RankingMetrics] = field(default_factory=list)  # of trained models only
    seconds: list[float] = field(default_factory=list)  # of fitting
    # A training would serve these: Heed, or a baseline that is better; of trained models only.
    served: list[str] = field(default_factory=list)
    ranker: Ranker | None = None  # of the first seed
    # The same models' metrics for the task `of_new_items`, if there is one.
    new_items: ModelResults | None = None


Comparison = dict[str, ModelResults]
Protocol = Literal["newest", "leave-one-out", "hstu", "global-time"]


def new_items_table(table: Comparison) -> Comparison:
    """Return the metrics of the same models for the task `of_new_items`; empty if there is none."""
    return {name: row.new_items for name, row in table.items() if row.new_items is not None}


def split(
    log: Interactions,
    protocol: Protocol,
    *,
    dataset: str = "",
    date: int | None = None,
    seed: int = 0,
) -> list[EvaluationTask]:
    """Split a log of events into the evaluation tasks of a protocol, or of its data set.

    "newest" splits as a training does: by each user's last event, or last basket. In it and in
    "global-time", seen items are candidates if users take items again.

    Args:
        log: the events.
        protocol: of all but online-retail, which has the next basket and the next new items.
        dataset: the name of a public data set.
        date: of global-time, microseconds UTC; by default, nine tenths of the events come before.
        seed: of the draw of targets of global-time.

    Raises:
        ModelRejected: there is nothing to train, to validate or to test on.
    """
    try:
        if dataset == "online-retail" and protocol != "global-time":
            return [protocols.next_basket(log), protocols.next_basket(log, new_only=True)]
        if protocol == "leave-one-out":
            return [protocols.leave_one_out_5_core(log)]
        if protocol == "hstu":
            return [protocols.leave_one_out_hstu(log)]
        new_only = not has_repeat_consumption(log)
        if protocol == "global-time":
            return [protocols.global_time(log, date, seed=seed, exclude_seen=new_only)]
        return [protocols.newest(log, hold_out_rule(log), exclude_seen=new_only)]
    except ValueError as error:
        raise ModelRejected(str(error)) from error


def compare(
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    *,
    seeds: int = 1,
    first_seed: int = 0,
    ablate: bool = False,
    progress: StageProgressCallback = lambda *_: None,
) -> Comparison:
    """Fit and evaluate the baselines, Heed for each seed, and with `ablate` Heed without each part.

    All models are at last trained on all events but the test cases, the validation cases included.
    Published figures of the leave-one-out protocol are of models without the latter, and so is
    Heed without its final epochs.

    Args:
        task: from `service.lab.protocols`.
        content: text embeddings of the task's items [N, D].
        preset: of Heed's training.
        seeds: number of trainings.
        first_seed: seed of the first.
        ablate: also train without transitions, times, requests of either kind, text and encoder,
            with the first seed.
        progress: called as the trainings proceed.
    """
    table: Comparison = {}
    baselines = baseline_makers(task.log, exclude_seen=task.exclude_seen)
    for at, (name, make) in enumerate(baselines.items()):
        progress(f"baseline: {name}", at, len(baselines), None)
        started = time.monotonic()
        ranker = make(task.every_event)
        timed = isinstance(ranker, WeekPopularity)
        _judge(table, name, task, ranker, time.monotonic() - started, times=timed)
    for seed in range(first_seed, first_seed + seeds):
        done = _fit(task, content, preset, seed, progress)
        _judge_heed(table, task, content, done)
        if done.validated is not done.model:
            ranker = ModelRanker(done.validated, content)
            _judge(table, f"{HEED} without final epochs", task, ranker, done.seconds)
        if seed == first_seed and ablate:
            # The target's part of the queries is trained last: without it, the rest is unchanged.
            alone = ModelRanker(done.model, content, target_in_query=False)
            _judge(table, f"{HEED} without the target in the query", task, alone, done.seconds)
    if ablate:
        for name, changed, text, other in _ablations(task, content, preset):
            done = _fit(other, text, changed, first_seed, progress)
            _judge_ablation(table, f"{HEED} without {name}", other, text, done)
    return table


def _fit(
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    seed: int,
    progress: StageProgressCallback,
) -> TrainingResult:
    every_event = None if task.validation is None else task.every_event
    plan = preset.plan(task.train, content, task.validation, every_event=every_event, seed=seed)
    return fit_model(plan, progress)


def _ablations(
    task: EvaluationTask, content: NDArray[np.float32], preset: Preset
) -> Iterator[tuple[str, Preset, NDArray[np.float32], EvaluationTask]]:
    """Iterate over ablations of parts that are trained jointly: name, preset, content, task."""
    yield "transitions", replace(preset, transitions_per_item=0), content, task
    yield "times", preset, content, _timeless(task)
    # One model serves requests with and without a time; these are trained for one of both.
    for name, share in (("times of requests", 0.0), ("requests at no time", 1.0)):
        yield (
            name,
            replace(preset, train_config=replace(preset.train_config, request_time_share=share)),
            content,
            task,
        )
    yield "text", preset, np.zeros_like(content), task
    yield "the encoder", replace(preset, blocks=0), content, task


def _timeless(task: EvaluationTask) -> EvaluationTask:
    def log(timed: Interactions) -> Interactions:
        return replace(timed, timestamps=np.zeros_like(timed.timestamps))

    def cases(timed: Holdout) -> Holdout:
        return replace(
            timed, timestamps=np.zeros_like(timed.timestamps), history=log(timed.history)
        )

    return task._replace(
        train=log(task.train),
        validation=None if task.validation is None else cases(task.validation),
        every_event=log(task.every_event),
        test=cases(task.test),
    )


def _judge_heed(
    table: Comparison,
    task: EvaluationTask,
    content: NDArray[np.float32],
    done: TrainingResult,
) -> None:
    """Add the metrics of what a training would serve, as `heed train` chooses it."""
    if task.validation is None or not len(task.validation):
        _judge(table, HEED, task, ModelRanker(done.model, content), done.seconds)
        return
    found = judge(done, exclude_seen=task.exclude_seen)
    _judge(table, HEED, task, ModelRanker(found.model, content), done.seconds)
    for (row, _), chosen in zip(
        _questions(table[HEED], task), (found.next, found.new), strict=False
    ):
        row.served.append(found.served)
        if chosen is not None:
            row.validation.append(chosen.heed)


def _judge_ablation(
    table: Comparison,
    name: str,
    task: EvaluationTask,
    content: NDArray[np.float32],
    done: TrainingResult,
) -> None:
    """Add the metrics of a trained model; those of validation are without its final epochs."""
    _judge(table, name, task, ModelRanker(done.model, content), done.seconds)
    ranker = ModelRanker(done.validated, content)
    for row, asked in _questions(table[name], task):
        if asked.validation is not None:
            chosen = evaluate(ranker, asked.validation, exclude_seen=asked.exclude_seen)
            row.validation.append(chosen)


def _judge(
    table: Comparison,
    name: str,
    task: EvaluationTask,
    ranker: Ranker,
    seconds: float,
    *,
    times: bool = True,
) -> None:
    row = table.setdefault(name, ModelResults(ranker=ranker))
    for results, asked in _questions(row, task):
        judged = partial(
            evaluate,
            ranker,
            asked.test,
            exclude_seen=asked.exclude_seen,
            max_seen=asked.max_seen,
        )
        results.test.append(judged())
        if times:
            results.test_with_time.append(judged(use_target_time=True))
        results.seconds.append(seconds)


def _questions(
    row: ModelResults, task: EvaluationTask
) -> Iterator[tuple[ModelResults, EvaluationTask]]:
    """Iterate over a task and, if there is one, that of new items, with a model's row of each."""
    yield row, task
    if (other := of_new_items(task)) is not None:
        row.new_items = row.new_items or ModelResults()
        yield row.new_items, other
