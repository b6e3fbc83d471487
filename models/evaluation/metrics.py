"""Ranking metrics, and bootstrap confidence intervals of differences between rankers.

Ranks count from 0: the number of other candidates at or above the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import WHOLE_LOG, LogShards

Ranks = NDArray[np.int64]  # [M], one per case
CaseValues = NDArray[np.float64]  # [M], one term of a mean per case

_SAMPLES = 2000  # of a bootstrap
_LEVEL = 0.95  # of its interval


class PairedDifference(NamedTuple):
    """Mean of b minus mean of a over the same cases, with its bootstrap interval."""

    difference: float
    low: float
    high: float
    standard_error: float


def hits(ranks: Ranks, k: int = 10) -> CaseValues:
    """Return [M] 1 if the target is among the first k; the mean is HR@k, here also recall@k."""
    return (ranks < k).astype(np.float64)


def mean(values: CaseValues, shards: LogShards = WHOLE_LOG) -> float:
    """Return the mean of values [M] over the cases of all shards; nan without cases. Collective."""
    if shards.count == 1:
        return float(values.mean()) if len(values) else float("nan")
    total, count = shards.sum(np.array([values.sum(), len(values)]))
    return float(total / count) if count else float("nan")


def share_of_users(
    users: NDArray[np.int32], ranks: Ranks, k: int = 10, *, shards: LogShards = WHOLE_LOG
) -> float:
    """Return the share of users with a target among the first k; nan without cases.

    Args:
        users: [M], of each case; a user has one for each item of the next basket.
        ranks: [M].
        k: the cut-off.
        shards: the shards of the log, over which this is collective.
    """
    rows, of_user = np.unique(users, return_inverse=True)
    found = np.zeros(len(rows))
    np.maximum.at(found, of_user, hits(ranks, k))
    return mean(found, shards)


def ndcg_gains(ranks: Ranks, k: int = 10) -> CaseValues:
    """Return [M] 1 / log2(rank + 2) if the target is among the first k, else 0; mean: NDCG@k.

    With one relevant item the ideal gain is 1, so the gain is its own normalisation
    (Järvelin & Kekäläinen 2002).
    """
    return np.where(ranks < k, discounts(ranks), 0.0)


def reciprocal_ranks(ranks: Ranks) -> CaseValues:
    """Return [M] 1 / (rank + 1) over the full ranking; the mean is MRR."""
    return 1.0 / (ranks.astype(np.float64) + 1.0)


def popularity_weights(counts: NDArray[np.int64]) -> CaseValues:
    """Return [M] 1 / sqrt(1 + n), n being the number of training events of each case's target.

    The weighted mean sum(w * v) / sum(w) is the popularity-debiased metric: inverse propensity
    scoring (Yang et al. 2018), self-normalised (Swaminathan & Joachims 2015), with the propensity
    of an item to be observed taken as sqrt(1 + n).
    """
    weights: CaseValues = 1.0 / np.sqrt(1.0 + counts)
    return weights


def discounts(ranks: Ranks) -> CaseValues:
    """Return [...] 1 / log2(rank + 2), the discount of each rank in DCG."""
    discount: CaseValues = 1.0 / np.log2(ranks.astype(np.float64) + 2.0)
    return discount


def standard_error(values: CaseValues, shards: LogShards = WHOLE_LOG) -> float:
    """Return the standard error of the mean over the cases of all shards; nan for fewer than two.

    Collective over the shards.
    """
    if shards.count == 1:
        return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    squares = (values - mean(values, shards)) ** 2
    total, count = shards.sum(np.array([squares.sum(), len(values)]))
    return float(np.sqrt(total / (count - 1) / count)) if count > 1 else float("nan")


def bootstrap(differences: CaseValues) -> PairedDifference:
    """Bootstrap the mean of paired differences [M] between two rankers, over the same cases.

    Cases are resampled for both rankers together, so that the difficulty of a case cancels
    (Efron & Tibshirani 1993, percentile interval). Raises ValueError for no case.
    """
    if not len(differences):
        raise ValueError("a bootstrap needs at least one case")
    # Most cases differ not at all, or by one of few amounts: drawing the multiplicity of each
    # distinct amount is equivalent to drawing cases, and far faster.
    amounts, counts = np.unique(differences, return_counts=True)
    rng = np.random.default_rng(0)
    share = counts / len(differences)
    step = max(1, (1 << 22) // len(amounts))  # bounds the draws held at once
    means = np.concatenate(
        [
            rng.multinomial(len(differences), share, size=min(step, _SAMPLES - start)) @ amounts
            for start in range(0, _SAMPLES, step)
        ]
    ) / len(differences)
    low, high = np.quantile(means, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return PairedDifference(float(differences.mean()), float(low), float(high), float(means.std()))


def graded_ndcg(ranking: Sequence[str], relevance: Mapping[str, float], k: int = 10) -> float:
    """Compute nDCG@k of one query's ranking against graded judgements, as trec_eval does.

    Gains are linear; unjudged ids gain nothing; the ideal is the best order of all judged ids.
    A query without a relevant id scores 0. Raises ValueError for an id that is ranked twice.
    """
    top = list(ranking[:k])
    if len(set(top)) < len(top):
        raise ValueError("an id is ranked twice")
    ideal = sorted((max(gain, 0.0) for gain in relevance.values()), reverse=True)[:k]
    best = float(np.dot(ideal, discounts(np.arange(len(ideal)))))
    gained = [max(relevance.get(name, 0.0), 0.0) for name in top]
    return float(np.dot(gained, discounts(np.arange(len(gained))))) / best if best > 0 else 0.0


def recall(ranking: Sequence[str], relevance: Mapping[str, float], k: int = 100) -> float:
    """Return the share of the relevant ids (judged above 0) among the first k; 0 without any."""
    relevant = {name for name, gain in relevance.items() if gain > 0}
    retrieved = relevant.intersection(ranking[:k])
    return len(retrieved) / len(relevant) if relevant else 0.0


def first_relevant_rank(
    ranking: Sequence[str], relevance: Mapping[str, float], k: int = 100
) -> int:
    """Return the rank of the first relevant id (judged above 0), from 0; k if the first k lack one.

    The mean of `hits` over these ranks is success@k.
    """
    top = ranking[:k]
    return next((at for at, name in enumerate(top) if relevance.get(name, 0.0) > 0), k)
