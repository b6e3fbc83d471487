"""Recommendation: candidates, exact target attention over them, popularity, steering.

Candidates are the items that reach the target attention, by one vector for the user. Every target
has a query of its own, of which a part is the user's: attention with that part alone gives one
readout r_u for all targets, whose product with an item's vector approximates the attention part of
the item's score, and `nearest_items` adds the target's part to first order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions, merge_heads
from models.attention.partial_softmax import query_jacobian
from models.catalogue.snapshot import Snapshot, popular_first
from models.data.vocabulary import RowIndices, sorted_union
from models.history.user_memory import UserMemory, at_request, is_known, known_rows
from models.index.ann_index import CoarseIndex
from models.index.key_lists import LEAST_ROWS
from models.index.memory_attention import Memory, as_mask, attend, retrieve
from models.ranking.lineup import EXPLORED, SPREAD, Moved, Pool, line_up
from models.ranking.scoring import Scores, score, similarity_scores, transition_scores
from models.ranking.steering import FEW_EVENTS, NO_STEERING, UNIT_OF, ItemSteering, QuotaCounts
from models.recommender.target_attention import CANDIDATES, FIRST_ORDER_ITEMS, nearest_items

_FEW, _RARE = 4_096, 1 / 20  # items of one boost, or their share, that are compared exactly
# An index finds one item in this many at least: of a million near copies, the best 20 are spread
# that far.
_COMPARED_SHARE = 200
RERANKED = 2  # codes of the index that are compared exactly for each item that it finds


class CoarseQuery(NamedTuple):
    """Scores of all items by the user's part of the queries."""

    readout: Tensor  # r_u [dim]
    jacobian: Tensor | None  # J [H, d, d], over the rows that are known


_KEPT: WeakKeyDictionary[UserMemory, CoarseQuery] = WeakKeyDictionary()


def coarse_query(
    snapshot: Snapshot, user: UserMemory, options: AttentionOptions = DEFAULT_OPTIONS
) -> CoarseQuery:
    """Compute the coarse query, which is kept as long as the memory.

    Without an encoder it has no Jacobian: the user has no part of the queries then, and the single
    head is as wide as the texts' vectors, whose product would take longer than the exact softmax.
    """
    kept = None if options.mode == "coarse" else _KEPT.get(user)
    if kept is not None:
        return kept
    query, plain = user.query[:, None], replace(options, temperature=1.0, hard=False)
    memory = Memory(user.block, user.collapsed, indexes=user.indexes)
    with at_request(user):
        block = known_rows(user)
        if options.mode == "coarse":
            mask = as_mask(retrieve(query, memory, plain), block.bias.shape[1])[:, 0]
            block = block._replace(bias=block.bias.masked_fill(~mask, -torch.inf))
        whole = Memory(block) if is_known(user) else memory
        context = attend(query, whole, replace(plain, mode="auto")).partial.context
    jacobian = None
    if snapshot.model.encoder is not None:
        jacobian = query_jacobian(user.query, block.keys, block.values, block.bias)
    readout = snapshot.model.cross_attention.w_o(merge_heads(context)[0])
    made = CoarseQuery(readout, jacobian)
    if options.mode != "coarse":
        _KEPT[user] = made
    return made


@torch.inference_mode()
def candidates(
    snapshot: Snapshot,
    user: UserMemory,
    allowed: NDArray[np.bool_],
    count: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    boost: NDArray[np.float32] | None = None,
) -> RowIndices:
    """Return the `count` allowed items [N] of the largest approximate scores, ascending.

    All items are compared by ⟨r_u, x_c⟩, transitions, similarity, prior and boost [N], and the best
    of them then to first order in the target's part of the queries. With an index, only three kinds
    of items are compared to first order: those that it finds, newer ones, and the first by the
    parts that an index does not contain.
    """
    readout, jacobian = coarse_query(snapshot, user, options)
    tables = snapshot.tables
    if snapshot.index is None:
        found = np.arange(len(allowed))
        rows = torch.from_numpy(found)
        near = tables.vectors @ readout + tables.prior
        near = near.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
        count = min(count, int(np.count_nonzero(allowed)))
        compared = max(FIRST_ORDER_ITEMS, 4 * count)
    else:
        most = gathered_count(int(np.count_nonzero(allowed)), count)
        found = _gathered(snapshot, snapshot.index, user, readout, allowed, count, most, boost)
        rows = torch.from_numpy(found)
        near = tables.vectors.index_select(0, rows) @ readout + tables.prior.index_select(0, rows)
        count, compared = min(count, len(found)), len(found)
    near += transition_scores(snapshot, user, rows, again=not options.exclude_self)
    similarity = similarity_scores(snapshot, user, rows)
    if similarity is not None:
        near += similarity
    if boost is not None:
        near += torch.from_numpy(boost[found])
    return np.sort(nearest_items(tables, rows, near, jacobian, count, compared).numpy())


