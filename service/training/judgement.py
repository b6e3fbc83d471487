"""Judgement of a trained model on its validation cases, beside all baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.data.interactions import Interactions
from models.evaluation.baselines import POPULARITY, WEEK, baseline_makers
from models.evaluation.full_ranking import Ranker, RankingMetrics, evaluate
from models.evaluation.metrics import share_of_users
from models.evaluation.splits import Holdout
from service.training.training_corpus import StageProgressCallback


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Metrics of the model and of each baseline, over the same cases."""

    cases: Holdout
    heed: RankingMetrics
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
            "next_basket": len(np.unique(self.cases.users)) < len(self.cases),
        }

    def _share(self, found: RankingMetrics) -> float:
        """Return the share of customers with a target among the first ten."""
        return share_of_users(self.cases.users, found.ranks)


def judge(
    model: Ranker,
    history: Interactions,
    log: Interactions,
    cases: Holdout,
    *,
    exclude_seen: bool,
    progress: StageProgressCallback | None = None,
) -> Judgement:
    """Evaluate a model and all baselines.

    Args:
        model: trained on `history`.
        history: the training events, on which the baselines are fitted.
        log: all events.
        cases: held out of the training events.
        exclude_seen: leave out the items of the user's history.
        progress: called as the baselines are fitted.
    """
    makers = baseline_makers(log, exclude_seen=exclude_seen)
    baselines = {}
    for at, (name, make) in enumerate(makers.items()):
        if progress is not None:
            progress(f"baseline: {name}", at, len(makers), None)
        baselines[name] = evaluate(make(history), cases, exclude_seen=exclude_seen)
    return Judgement(cases, evaluate(model, cases, exclude_seen=exclude_seen), baselines)
