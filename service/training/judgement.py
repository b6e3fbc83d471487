"""Judgement of a trained model on its validation cases, beside all baselines.

What ranks them best is served: the model, or a baseline that is better than it beyond the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions
from models.evaluation.baselines import POPULARITY, WEEK, baseline_makers
from models.evaluation.full_ranking import Ranker, RankingMetrics, evaluate
from models.evaluation.metrics import ndcg_gains, share_of_users, standard_error
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import Holdout
from models.recommender.baseline_model import baseline_model
from models.recommender.recommender import Recommender
from models.training.training_run import TrainingResult
from service.training.training_corpus import StageProgressCallback

HEED = "heed"


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What is served, and its metrics and those of each baseline, over the same cases."""

    served: str  # `HEED`, or the name of the baseline that is served in its place
    model: Recommender  # to be published, trained on all events
    validated: Recommender  # the same without its final epochs
    cases: Holdout
    heed: RankingMetrics  # of `validated`
    baselines: Mapping[str, RankingMetrics]  # by name

    @property
    def best(self) -> str:
        """Name of the baseline with the highest NDCG."""
        return max(self.baselines, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular_is_best(self) -> bool:
        """Whether no ranker beats popularity, which is served without a model too."""
        best = self.baselines[self.best]
        return self.best in {POPULARITY, WEEK} and self.heed.ndcg <= best.ndcg

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the model's `metrics`, and those of each of the `baselines`."""
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
            "served": self.served,
            "next_basket": len(np.unique(self.cases.users)) < len(self.cases),
        }

    def _share(self, found: RankingMetrics) -> float:
        """Return the share of customers with a target among the first ten."""
        return share_of_users(self.cases.users, found.ranks)


def judge(
    fitted: TrainingResult,
    content: NDArray[np.float32],
    history: Interactions,
    every_event: Interactions,
    cases: Holdout,
    *,
    log: Interactions,
    exclude_seen: bool,
    progress: StageProgressCallback | None = None,
) -> Judgement:
    """Evaluate a model and all baselines, and choose what to serve.

    A baseline is served in the model's place if its NDCG is higher by more than a standard error of
    the paired difference, and the model has parts for it.

    Args:
        fitted: trained on `history`, and at last on `every_event`.
        content: text embeddings of the items [N, D].
        history: the training events, on which the baselines are fitted.
        every_event: the training events and the validation cases.
        cases: held out of the training events.
        log: `every_event`, and those after it if there are any.
        exclude_seen: leave out the items of the user's history.
        progress: called as the baselines are fitted.
    """

    def evaluated(ranker: Ranker) -> RankingMetrics:
        return evaluate(ranker, cases, exclude_seen=exclude_seen)

    makers = baseline_makers(log, exclude_seen=exclude_seen)
    baselines = {}
    for at, (name, make) in enumerate(makers.items()):
        if progress is not None:
            progress(f"baseline: {name}", at, len(makers), None)
        baselines[name] = evaluated(make(history))
    heed = evaluated(ModelRanker(fitted.validated, content))
    found = Judgement(HEED, fitted.model, fitted.validated, cases, heed, baselines)
    if not _is_better(baselines[found.best], heed):
        return found
    validated = baseline_model(fitted.validated, found.best, history)
    if validated is None:
        return found
    metrics = evaluated(ModelRanker(validated, content))
    model = baseline_model(fitted.model, found.best, every_event)
    if model is None or not _is_better(metrics, heed):
        return found
    return Judgement(found.best, model, validated, cases, metrics, baselines)


def _is_better(one: RankingMetrics, other: RankingMetrics) -> bool:
    """Whether one NDCG is above another by more than a standard error of the difference."""
    more = ndcg_gains(one.ranks) - ndcg_gains(other.ranks)
    return bool(more.mean() > standard_error(more))
