"""Full-ranking evaluation: ranks every target against the whole catalogue, and measures the ranks.

Metrics of two rankers are compared by bootstrap confidence intervals of their differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.evaluation.splits import Holdout

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
    """1 if the target is among the first k, [M]; the mean is HR@k, here also recall@k."""
    return (ranks < k).astype(np.float64)


def mean(values: CaseValues, shards: Processes = SINGLE_PROCESS) -> float:
    """The mean of values [M] over the cases of all shards; nan without cases. Collective."""
    if shards.count == 1:
        return float(values.mean()) if len(values) else float("nan")
    total, count = shards.sum(np.array([values.sum(), len(values)]))
    return float(total / count) if count else float("nan")


def share_of_users(
    users: NDArray[np.int32], ranks: Ranks, k: int = 10, *, shards: Processes = SINGLE_PROCESS
) -> float:
    """The share of users with a target among the first k; nan without cases.

    users [M] of each case: one has a case for each item of the next basket. Collective over shards.
    """
    rows, of_user = np.unique(users, return_inverse=True)
    found = np.zeros(len(rows))
    np.maximum.at(found, of_user, hits(ranks, k))
    return mean(found, shards)


def ndcg_gains(ranks: Ranks, k: int = 10) -> CaseValues:
    """1 / log2(rank + 2) if the target is among the first k, else 0, [M]; mean: NDCG@k.

    With one relevant item the ideal gain is 1, so the gain is its own normalisation (Järvelin &
    Kekäläinen 2002).
    """
    return np.where(ranks < k, discounts(ranks), 0.0)


def reciprocal_ranks(ranks: Ranks) -> CaseValues:
    """1 / (rank + 1) over the full ranking, [M]; the mean is MRR."""
    return 1.0 / (ranks.astype(np.float64) + 1.0)


def popularity_weights(counts: NDArray[np.int64]) -> CaseValues:
    """1 / sqrt(1 + n), [M], n being the number of training events of each case's target.

    The weighted mean sum(w * v) / sum(w) is the popularity-debiased metric: inverse propensity
    scoring (Yang et al. 2018), self-normalised (Swaminathan & Joachims 2015), with the propensity
    of an item to be observed taken as sqrt(1 + n).
    """
    weights: CaseValues = 1.0 / np.sqrt(1.0 + counts)
    return weights


def discounts(ranks: Ranks) -> CaseValues:
    """1 / log2(rank + 2), the discount of each rank [...] in DCG."""
    discount: CaseValues = 1.0 / np.log2(ranks.astype(np.float64) + 2.0)
    return discount


def standard_error(values: CaseValues, shards: Processes = SINGLE_PROCESS) -> float:
    """The standard error of the mean over the cases of all shards; nan for fewer than two."""
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
    """The share of the relevant ids (judged above 0) among the first k; 0 without any."""
    relevant = {name for name, gain in relevance.items() if gain > 0}
    retrieved = relevant.intersection(ranking[:k])
    return len(retrieved) / len(relevant) if relevant else 0.0


def first_relevant_rank(
    ranking: Sequence[str], relevance: Mapping[str, float], k: int = 100
) -> int:
    """The rank of the first relevant id (judged above 0), from 0; k if the first k lack one.

    The mean of `hits` over these ranks is success@k.
    """
    top = ranking[:k]
    return next((at for at, name in enumerate(top) if relevance.get(name, 0.0) > 0), k)


class Ranker(Protocol):
    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
        /,
    ) -> NDArray[np.float32]:
        """Return scores [B, n_items], higher is better, for rows `users` [B] of `history`.

        Only `history` may be read, never the training log's own rows. request_times [B] are in
        microseconds, None if unknown. A score of -inf excludes an item; NaN is refused. Callers do
        not write into the array. There may be no users: all shards of a log ask equally often.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RankingMetrics:
    """Mean metrics over the cases of one evaluation; nan without cases."""

    k: int
    hr: float  # share of targets among the first k
    ndcg: float  # at k
    mrr: float  # over the full ranking
    coverage: float  # share of the catalogue in the first k of any case
    n_cases: int
    ranks: NDArray[np.int64]  # [M], 0 = first; of a log in several shards, of this one's cases

    def standard_errors(self) -> tuple[float, float]:
        return (
            standard_error(hits(self.ranks, self.k)),
            standard_error(ndcg_gains(self.ranks, self.k)),
        )


