"""Heed beside the baselines on a benchmark's terms, and what each of its parts is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.baselines import EASE, ItemTransitions, Popularity, Repeats
from models.evaluation.full_ranking import Ranker, RankingMetrics, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.protocols import EvaluationTask
from models.evaluation.splits import Holdout
from models.recommender.recommender import Recommender
from models.training.presets import Preset
from service.training.train_and_publish import fitted
from service.training.training_corpus import StageProgressCallback

HEED = "heed"


@dataclass(slots=True, eq=False)
class Row:
    """One model's figures, a list entry for each seed."""

    test: list[RankingMetrics] = field(default_factory=list)  # the target's time not told
    told: list[RankingMetrics] = field(
        default_factory=list
    )  # told; none for models that do not use it
    validation: list[RankingMetrics] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of fitting
    ranker: Ranker | None = None  # of the first seed

    def ranks(self, *, told: bool = False) -> NDArray[np.int64]:
        """The ranks of all cases of all seeds, end to end."""
        return np.concatenate([metrics.ranks for metrics in (self.told if told else self.test)])


Table = dict[str, Row]


def compare(
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    *,
    seeds: int = 1,
    first_seed: int = 0,
    ablate: bool = False,
    told: StageProgressCallback | None = None,
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
        _judge(row, task, ModelRanker(model, content), seconds, times=True)
        if seed == first_seed and ablate:
            # The attention is trained last, the rest held still: leaving it out is the rest.
            alone = ModelRanker(model, content, attention=False)
            row = table.setdefault(f"{HEED} without target attention", Row())
            _judge(row, task, alone, seconds, times=True)
    if ablate:
        for name, changed, text, changed_task in _ablations(task, content, preset):
            model, seconds = _train(changed_task, text, changed, first_seed, told)
            row = table.setdefault(f"{HEED} without {name}", Row())
            _judge(row, changed_task, ModelRanker(model, text), seconds, times=True)
    return table


def _baselines(task: EvaluationTask) -> Mapping[str, Callable[[Interactions], Ranker]]:
    makers: dict[str, Callable[[Interactions], Ranker]] = {"popularity": Popularity.fit}
    if not task.exclude_seen:
        makers["repeats"] = Repeats.fit
    return makers | {"EASE": EASE.fit, "transition counts": ItemTransitions.fit}


def _ablations(
    task: EvaluationTask, content: NDArray[np.float32], preset: Preset
) -> Iterator[tuple[str, Preset, NDArray[np.float32], EvaluationTask]]:
    """Name, preset, content and task of Heed without each part that is trained with the rest."""
    yield "transitions", replace(preset, transitions_per_item=0), content, task
    yield "times", preset, content, _timeless(task)
    # One model for both kinds of request, beside one for each.
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
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    seed: int,
    told: StageProgressCallback | None,
) -> tuple[Recommender, float]:
    done = fitted(task.train, content, task.validation, preset, seed, told)
    return done.model, done.seconds


def _judge(row: Row, task: EvaluationTask, ranker: Ranker, seconds: float, *, times: bool) -> None:
    def judged(cases: Holdout, *, use_target_time: bool = False) -> RankingMetrics:
        return evaluate(
            ranker,
            cases,
            exclude_seen=task.exclude_seen,
            max_seen=task.max_seen,
            use_target_time=use_target_time,
        )

    row.test.append(judged(task.test))
    if times:
        row.told.append(judged(task.test, use_target_time=True))
    if task.validation is not None:
        row.validation.append(judged(task.validation))
    row.seconds.append(seconds)
    row.ranker = row.ranker or ranker
