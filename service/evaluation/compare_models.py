"""Heed beside the baselines on a benchmark's terms, and what each of its parts is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.baselines import EASE, Popularity, Repeats, TransitionCounts
from models.evaluation.full_ranking import Metrics, Ranker, evaluate
from models.evaluation.model_ranker import RecommenderRanker
from models.evaluation.protocols import Task
from models.evaluation.splits import Holdout
from models.recommender.recommender import Recommender
from models.training.presets import Preset
from service.training.train_and_publish import fitted
from service.training.training_corpus import Told

HEED = "heed"


@dataclass(slots=True, eq=False)
class Row:
    """One model's figures, a list entry for each seed."""

    test: list[Metrics] = field(default_factory=list)  # the target's time not told
    told: list[Metrics] = field(default_factory=list)  # told; none for models that do not use it
    validation: list[Metrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of fitting
    ranker: Ranker | None = None  # of the first seed

    def ranks(self, *, told: bool = False) -> NDArray[np.int64]:
        """The ranks of all cases of all seeds, end to end."""
        return np.concatenate([metrics.ranks for metrics in (self.told if told else self.test)])


Table = dict[str, Row]


def compare(
    task: Task,
    content: NDArray[np.float32],
    preset: Preset,
    *,
    seeds: int = 1,
    first_seed: int = 0,
    ablate: bool = False,
    told: Told | None = None,
) -> Table:
    """Fit and judge the baselines, Heed for each seed, and with `ablate` Heed without each part.

    Args:
        task: from `models.evaluation.protocols`.
        content: text embeddings of the task's items [N, D].
        preset: of Heed's training.
        seeds: how many trainings.
        first_seed: the seed of the first.
        ablate: also train without transitions, times, requests of either kind, text and encoder,
            under the first seed.
        told: called as work goes on.
    """
    table: Table = {}
    for at, (name, make) in enumerate(_baselines(task).items()):
        if told is not None:
            told(f"baseline: {name}", at, len(_baselines(task)), None)
        started = time.monotonic()
        ranker = make(task.train)
        seconds = time.monotonic() - started
        table[name] = row = Row()
        _judge(row, task, ranker, seconds, times=False)
    for seed in range(first_seed, first_seed + seeds):
        row = table.setdefault(HEED, Row())
        model, seconds = _train(task, content, preset, seed, told)
        _judge(row, task, RecommenderRanker(model, content), seconds, times=True)
        if seed == first_seed and ablate:
            # The attention is trained last, the rest held still: leaving it out is the rest.
            alone = RecommenderRanker(model, content, attention=False)
            row = table.setdefault(f"{HEED} without target attention", Row())
            _judge(row, task, alone, seconds, times=True)
    if ablate:
        for name, changed, text, changed_task in _ablations(task, content, preset):
            model, seconds = _train(changed_task, text, changed, first_seed, told)
            row = table.setdefault(f"{HEED} without {name}", Row())
            _judge(row, changed_task, RecommenderRanker(model, text), seconds, times=True)
    return table


def _baselines(task: Task) -> Mapping[str, Callable[[Interactions], Ranker]]:
    makers: dict[str, Callable[[Interactions], Ranker]] = {"popularity": Popularity.fit}
    if not task.exclude_seen:
        makers["repeats"] = Repeats.fit
    return makers | {"EASE": EASE.fit, "transition counts": TransitionCounts.fit}


def _ablations(
    task: Task, content: NDArray[np.float32], preset: Preset
) -> Iterator[tuple[str, Preset, NDArray[np.float32], Task]]:
    """Name, preset, content and task of Heed without each part that is trained with the rest."""
    yield "transitions", replace(preset, followers=0), content, task
    yield "times", preset, content, _timeless(task)
    # One model for both kinds of request, beside one for each.
    for name, share in (("times of requests", 0.0), ("requests at no time", 1.0)):
        yield (
            name,
            replace(preset, config=replace(preset.config, request_time=share)),
            content,
            task,
        )
    yield "text", preset, np.zeros_like(content), task
    yield "the encoder", replace(preset, blocks=0), content, task


def _timeless(task: Task) -> Task:
    """The same task with every event at one time: the order stays."""

    def log(timed: Interactions) -> Interactions:
        return replace(timed, timestamps=np.zeros_like(timed.timestamps))

    def cases(timed: Holdout) -> Holdout:
        return replace(
            timed, timestamps=np.zeros_like(timed.timestamps), history=log(timed.history)
        )

    validation = None if task.validation is None else cases(task.validation)
    return task._replace(train=log(task.train), validation=validation, test=cases(task.test))


def _train(
    task: Task, content: NDArray[np.float32], preset: Preset, seed: int, told: Told | None
) -> tuple[Recommender, float]:
    done = fitted(task.train, content, task.validation, preset, seed, told)
    return done.model, done.seconds


def _judge(row: Row, task: Task, ranker: Ranker, seconds: float, *, times: bool) -> None:
    def judged(cases: Holdout, *, use_target_time: bool = False) -> Metrics:
        return evaluate(
            ranker,
            cases,
            exclude_seen=task.exclude_seen,
            seen=task.seen,
            use_target_time=use_target_time,
        )

    row.test.append(judged(task.test))
    if times:
        row.told.append(judged(task.test, use_target_time=True))
    if task.validation is not None:
        row.validation.append(judged(task.validation))
    row.seconds.append(seconds)
    row.ranker = row.ranker or ranker