def evaluate(
    ranker: Ranker,
    holdout: Holdout,
    *,
    k: int = 10,
    batch_size: int = 256,
    exclude_seen: bool = True,
    max_seen: int | None = None,
    use_target_time: bool = False,
    group: Processes = SINGLE_PROCESS,
) -> RankingMetrics:
    """Rank each target among all items, or among those the user has not seen.

    Ties are pessimistic: a target ranks behind every candidate of the same score, so a constant
    ranker scores 0. A target that was seen before stays a candidate.

    k cuts off HR, NDCG and coverage. `exclude_seen` leaves out the items of the user's history, or
    with `max_seen` those of the newest events. `use_target_time` passes the target's own time as
    the request time; report metrics with and without it.

    Collective over the shards of the cases' log: each ranks its own, and the metrics are of all. Of
    a log in one shard the processes of `group` share the batches, and each returns the whole
    result.

    Raises ValueError for scores of the wrong shape or with NaN.
    """
    ranks = np.zeros(len(holdout), dtype=np.int64)
    shown = np.zeros(holdout.history.n_items, dtype=np.int64)
    for rows in _batches(holdout, batch_size, group):
        scores = _scores(ranker, holdout, rows, use_target_time=use_target_time)
        candidates = _candidates(holdout, rows, exclude_seen, max_seen)
        targets = holdout.targets[rows]
        ranks[rows] = _target_ranks(scores, targets, candidates)
        candidates[np.arange(len(targets)), targets] = True
        shown[_top_items(scores, candidates, k)] = 1
    shards = holdout.history.shards
    if shards.count == 1:
        ranks, shown = group.sum(ranks), group.sum(shown)
    covered, cases = shards.sum(shown) > 0, shards.total(len(ranks))
    values = (hits(ranks, k), ndcg_gains(ranks, k), reciprocal_ranks(ranks))
    hr, ndcg, mrr = (mean(each, shards) for each in values)
    coverage = float(covered.mean()) if cases else math.nan
    return RankingMetrics(k, hr, ndcg, mrr, coverage, cases, ranks)


def ranks_by_weight(
    ranker: Ranker,
    parts: Sequence[Ranker],
    weights: Sequence[Sequence[float]],
    holdout: Holdout,
    *,
    batch_size: int = 256,
    exclude_seen: bool = True,
    group: Processes = SINGLE_PROCESS,
) -> NDArray[np.int64]:
    """Rank each target by the scores of a ranker plus weighted scores of the parts, W times.

    Every case is scored once. Returns ranks [W, M], 0 = first; of a log in several shards, of this
    one's cases. Other arguments are as in `evaluate`.
    """
    ranks = np.zeros((len(weights), len(holdout)), dtype=np.int64)
    for rows in _batches(holdout, batch_size, group):
        scores, *added = (
            _scores(each, holdout, rows, use_target_time=False) for each in (ranker, *parts)
        )
        candidates = _candidates(holdout, rows, exclude_seen, None)
        for number, chosen in enumerate(weights):
            total = scores.copy()
            for weight, part in zip(chosen, added, strict=True):
                if weight:
                    total += np.float32(weight) * part
            ranks[number, rows] = _target_ranks(total, holdout.targets[rows], candidates)
    return group.sum(ranks) if holdout.history.shards.count == 1 else ranks


def _batches(holdout: Holdout, batch_size: int, group: Processes) -> Iterator[slice]:
    """Iterate over this process's batches of cases; all shards of a log have equally many."""
    shards = holdout.history.shards
    starts = range(0, len(holdout), batch_size)
    if shards.count == 1:
        starts = starts[group.index :: group.count]
    else:  # some may be empty: rankers ask the other shards
        starts = range(0, batch_size * shards.max(len(starts)), batch_size)
    for start in starts:
        yield slice(start, start + batch_size)


def _candidates(
    holdout: Holdout, rows: slice, exclude_seen: bool, max_seen: int | None
) -> NDArray[np.bool_]:
    """Which items are ranked for each case, [B, n_items]."""
    users = holdout.users[rows]
    candidates = np.ones((len(users), holdout.history.n_items), dtype=np.bool_)
    if exclude_seen:
        cases, events = holdout.history.gather(users, last=max_seen)
        candidates[cases, holdout.history.items[events]] = False
    return candidates


def _scores(
    ranker: Ranker, holdout: Holdout, rows: slice, *, use_target_time: bool
) -> NDArray[np.float32]:
    """Score cases, [B, n_items]; equal requests, as for the items of a basket, are scored once."""
    users, times = holdout.users[rows], holdout.timestamps[rows]
    requests = np.stack(
        [users.astype(np.int64), times if use_target_time else np.zeros_like(times)]
    )
    _, first, request = np.unique(requests, axis=1, return_index=True, return_inverse=True)
    scores = ranker.scores(holdout.history, users[first], times[first] if use_target_time else None)
    name, shape = type(ranker).__name__, (len(first), holdout.history.n_items)
    if scores.shape != shape:
        raise ValueError(f"{name}: scores must be {list(shape)}, got {list(scores.shape)}")
    if np.isnan(scores).any():
        raise ValueError(f"{name}: scores contain NaN")
    return scores[request.reshape(-1)]


def _target_ranks(
    scores: NDArray[np.float32], targets: NDArray[np.int32], candidates: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Count the other candidates that score at least as much as the target, [B]."""
    cases = np.arange(len(targets))
    ahead = (scores >= scores[cases, targets][:, None]) & candidates
    ahead[cases, targets] = False
    ranks: NDArray[np.int64] = ahead.sum(axis=1, dtype=np.int64)
    return ranks


def _top_items(
    scores: NDArray[np.float32], candidates: NDArray[np.bool_], k: int
) -> NDArray[np.int64]:
    scores = np.where(candidates, scores, -np.inf)
    k = min(k, scores.shape[1])
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return top[np.take_along_axis(scores, top, axis=1) > -np.inf]
