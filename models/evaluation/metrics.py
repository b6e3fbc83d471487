"""Ranking metrics, and bootstrap intervals of the difference between two rankers.

A rank counts from 0: how many other candidates stand at or above the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]  # [M], one per case
CaseValues = NDArray[np.float64]  # [M], what each case contributes to a mean

# From ranks to the worth of each case; a metric of the whole is the mean.
Metric = Callable[[Ranks], CaseValues]


class PairedDifference(NamedTuple):
    """Mean of b minus mean of a over the same cases, with its bootstrap spread."""

    difference: float
    low: float
    high: float
    standard_error: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def hits(ranks: Ranks, k: int = 10) -> CaseValues:
    """[M] 1 where the target is among the first k; the mean is HR@k, here also recall@k."""
    return (ranks < _cutoff(k)).astype(np.float64)


def ndcg_gains(ranks: Ranks, k: int = 10) -> CaseValues:
    """[M] 1 / log2(rank + 2) where the target is among the first k, else 0; the mean is NDCG@k.

    With one relevant item the ideal gain is 1, so the gain is its own normalisation
    (Järvelin & Kekäläinen 2002).
    """
    return np.where(ranks < _cutoff(k), discounts(ranks), 0.0)


def reciprocal_ranks(ranks: Ranks) -> CaseValues:
    """[M] 1 / (rank + 1), over the full ranking; the mean is MRR."""
    return 1.0 / (ranks.astype(np.float64) + 1.0)


def discounts(ranks: Ranks) -> CaseValues:
    """[...] 1 / log2(rank + 2): what a relevant item is worth at each rank."""
    worth: CaseValues = 1.0 / np.log2(ranks.astype(np.float64) + 2.0)
    return worth


def standard_error(worth: CaseValues) -> float:
    """Standard error of the mean over cases; nan for fewer than two."""
    return float(worth.std(ddof=1) / np.sqrt(len(worth))) if len(worth) > 1 else float("nan")


def paired_bootstrap(
    ranks_a: Ranks,
    ranks_b: Ranks,
    metric: Metric = ndcg_gains,
    *,
    seed: int,
    samples: int = 2000,
    level: float = 0.95,
) -> PairedDifference:
    """How much better b is than a on the same cases [M], and how sure that is.

    Cases are resampled together for both rankers, so what makes a case hard for both cancels
    (Efron & Tibshirani 1993, percentile interval). Raises ValueError where the cases are not
    the same number, are none, or level is outside (0, 1).
    """
    if ranks_a.shape != ranks_b.shape or ranks_a.ndim != 1:
        raise ValueError(f"both need the same cases [M], got {ranks_a.shape} and {ranks_b.shape}")
    return bootstrap(metric(ranks_b) - metric(ranks_a), seed=seed, samples=samples, level=level)


def bootstrap(
    paired: CaseValues, *, seed: int, samples: int = 2000, level: float = 0.95
) -> PairedDifference:
    """The mean of the differences between two rankers, one for each case [M], and how sure it is.

    Raises ValueError for no case and for a level outside (0, 1).
    """
    if not len(paired):
        raise ValueError("a bootstrap needs at least one case")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    # Most cases do not differ at all, or by one of few amounts: drawing how often each amount
    # comes up is the same draw as drawing cases, and far shorter.
    amounts, counts = np.unique(paired, return_counts=True)
    rng = np.random.default_rng(seed)
    share = counts / len(paired)
    step = max(1, (1 << 22) // len(amounts))  # bounds the draws held at once
    means = np.concatenate(
        [
            rng.multinomial(len(paired), share, size=min(step, samples - start)) @ amounts
            for start in range(0, samples, step)
        ]
    ) / len(paired)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return PairedDifference(float(paired.mean()), float(low), float(high), float(means.std()))


def graded_ndcg(ranking: Sequence[str], relevance: Mapping[str, float], k: int = 10) -> float:
    """nDCG@k of one query's ranking of distinct ids against graded judgements, as trec_eval has it.

    Gains are linear; unjudged ids gain nothing; the ideal is the best order of all judged ids.
    A query without any relevant id is worth 0. Raises ValueError where an id is ranked twice.
    """
    top = list(ranking[: _cutoff(k)])
    if len(set(top)) < len(top):
        raise ValueError("an id is ranked twice")
    ideal = sorted((max(gain, 0.0) for gain in relevance.values()), reverse=True)[:k]
    best = float(np.dot(ideal, discounts(np.arange(len(ideal)))))
    found = [max(relevance.get(name, 0.0), 0.0) for name in top]
    return float(np.dot(found, discounts(np.arange(len(found))))) / best if best > 0 else 0.0


def recall(ranking: Sequence[str], relevance: Mapping[str, float], k: int = 100) -> float:
    """Share of the relevant ids (judged above 0) among the first k; 0 where there is none."""
    relevant = {name for name, gain in relevance.items() if gain > 0}
    found = relevant.intersection(ranking[: _cutoff(k)])
    return len(found) / len(relevant) if relevant else 0.0


def first_relevant_rank(
    ranking: Sequence[str], relevance: Mapping[str, float], k: int = 100
) -> int:
    """The rank of the first relevant id (judged above 0), from 0; k where the first k have none.

    `hits` of these ranks is success@k: the share of queries that found what they asked for.
    """
    top = ranking[: _cutoff(k)]
    return next((at for at, name in enumerate(top) if relevance.get(name, 0.0) > 0), k)


def _cutoff(k: int) -> int:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return k
