"""Recommendation: candidates, exact target attention over them, popularity, steering."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.snapshot import Snapshot, popular_first
from models.data.vocabulary import RowIndices, sorted_union
from models.history.user_memory import UserMemory, is_known
from models.index.key_lists import LEAST_ROWS
from models.ranking.candidates import candidates
from models.ranking.scoring import Scores, score
from models.ranking.steering.boost_unit import UNIT_OF
from models.ranking.steering.exploration import EXPLORED
from models.ranking.steering.item_steering import FEW_EVENTS, NO_STEERING, ItemSteering
from models.ranking.steering.lineup import SPREAD, Moved, Pool, line_up
from models.ranking.steering.quota_counts import QuotaCounts
from models.recommender.target_attention import CANDIDATES

# Without an encoder the user's part of the queries is zero, and candidates are no more than near.
# Every item is then scored while targets × rows stay below this: measured by `make bench`, about
# 30 ms on one core.
EXACT_WORK = 2_000_000
# Items that reach the target attention otherwise, at least. For a history of very many items, the
# coarse step knows only the newest rows, to first order; an index has errors of its own.
LONG_CANDIDATES = INDEXED_CANDIDATES = 300
# Share of the candidates down to which quotas may be filled before there are more candidates, and
# how many times as many there may be before this is deep enough.
_DEEP = 0.5
_DEEPEST = 4
# Without an encoder, one item in so many is a candidate: of a million near copies, the best 20 are
# spread that far.
_SHARE = 400


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Recommended items, best first."""

    rows: RowIndices  # [L]
    scores: Scores  # of these rows, in this order
    personal: bool  # False: by popularity, without a memory to attend to
    compared: int  # items whose scores were computed
    is_whole: bool  # they are all that may be returned
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its score puts it
    propensities: NDArray[np.float32] | None = None  # [L] of being shown; None = nothing explored


@torch.inference_mode()
def recommend(
    snapshot: Snapshot,
    user: UserMemory,
    *,
    limit: int,
    allowed: NDArray[np.bool_],
    excluded: RowIndices,
    diversity: float = 0.0,
    options: AttentionOptions = DEFAULT_OPTIONS,
    steering: ItemSteering = NO_STEERING,
) -> Ranked:
    """Rank the items of the catalogue for a user.

    Quotas are filled from the top of the ranking, as deep as it takes: an item is left out only
    where better ones leave no room for it.

    Args:
        user: from `build_memory`; empty gives the popular items, or where items are boosted those
            of the largest score.
        limit: the most items.
        allowed: bool [N], the items that may be returned, if they are `recommendable`.
        excluded: item rows that may not be returned, even if allowed.
        diversity: 0 ranks by score alone, 1 by dissimilarity to the items above (MMR).
        options: the softmax and the retrieval of rows; `exact` scores every item.
        steering: of the same catalogue; its pins are returned even where they are not allowed.
            The unit of relative boosts is that of all allowed items, excluded ones too.
    """
    allowed = allowed & snapshot.recommendable
    if steering.boost is not None and steering.is_relative:
        steering = steering.scaled(best_scores(snapshot, user, allowed, options))
    allowed[excluded] = False
    allowed[steering.pinned] = False
    work = _Ranking(snapshot, user, allowed, options, steering)
    count = int(np.count_nonzero(allowed))
    wanted = candidate_count(snapshot, user, limit, count)
    if not len(user):
        rows = popular_first(snapshot, np.flatnonzero(allowed))
        if not (steering.reorders or steering.boost is not None):
            rows = rows[: max(limit, SPREAD if diversity else limit)]
    elif options.mode == "exact" or work.is_small(count) or count <= wanted:
        rows = np.flatnonzero(allowed)
    else:
        rows = work.candidates(allowed, wanted)
    scores = work.score(rows)
    while True:
        exact = not len(user) or len(rows) == count
        counts = QuotaCounts.over(
            snapshot.catalogue.fields, steering.quotas, np.concatenate([rows, steering.pinned])
        )
        lineup = line_up(
            work.pool(rows, scores), counts, steering, limit=limit, diversity=diversity
        )
        # The candidates are the best ones by an approximation, of which the lower half is slack.
        is_full = len(lineup.places) == limit and (
            lineup.depth <= _DEEP or len(rows) >= _DEEPEST * wanted
        )
        if exact or is_full or not counts.constrains:
            break
        rest = allowed & ~counts.closed_rows(len(allowed))
        rest[rows] = False
        if not rest.any():
            break
        more = work.candidates(rest, len(rows))
        scores = work.score(more, before=(len(rows), scores))
        rows = np.concatenate([rows, more])
    every = np.concatenate([rows, steering.pinned])
    return Ranked(
        every[lineup.places],
        scores.take(torch.from_numpy(lineup.places)),
        personal=len(user) > 0,
        compared=len(every),
        is_whole=exact,
        moved=lineup.moved,
        propensities=lineup.propensities,
    )


