"""Full-ranking evaluation: ranks every target against the whole catalogue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.data.interactions import Interactions
from models.evaluation.metrics import hits, mean, ndcg_gains, reciprocal_ranks, standard_error
from models.evaluation.splits import Holdout


class Ranker(Protocol):
    """A model that scores the whole catalogue for a batch of users."""

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
        """Return the standard errors of hr and ndcg over the cases of `ranks`."""
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
    group: DataParallelGroup = SINGLE_PROCESS,
) -> RankingMetrics:
    """Rank each target among all items, or among those the user has not seen.

    Ties are pessimistic: a target ranks behind every candidate of the same score, so a constant
    ranker scores 0. A target that was seen before stays a candidate.

    Collective over the shards of the cases' log: each ranks its own, and the metrics are of all.

    Args:
        ranker: the model.
        holdout: the cases.
        k: cut-off of HR, NDCG and coverage.
        batch_size: cases at once.
        exclude_seen: leave out the items of the user's history.
        max_seen: leave out only those of this many newest events.
        use_target_time: pass the target's own time as the request time; report metrics with and
            without it.
        group: its processes share the batches, and each returns the whole result; not used where
            the log has several shards.

    Raises:
        ValueError: for scores of the wrong shape or with NaN.
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
        ranks, shown = group.all_reduce_sum(ranks), group.all_reduce_sum(shown)
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
    group: DataParallelGroup = SINGLE_PROCESS,
) -> NDArray[np.int64]:
    """Rank each target by the scores of a ranker plus weighted scores of others.

    Every case is scored once. Arguments that are not listed are as in `evaluate`.

    Args:
        ranker: the model.
        parts: the other rankers.
        weights: a weight for each of the parts, W times.
        holdout: the cases.

    Returns:
        NDArray: ranks [W, M], 0 = first; of a log in several shards, of this one's cases.
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
    return group.all_reduce_sum(ranks) if holdout.history.shards.count == 1 else ranks


def _batches(holdout: Holdout, batch_size: int, group: DataParallelGroup) -> Iterator[slice]:
    """Iterate over this process's batches of cases; all shards of a log have as many."""
    shards = holdout.history.shards
    starts = range(0, len(holdout), batch_size)
    if shards.count == 1:
        starts = starts[group.rank :: group.world_size]
    else:  # some may be empty: rankers ask the other shards
        starts = range(0, batch_size * shards.max(len(starts)), batch_size)
    for start in starts:
        yield slice(start, start + batch_size)


def _candidates(
    holdout: Holdout, rows: slice, exclude_seen: bool, max_seen: int | None
) -> NDArray[np.bool_]:
    """Return which items are ranked for each case, [B, n_items]."""
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
    """Return the items among any case's first k candidates, -inf excluded, flattened."""
    scores = np.where(candidates, scores, -np.inf)
    k = min(k, scores.shape[1])
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return top[np.take_along_axis(scores, top, axis=1) > -np.inf]
