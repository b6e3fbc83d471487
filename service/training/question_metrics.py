"""Metrics of a trained model and of all baselines for one question that the service is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.evaluation.baselines import POPULARITY, WEEK
from models.evaluation.full_ranking import RankingMetrics, share_of_users
from models.evaluation.splits import Holdout


@dataclass(frozen=True, slots=True, eq=False)
class QuestionMetrics:
    """Metrics over the held-out cases of one question."""

    cases: Holdout
    heed: RankingMetrics  # of what is served
    baselines: Mapping[str, RankingMetrics]  # by name

    @property
    def best(self) -> str:
        """Name of the baseline with the highest NDCG."""
        return max(self.baselines, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular(self) -> str:
        """Name of the popularity with the higher NDCG, which is served without a model."""
        names = [name for name in (POPULARITY, WEEK) if name in self.baselines]
        return max(names, key=lambda name: self.baselines[name].ndcg)

    @property
    def popular_is_best(self) -> bool:
        """Report whether no ranker beats popularity."""
        best = self.baselines[self.best]
        return self.best in {POPULARITY, WEEK} and self.heed.ndcg <= best.ndcg

    @property
    def is_basket(self) -> bool:
        """True if a user has several cases, the items of a basket; collective over the shards."""
        several = len(np.unique(self.cases.users)) < len(self.cases)
        return self.cases.history.shards.any(several)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the model's `metrics`, and those of each of the `baselines`.

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
        """Return the share of customers with a target among the first ten."""
        shards = self.cases.history.shards
        return share_of_users(self.cases.users, found.ranks, shards=shards)