def best_scores(
    snapshot: Snapshot, user: UserMemory, allowed: NDArray[np.bool_], options: AttentionOptions
) -> NDArray[np.float32]:
    """Return the scores of the best allowed items [<= UNIT_OF], which are the unit of boosts."""
    none = np.zeros(0, np.int64)
    best = recommend(snapshot, user, limit=UNIT_OF, allowed=allowed, excluded=none, options=options)
    scores: NDArray[np.float32] = best.scores.total.numpy()
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class _Ranking:
    """Candidates and scores of one recommendation; pins are scored behind the candidates."""

    snapshot: Snapshot
    user: UserMemory
    allowed: NDArray[np.bool_]  # [N] without pins
    options: AttentionOptions
    steering: ItemSteering

    def is_small(self, items: int) -> bool:
        """True if so many items are all scored, because candidates would be no more than near."""
        work = items * _cost(self.user)
        return self.snapshot.model.encoder is None and work <= EXACT_WORK

    def candidates(self, among: NDArray[np.bool_], wanted: int) -> RowIndices:
        """Return candidates of a mask [N]: buried ones where others are few, some to explore."""
        buried = self.steering.buried
        ahead = among if buried is None else among & ~buried
        found = self._nearest(ahead, wanted)
        if buried is not None and len(found) < wanted:
            found = sorted_union(found, self._nearest(among & buried, wanted - len(found)))
        if self.steering.explore > 0:
            few = ahead & (self.snapshot.counts < FEW_EVENTS)
            found = sorted_union(found, self._nearest(few, min(wanted, EXPLORED)))
        return found

    def _nearest(self, among: NDArray[np.bool_], wanted: int) -> RowIndices:
        if np.count_nonzero(among) <= wanted:
            return np.flatnonzero(among)
        boost = self.steering.boost
        return candidates(self.snapshot, self.user, among, wanted, self.options, boost)

    def score(self, rows: RowIndices, before: tuple[int, Scores] | None = None) -> Scores:
        """Return the scores of rows and of the pins; `before` are rows and pins already scored."""
        boost, pinned = self.steering.boost, self.steering.pinned
        every = np.concatenate([rows, pinned])
        scores = score(self.snapshot, self.user, every, self.options)
        if boost is not None:
            scores = scores.with_boost(boost[every])
        if before is None:
            return scores
        count, old = before
        return old.take(torch.arange(count)).concat(scores)

    def pool(self, rows: RowIndices, scores: Scores) -> Pool:
        """Return the pool of candidates and pins."""
        boost = self.steering.boost
        every = np.concatenate([rows, self.steering.pinned])
        # Without a memory the rows are in order of popularity, from which a trained prior may
        # differ; where a boost moves an item, its score says how far.
        by_score = len(self.user) or (boost is not None and bool(boost[every].any()))
        worth = scores.total if by_score else -torch.arange(len(every)).float()
        vectors, at = self.snapshot.tables.vectors, torch.from_numpy(every)
        return Pool(
            every, worth, scores.total, self.snapshot.counts[every], lambda some: vectors[at[some]]
        )


def candidate_count(
    snapshot: Snapshot,
    user: UserMemory,
    limit: int,
    items: int,
) -> int:
    """Return the number of candidates among so many items, bounded by the work of scoring."""
    fewest = CANDIDATES if is_known(user) else LONG_CANDIDATES
    if snapshot.index is not None:
        fewest = INDEXED_CANDIDATES
    many = 0
    if snapshot.model.encoder is None:  # the coarse step does not know the target's part
        many = min(items // _SHARE, int(EXACT_WORK / 4 / max(1.0, _cost(user))))
    return max(fewest, 4 * limit, many)


def _cost(user: UserMemory) -> float:
    """Return the cost of attending for one target, in rows."""
    older = 0 if user.collapsed is None else min(len(user.collapsed), LEAST_ROWS)
    return len(user.memory) + older