def gathered_count(items: int, count: int) -> int:
    """Return how many of the allowed items an index finds for `count` candidates."""
    return max(FIRST_ORDER_ITEMS, 2 * count, items // _COMPARED_SHARE)


def _gathered(
    snapshot: Snapshot,
    index: CoarseIndex,
    user: UserMemory,
    readout: Tensor,
    allowed: NDArray[np.bool_],
    count: int,
    most: int,
    boost: NDArray[np.float32] | None,
) -> RowIndices:
    """Return the allowed items of a catalogue with an index that are compared, ascending.

    They are the `most` best by ⟨r_u, x_c⟩, prior and boosts in the index, as many newer ones, and
    the first by parts that the index does not contain: `count` items with the largest transition
    counts, as many with the largest similarity, and for repeat consumption the user's newest items.
    """
    first = snapshot.indexed_items
    newer = np.flatnonzero(allowed[first:]) + first
    if len(newer) > most:
        tables = snapshot.tables
        near = tables.vectors[first:] @ readout + tables.prior[first:]
        if boost is not None:
            near += torch.from_numpy(boost[first:])
        near = near.masked_fill_(~torch.from_numpy(allowed[first:]), -torch.inf)
        newer = near.topk(most, sorted=False).indices.numpy() + first
    found = _indexed(index, snapshot, readout, allowed[:first], most, boost)
    counted = _counted(snapshot, user, count)
    return sorted_union(found, newer, counted[allowed[counted]])


def _indexed(
    index: CoarseIndex,
    snapshot: Snapshot,
    readout: Tensor,
    allowed: NDArray[np.bool_],
    count: int,
    boost: NDArray[np.float32] | None,
) -> RowIndices:
    """Return the `count` best of the indexed items that are allowed, unordered.

    Items of one boost are in the order of their scores. The index is therefore searched as widely
    as the rarest of the frequent boosts needs, and items of rarer boosts are compared exactly.
    """
    query = readout[None].numpy()
    if boost is None:
        rows: RowIndices = index.search(query, count, allow=allowed, probes=RERANKED * count)[0]
        return rows[rows >= 0]
    boost = boost[: len(allowed)]
    rare, least = _rare_boosts(boost, allowed)
    common = allowed.copy()
    common[rare] = False
    # The candidates are shared by several boosts, each of which needs fewer.
    probes = RERANKED * count
    found = index.search(query, count, allow=common, boost=boost, least=least, probes=probes)[0]
    rows = np.concatenate([found[found >= 0], rare])
    if len(rows) <= count:
        return rows
    near = snapshot.tables.vectors.numpy().take(rows, axis=0) @ query[0]
    near += snapshot.tables.prior.numpy().take(rows) + boost.take(rows)
    best: RowIndices = rows[np.argpartition(near, -count)[-count:]]
    return best


def _rare_boosts(boost: NDArray[np.float32], allowed: NDArray[np.bool_]) -> tuple[RowIndices, int]:
    """Return the allowed items of rare boosts, and the fewest items that share another boost."""
    few, left = max(_FEW, int(len(boost) * _RARE)), allowed.copy()
    least, count = len(boost), int(np.count_nonzero(left))
    rare = np.zeros(len(boost), np.bool_)
    level: np.float32 | None = np.float32(0)  # of most items, as a rule
    while count and (level is not None or count > few):
        level = boost[left.argmax()] if level is None else level
        same = left & (boost == level)
        many = int(np.count_nonzero(same))
        if many > few:
            least = min(least, many)
        else:
            rare |= same
        left ^= same
        count, level = count - many, None
    return np.flatnonzero(rare | left), least


def _counted(snapshot: Snapshot, user: UserMemory, count: int) -> RowIndices:
    """Return items [n] to compare, the first by the parts that an index does not contain."""
    model = snapshot.model
    if not len(user.recent):
        return np.zeros(0, dtype=np.int64)
    taken, _ = user.taken(model.config.dislike_type)
    found = [taken.numpy()] if model.counts_repeats else []
    if model.has_transitions:
        followers = model.statistics.transition_counts.top(user.recent_items, count)
        found.append(snapshot.item_rows[followers.numpy()])
    if model.statistics.similarity is not None and user.similarity is not None:
        similarity = model.statistics.similarity
        similar = similarity.top(user.recent_items, user.similarity[:-1], count)
        found.append(snapshot.item_rows[similar.numpy()])
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


# Without an encoder the user's part of the queries is zero, and candidates are no more than near.
# Every item is then scored while targets × rows stay below this: about 30 ms on one core.
EXACT_WORK = 2_000_000
# Items that reach the target attention otherwise, at least. For a history of very many items, the
# coarse step knows only the newest rows, to first order; an index has errors of its own.
LONG_CANDIDATES = INDEXED_CANDIDATES = 300
# Share of the candidates down to which quotas may be filled before there are more candidates, and
# how many times as many there may be before this is deep enough.
_DEEP = 0.5
_DEEPEST = 4
# Without an encoder, one item in this many is a candidate: the best 20 of a million near copies are
# spread that far.
_EXACT_SHARE = 400


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
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

    Quotas are filled from the top of the ranking, as deep as it takes: an item is left out only if
    better ones leave no room for it.

    Args:
        user: from `build_memory`; empty gives the popular items, or if items are boosted those of
            the largest score.
        allowed: bool [N], the items that may be returned, if they are `recommendable`.
        excluded: item rows that may not be returned, even if allowed.
        diversity: 0 ranks only by score, 1 by dissimilarity to the items above (MMR).
        options: the softmax and the retrieval of rows; `exact` scores every item.
        steering: its pins are returned even if they are not allowed. The unit of relative boosts is
            that of all allowed items, excluded ones too.
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
        # The candidates are the best by an approximation; its lower half is slack.
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
        """Report whether all of this number of items are scored."""
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


def candidate_count(snapshot: Snapshot, user: UserMemory, limit: int, items: int) -> int:
    """Return the number of candidates among `items`, bounded by the work of scoring."""
    fewest = CANDIDATES if is_known(user) else LONG_CANDIDATES
    if snapshot.index is not None:
        fewest = INDEXED_CANDIDATES
    many = 0
    if snapshot.model.encoder is None:  # the coarse step does not know the target's part
        many = min(items // _EXACT_SHARE, int(EXACT_WORK / 4 / max(1.0, _cost(user))))
    return max(fewest, 4 * limit, many)


def _cost(user: UserMemory) -> float:
    older = 0 if user.collapsed is None else min(len(user.collapsed), LEAST_ROWS)
    return len(user.keys) + older
