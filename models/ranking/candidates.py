"""Candidates: the items that reach the target attention, by one vector for the user.

Every target has a query of its own, of which a part is the user's: attention with that part alone
gives one readout r_u for all targets, whose product with an item's vector approximates the
attention part of the item's score, and `coarse_step` adds the target's part to first order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.attention.kv_memory import merge_heads
from models.attention.partial_softmax import query_jacobian
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import RowIndices, sorted_union
from models.history.user_memory import UserMemory, at_request, is_known, known_rows
from models.index.ann_index import CoarseIndex
from models.index.memory_attention import Memory, as_mask, attend, retrieve
from models.ranking.scoring import similarity_scores, transition_scores
from models.recommender.target_attention import FIRST_ORDER_ITEMS, nearest_items

# So many items of one boost, or such a share of all, are compared without an index.
_FEW, _RARE = 4_096, 1 / 20
# An index finds one item in so many at least: of a million near copies, the best 20 are spread
# that far.
_SHARE = 200
RERANKED = 2  # codes of the index that are compared exactly for each item that it finds


class CoarseQuery(NamedTuple):
    """What the user's part of the queries says of all items."""

    readout: Tensor  # r_u [dim]
    jacobian: Tensor | None  # J [H, d, d], over the rows that are known


_KEPT: WeakKeyDictionary[UserMemory, CoarseQuery] = WeakKeyDictionary()


def coarse_query(
    snapshot: Snapshot, user: UserMemory, options: AttentionOptions = DEFAULT_OPTIONS
) -> CoarseQuery:
    """Compute the coarse query, which is kept as long as the memory.

    There is no Jacobian without an encoder: the user has no part of the queries then, and the
    single head is as wide as the texts' vectors, so that its product would take longer than the
    exact softmax.
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
    """Return the `count` allowed items of the largest approximate scores, ascending.

    All items are compared by ⟨r_u, x_c⟩, transitions, similarity, prior and boost, and the best of
    them then to first order in the target's part of the queries. Where there is an index, only the
    items that it finds are compared to first order, newer ones, and those that the parts which an
    index does not contain rank first.

    Args:
        allowed: bool [N].
        count: number of items; all are returned where fewer are allowed.
        boost: [N] added to the scores.
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
    """Return how many of the allowed items an index finds, of which `count` become candidates."""
    return max(FIRST_ORDER_ITEMS, 2 * count, items // _SHARE)


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

    They are the `most` best by ⟨r_u, x_c⟩, prior and boosts of the items in the index, as many of
    the newer ones, and the first by parts that the index does not contain: `count` items with the
    largest transition counts, as many with the largest similarity, and for repeat consumption the
    user's newest items.

    Boosts are no part of an index either. Items of one boost are in the order of their scores, so
    an index is searched as widely as the rarest of the boosts that many items have asks for; items
    of the other boosts are compared exactly.
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
    """Return the `count` best of the indexed items that are allowed, unordered."""
    query = readout[None].numpy()
    if boost is None:
        rows: RowIndices = index.search(query, count, allow=allowed, probes=RERANKED * count)[0]
        return rows[rows >= 0]
    own = boost[: len(allowed)]
    rare, least = _rare_boosts(own, allowed)
    common = allowed.copy()
    common[rare] = False
    # The candidates are shared by several boosts, of each of which fewer are needed.
    probes = RERANKED * count
    found = index.search(query, count, allow=common, boost=own, least=least, probes=probes)[0]
    rows = np.concatenate([found[found >= 0], rare])
    if len(rows) <= count:
        return rows
    near = snapshot.tables.vectors.numpy().take(rows, axis=0) @ query[0]
    near += snapshot.tables.prior.numpy().take(rows) + own.take(rows)
    best: RowIndices = rows[np.argpartition(near, -count)[-count:]]
    return best


def _rare_boosts(boost: NDArray[np.float32], allowed: NDArray[np.bool_]) -> tuple[RowIndices, int]:
    """Return the allowed items whose boost few others share.

    Returns also the fewest items [n] that share one of the other boosts.
    """
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
    """Return items [n] to compare, the first by the parts that an index does not contain.

    They are the items that most often followed the newest ones, the newest ones themselves if they
    are repeated, and the items that are most similar to all of the user's.
    """
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
