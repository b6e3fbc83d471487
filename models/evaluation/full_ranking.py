"""Full-ranking evaluation: every target against the whole catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.data.interactions import Interactions
from models.evaluation.metrics import hits, ndcg_gains, reciprocal_ranks, standard_error
from models.evaluation.splits import Holdout

SECOND = 1_000_000  # microseconds


class Ranker(Protocol):
    """Anything that can score a whole catalogue for a batch of users."""

    @property
    def name(self) -> str:
        """What stands in the table."""
        ...

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """[B, n_items], higher is better, for rows `users` [B] of `history`.

        Only `history` may be looked at, never the training log's own rows. request_times [B] are
        the microseconds at which the scores are wanted, None where that is not known. A score of
        -inf means never; NaN is refused. Callers do not write into the array.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RankingMetrics:
    """Means over the cases of one evaluation. With no cases every mean is nan."""

    k: int
    hr: float  # share of targets among the first k
    ndcg: float  # at k
    mrr: float  # over the full ranking
    coverage: float  # share of the catalogue that stands among anyone's first k
    n_cases: int
    ranks: NDArray[np.int64]  # [M], 0 = first

    def standard_errors(self) -> tuple[float, float]:
        """Standard errors of hr and ndcg over cases."""
        return (
            standard_error(hits(self.ranks, self.k)),
            standard_error(ndcg_gains(self.ranks, self.k)),
        )

    def __str__(self) -> str:
        return (
            f"HR@{self.k} {self.hr:.4f}  NDCG@{self.k} {self.ndcg:.4f}  MRR {self.mrr:.4f}  "
            f"coverage {self.coverage:.3f}  n {self.n_cases}"
        )


class GapSlice(NamedTuple):
    """The cases whose target came `low` to `high` (exclusive) microseconds after the last event."""

    low: int
    high: int | None
    n: int
    hr: float
    ndcg: float


def evaluate(
    ranker: Ranker,
    holdout: Holdout,
    *,
    k: int = 10,
    batch_size: int = 256,
    exclude_seen: bool = True,
    max_seen: int | None = None,
    use_target_time: bool = False,
    progress: Callable[[int, int], None] | None = None,
    group: DataParallelGroup = SINGLE_PROCESS,
) -> RankingMetrics:
    """Rank each target among all items; with exclude_seen, all but those in the user's history.

    `seen` leaves out the items of that many newest events only.

    Ties rank against us: a target stands behind every candidate of the same score, so a constant
    ranker gets nothing. A target that was seen before stays a candidate. use_target_time tells
    the ranker the target's own time; report figures with and without it. `progress` is called
    with (cases done, cases in all) after each batch. The members of a `team` rank every n-th batch
    each, and all have the result. Raises ValueError where scores have the wrong shape or hold NaN.
    """
    if batch_size < 1:
        raise ValueError(f"batch must be at least 1, got {batch_size}")
    ranks = np.zeros(len(holdout), dtype=np.int64)
    shown = np.zeros(holdout.history.n_items, dtype=np.int64)
    for rows in [*_batches(len(holdout), batch_size)][group.rank :: group.world_size]:
        scores = _scores(ranker, holdout, rows, use_target_time=use_target_time)
        targets = holdout.targets[rows]
        candidates = np.ones(scores.shape, dtype=np.bool_)
        if exclude_seen:
            cases, events = holdout.history.gather(holdout.users[rows], last=max_seen)
            candidates[cases, holdout.history.items[events]] = False
        ranks[rows] = _target_ranks(scores, targets, candidates)
        candidates[np.arange(len(targets)), targets] = True
        shown[_first(scores, candidates, k)] = 1
        if progress is not None:
            progress(rows.stop, len(holdout))
    return _summary(group.all_reduce_sum(ranks), k, group.all_reduce_sum(shown) > 0)


def _scores(
    ranker: Ranker, holdout: Holdout, rows: slice, *, use_target_time: bool
) -> NDArray[np.float32]:
    """[B, n_items] of cases; the same question, as for the items of a basket, is asked once."""
    users, times = holdout.users[rows], holdout.timestamps[rows]
    asked = np.stack([users.astype(np.int64), times if use_target_time else np.zeros_like(times)])
    _, first, question = np.unique(asked, axis=1, return_index=True, return_inverse=True)
    scores = ranker.scores(holdout.history, users[first], times[first] if use_target_time else None)
    _check(ranker.name, scores, (len(first), holdout.history.n_items))
    return scores[question.reshape(-1)]


def by_gap(
    holdout: Holdout,
    metrics: RankingMetrics,
    edges: Sequence[int] = (0, SECOND, 60 * SECOND, 3600 * SECOND),
) -> list[GapSlice]:
    """The same evaluation by the time between a user's last seen event and the target.

    Slices run from each edge (microseconds, rising) to the next, the last one without end; the
    defaults are: the same second, under a minute, under an hour, longer. Cases below the first
    edge (users without any event have a gap of -1) are in no slice.
    """
    if len(holdout) != metrics.n_cases:
        raise ValueError(
            f"metrics are over {metrics.n_cases} cases, the holdout has {len(holdout)}"
        )
    if any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"edges must rise, got {list(edges)}")
    gaps = holdout.gaps()
    slices = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = (gaps >= low) if high is None else (gaps >= low) & (gaps < high)
        ranks = metrics.ranks[inside]
        hr, ndcg = _mean(hits(ranks, metrics.k)), _mean(ndcg_gains(ranks, metrics.k))
        slices.append(GapSlice(low, high, len(ranks), hr, ndcg))
    return slices


def _batches(cases: int, batch: int) -> Iterator[slice]:
    for start in range(0, cases, batch):
        yield slice(start, min(start + batch, cases))


def _check(name: str, scores: NDArray[np.float32], shape: tuple[int, int]) -> None:
    if scores.shape != shape:
        raise ValueError(f"{name}: scores must be {list(shape)}, got {list(scores.shape)}")
    if np.isnan(scores).any():
        raise ValueError(f"{name}: scores hold NaN")


def _target_ranks(
    scores: NDArray[np.float32], targets: NDArray[np.int32], candidates: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[B] how many candidates other than the target score at least as much."""
    cases = np.arange(len(targets))
    ahead = (scores >= scores[cases, targets][:, None]) & candidates
    ahead[cases, targets] = False
    ranks: NDArray[np.int64] = ahead.sum(axis=1, dtype=np.int64)
    return ranks


def _first(scores: NDArray[np.float32], candidates: NDArray[np.bool_], k: int) -> NDArray[np.int64]:
    """The items among any case's first k candidates (never those scored -inf), flattened."""
    scores = np.where(candidates, scores, -np.inf)
    k = min(k, scores.shape[1])
    top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return top[np.take_along_axis(scores, top, axis=1) > -np.inf]


def _summary(ranks: NDArray[np.int64], k: int, shown: NDArray[np.bool_]) -> RankingMetrics:
    return RankingMetrics(
        k=k,
        hr=_mean(hits(ranks, k)),
        ndcg=_mean(ndcg_gains(ranks, k)),
        mrr=_mean(reciprocal_ranks(ranks)),
        coverage=_mean(shown.astype(np.float64)) if len(ranks) else float("nan"),
        n_cases=len(ranks),
        ranks=ranks,
    )


def _mean(worth: NDArray[np.float64]) -> float:
    return float(worth.mean()) if len(worth) else float("nan")
