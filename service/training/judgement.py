"""Judgement of a trained model on its validation cases, beside all baselines.

Where users take items again, a service is asked two questions: what comes next, and, with seen
items excluded as they are by default, what of the next is new to the user. What ranks the cases
best is served: the model, or a baseline that is better than it at one question beyond the noise,
and worse at none. The mean of both, which chooses the weights of a model's parts, is not the rule
here: the NDCG of what comes next is usually by far the higher one, so that a baseline that repeats
a user's history well would be served though it has nothing new to recommend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.compute.device import SINGLE_PROCESS, Processes
from models.evaluation.baselines import POPULARITY, WEEK, baseline_makers
from models.evaluation.full_ranking import (
    Ranker,
    RankingMetrics,
    evaluate,
    mean,
    ndcg_gains,
    share_of_users,
    standard_error,
)
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.recommender import Recommender, baseline_model
from models.training.fit import TrainingResult
from service.training.training_corpus import StageProgressCallback


@dataclass(frozen=True, slots=True, eq=False)
class QuestionMetrics:
    """Metrics over the held-out cases of one question."""

    cases: Holdout
    heed: RankingMetrics  # of what is served
    baselines: Mapping[str, RankingMetrics]  # by name

    @property
    def best(self) -> str:
        return max(self.baselines, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular(self) -> str:
        """The popularity with the higher NDCG, which is served without a model."""
        names = [name for name in (POPULARITY, WEEK) if name in self.baselines]
        return max(names, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular_is_best(self) -> bool:
        """True if no ranker beats popularity."""
        best = self.baselines[self.best]
        return self.best in {POPULARITY, WEEK} and self.heed.ndcg <= best.ndcg

    @property
    def is_basket(self) -> bool:
        """True if a user has several cases, the items of a basket; collective over the shards."""
        several = len(np.unique(self.cases.users)) < len(self.cases)
        return self.cases.history.shards.any(several)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the model's `metrics`, and those of each of the `baselines`.

        Collective over the shards of the log.
        """
        found, popularity = self.heed, self.baselines[POPULARITY]
        return {
            "metrics": {
                "hr": found.hr,
                "ndcg": found.ndcg,
                "mrr": found.mrr,
                "coverage": found.coverage,
                "cases": float(found.n_cases),
                "user_hr": self._share(found),
                "popularity_ndcg": popularity.ndcg,
                "popularity_hr": popularity.hr,
            },
            "baselines": {
                name: {"hr": row.hr, "ndcg": row.ndcg, "user_hr": self._share(row)}
                for name, row in self.baselines.items()
            },
            "best_baseline": self.best,
        }

    def _share(self, found: RankingMetrics) -> float:
        """The share of customers with a target among the first ten."""
        shards = self.cases.history.shards
        return share_of_users(self.cases.users, found.ranks, shards=shards)


HEED = "heed"


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The model to serve, with its metrics and those of each baseline, for each question."""

    served: str  # `HEED`, or the name of the baseline that is served in its place
    model: Recommender  # to be published, trained on all events
    validated: Recommender  # the same without its final epochs, whose metrics these are
    next: QuestionMetrics
    new: QuestionMetrics | None  # of items that are new to the user; None if all cases are

    @property
    def popular_is_best(self) -> bool:
        """True if no ranker beats popularity, which is served without a model too."""
        return self.next.popular_is_best and (self.new is None or self.new.popular_is_best)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, those of `new` under `new_items` if users take items again."""
        new = {} if self.new is None else {"new_items": self.new.as_dict()}
        return {
            **self.next.as_dict(),
            "served": self.served,
            "next_basket": self.next.is_basket,
            **new,
        }


def judge(
    fitted: TrainingResult, *, exclude_seen: bool, progress: StageProgressCallback | None = None
) -> Judgement:
    """Evaluate a model and all baselines, and choose what to serve.

    A baseline is served in the model's place if it replaces the model by `is_replacement`, and the
    model has parts for it. The one with the highest NDCG, or mean of both, is tried. Baselines are
    fitted on the model's training events. Without `exclude_seen` the cases whose target is new to
    its user are ranked once more without the items of the user's history.

    Collective over the shards of the logs. Raises ValueError for a model that was trained without
    validation cases.
    """
    plan = fitted.plan
    history, every_event, cases = plan.log, plan.every_event, plan.validation
    if cases is None or every_event is None:
        raise ValueError("fitted: has no validation cases")
    asked, shards = [(cases, exclude_seen)], history.shards
    if not exclude_seen and shards.any(len(new := cases.new_to_user()) > 0):
        asked.append((new, True))

    def evaluated(ranker: Ranker) -> list[RankingMetrics]:
        return [evaluate(ranker, each, exclude_seen=new_only) for each, new_only in asked]

    def judgement(
        served: str, model: Recommender, validated: Recommender, metrics: list[RankingMetrics]
    ) -> Judgement:
        questions = [
            QuestionMetrics(each, metrics[at], {name: row[at] for name, row in baselines.items()})
            for at, (each, _) in enumerate(asked)
        ]
        return Judgement(
            served, model, validated, questions[0], questions[1] if len(asked) > 1 else None
        )

    makers = baseline_makers(every_event, exclude_seen=exclude_seen)
    baselines: dict[str, list[RankingMetrics]] = {}
    for at, (name, make) in enumerate(makers.items()):
        if progress is not None:
            progress(f"baseline: {name}", at, len(makers), None)
        baselines[name] = evaluated(make(history))
    heed = evaluated(ModelRanker(fitted.validated, plan.content, two_stage=True))
    found = judgement(HEED, fitted.model, fitted.validated, heed)
    rival = best_replacement(baselines, heed, shards)
    if rival is None:
        return found
    validated = baseline_model(fitted.validated, rival, history)
    if validated is None:
        return found
    metrics = evaluated(ModelRanker(validated, plan.content, two_stage=True))
    model = baseline_model(fitted.model, rival, every_event)
    if model is None or not is_replacement(metrics, heed, shards):
        return found
    return judgement(rival, model, validated, metrics)


def best_replacement(
    baselines: Mapping[str, Sequence[RankingMetrics]],
    heed: Sequence[RankingMetrics],
    shards: Processes = SINGLE_PROCESS,
) -> str | None:
    """Choose the best of the baselines that are not worse than a model; None if it is not better.

    Metrics are of each question, of the same cases. Collective over the shards of their log.
    """
    kept = {
        name: float(np.mean([metrics.ndcg for metrics in row]))
        for name, row in baselines.items()
        if not any(_is_better(ours, theirs, shards) for ours, theirs in zip(heed, row, strict=True))
    }
    best = max(kept, key=kept.__getitem__, default=None)
    return best if best is not None and is_replacement(baselines[best], heed, shards) else None


def is_replacement(
    row: Sequence[RankingMetrics],
    heed: Sequence[RankingMetrics],
    shards: Processes = SINGLE_PROCESS,
) -> bool:
    """True if a baseline is better than a model at one question beyond the noise, worse at none."""
    pairs = list(zip(row, heed, strict=True))
    return any(_is_better(theirs, ours, shards) for theirs, ours in pairs) and not any(
        _is_better(ours, theirs, shards) for theirs, ours in pairs
    )


def _is_better(one: RankingMetrics, other: RankingMetrics, shards: Processes) -> bool:
    """Report whether one NDCG is above another by more than a standard error of the difference."""
    more = ndcg_gains(one.ranks) - ndcg_gains(other.ranks)
    return mean(more, shards) > standard_error(more, shards)
