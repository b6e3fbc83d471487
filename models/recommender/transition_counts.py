"""The memorising head: what followed a user's last items in other histories, as a log count.

    F(c) = Σ_{k<depth} decay^k M[item k from the end, c],  M[a, b] = Σ 1 / distance^power

over pairs of events at most 20 apart, and the head gives λ(h) · log(1 + 2 F(c)).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.data.row_sets import sorted_union, user_item_keys
from models.recommender.cooccurrence import TransitionMatrix, transition_matrix

MAX_PAIR_DISTANCE = 20


class CooccurrenceWindow(NamedTuple):
    """Which of a user's events count, and what nearness is worth."""

    decay: float  # of an event for each one after it
    depth: int  # events that count, the newest
    power: float  # of the distance between the events of a pair


# After single events the newest say most by far: the ninth from the end would weigh 7e-5.
SEQUENCE_WINDOW = CooccurrenceWindow(0.3, 8, 2.0)
# What was taken at one time has no order, and what is taken next goes with all of it alike.
BASKET_WINDOW = CooccurrenceWindow(1.0, 180, 1.0)


class TransitionCounts(NamedTuple):
    """The items that most followed each item: N items, K kept of each."""

    items: Tensor  # int32 [N, K], N where fewer than K followed
    counts: Tensor  # float32 [N, K], 0 there


def transition_counts(
    log: Interactions, most: int, window: CooccurrenceWindow = SEQUENCE_WINDOW
) -> TransitionCounts:
    """Count what follows what, and keep the `most` frequent followers of each item.

    Raises ValueError for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    return _kept(transition_matrix(log, window=MAX_PAIR_DISTANCE, power=window.power), most)


def _kept(matrix: TransitionMatrix, most: int) -> TransitionCounts:
    """The largest entries of each row, as rectangles."""
    n = matrix.n_items
    rows = np.repeat(np.arange(n), np.diff(matrix.offsets))
    order = np.lexsort((-matrix.counts, rows))  # by row, largest first; ties keep the column order
    place = np.arange(len(rows)) - matrix.offsets[rows]
    inside = place < most
    columns = np.full((n, most), n, dtype=np.int32)
    counts = np.zeros((n, most), dtype=np.float32)
    at = rows[inside], place[inside]
    columns[at], counts[at] = matrix.columns[order][inside], matrix.counts[order][inside]
    return TransitionCounts(torch.from_numpy(columns), torch.from_numpy(counts))


def transition_sums(
    counts: TransitionCounts, items: Tensor, window: CooccurrenceWindow = SEQUENCE_WINDOW
) -> Tensor:
    """F(c) after a user's last items.

    Args:
        kept: what follows each item.
        items: int64 [n] item rows, newest first, of which the first `reach.depth` count; -1 where
            an item is none of these, which takes its place all the same.
        reach: as it was counted with.

    Returns:
        Tensor: [N].
    """
    size = len(counts.items)
    items, decay = _reached(items, window)
    rows, worth = items.clamp(min=0), decay * (items >= 0)
    weighted = counts.counts.index_select(0, rows) * worth[:, None]
    total = counts.counts.new_zeros(size + 1)
    total.index_add_(0, counts.items.index_select(0, rows).flatten(), weighted.flatten())
    return total[:size]


def top_transitions(
    counts: TransitionCounts,
    items: Tensor,
    count: int,
    window: CooccurrenceWindow = SEQUENCE_WINDOW,
) -> Tensor:
    """The items [≤ count] of the largest F above 0, largest first.

    items and reach as in `followed`.
    """
    total = transition_sums(counts, items, window)
    near = counts.items.index_select(0, items[: window.depth].clamp(min=0)).flatten()
    if len(near) < len(total):  # of a large catalogue hardly any item followed
        places = torch.from_numpy(sorted_union(near[near < len(total)].long().numpy()))
    else:
        places = torch.arange(len(total))
    best, at = torch.topk(total[places], min(count, len(places)))
    found: Tensor = places[at[best > 0]]
    return found


def transition_shares(
    counts: TransitionCounts,
    items: Tensor,
    target: int,
    window: CooccurrenceWindow = SEQUENCE_WINDOW,
) -> Tensor:
    """What each of a user's last items adds to F(target), [min(n, depth)].

    items and reach as in `followed`.
    """
    items, decay = _reached(items, window)
    if target < 0:
        return counts.counts.new_zeros(len(items))
    rows = items.clamp(min=0)
    there = (counts.items[rows] == target) & (items >= 0)[:, None]
    return (counts.counts[rows] * there).sum(1) * decay


def _reached(items: Tensor, reach: CooccurrenceWindow) -> tuple[Tensor, Tensor]:
    """The items that count and what each is worth."""
    items = items[: reach.depth]
    return items, _decays(reach.decay, reach.depth).to(items.device)[: len(items)]


@cache
def _decays(decay: float, depth: int) -> Tensor:
    """What each of a user's last items is worth, [depth]."""
    with torch.inference_mode(False):  # whoever asks first
        return decay ** torch.arange(depth)


class OwnTransitions:
    """What each user's own history put into the counts, to be taken out while training on it.

    A model that sees its own targets counted learns to trust counts that will not be there.
    """

    def __init__(self, log: Interactions, reach: CooccurrenceWindow = SEQUENCE_WINDOW) -> None:
        n = log.n_items
        users, liked = log.users, ~log.disliked
        # Numbered anew, so that pairs of them fit an integer however many there are.
        own = user_item_keys(users, log.items, n)
        owned: NDArray[np.int64] = np.unique(own, return_inverse=True)[1]
        keys, values = [np.zeros(0, np.int64)], [np.zeros(0)]
        for distance in range(1, min(MAX_PAIR_DISTANCE, max(0, len(log) - 1)) + 1):
            same = np.flatnonzero((users[:-distance] == users[distance:]) & liked[distance:])
            keys.append(owned[same] * n + log.items[same + distance])
            values.append(np.full(len(same), distance**-reach.power))
        followed_by, weights = np.concatenate(keys), np.concatenate(values)
        order = np.argsort(followed_by, kind="stable")
        followed_by = followed_by[order]
        heads = np.flatnonzero(np.diff(followed_by, prepend=-1))
        sums = np.add.reduceat(weights[order], heads) if len(heads) else weights
        source = followed_by[heads] // n
        self._columns: NDArray[np.int64] = followed_by[heads] % n
        self._counts: NDArray[np.float32] = sums.astype(np.float32)
        self._begin = np.searchsorted(source, owned, "left")  # [E]
        self._lengths = np.searchsorted(source, owned, "right") - self._begin

    def starting_at(self, events: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs that start at the items of these events [n]: place in `events`, column, count.

        No column comes twice for one place.
        """
        begin, lengths = self._begin[events], self._lengths[events]
        place = np.repeat(np.arange(len(events)), lengths)
        within = np.arange(len(place)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        at = np.repeat(begin, lengths) + within
        return (
            torch.from_numpy(place),
            torch.from_numpy(self._columns[at]),
            torch.from_numpy(self._counts[at]),
        )


class HeldOutTransitions:
    """F of every position of whole windows, each user's own share taken out."""

    def __init__(
        self,
        kept: TransitionCounts,
        own: OwnTransitions,
        reach: CooccurrenceWindow = SEQUENCE_WINDOW,
    ) -> None:
        self._columns, self._counts, self._own = kept.items.long(), kept.counts, own
        self._reach = reach

    def log_counts(
        self, items: Tensor, events: NDArray[np.int64], column: Tensor | None, width: int
    ) -> Tensor:
        """log(1 + 2F) of each position, [B, L, width].

        Args:
            items: int64 [B, L] item rows.
            events: their places in the log, [B, L].
            column: int64 [N + 1], the column of each item, `width` where it has none; None where
                an item's column is its row.
            width: columns there are.
        """
        batch, length = items.shape
        flat = items.reshape(-1)
        total = self._counts.new_zeros(batch * length, width + 1)
        columns = self._columns[flat]
        place, own, counts = (
            part.to(items.device) for part in self._own.starting_at(events.reshape(-1))
        )
        if column is not None:
            columns, own = column[columns], column[own]
        # Only the last, unread column comes twice in a row; elsewhere nothing needs adding up.
        total.scatter_(1, columns, self._counts[flat])
        everywhere, at = total.view(-1), place * (width + 1) + own
        there = everywhere[at]  # nothing where the pair was not kept
        everywhere[at] = there - torch.minimum(there, counts)
        total = self._over(total.view(batch, length, width + 1))
        return total[:, :, :width].mul_(2).log1p_()

    def _over(self, each: Tensor) -> Tensor:
        """Sums [B, L, W] over each position and those before it that it reaches; `each` is lost."""
        decay, depth, _ = self._reach
        if decay == 1:
            return _newest_sum(each, depth)
        more, reach = torch.empty_like(each), 1
        while reach < min(depth, each.shape[1]):  # over 1, 2, 4, 8 positions
            more[:, :reach] = each[:, :reach]
            torch.add(each[:, reach:], each[:, :-reach], alpha=decay, out=more[:, reach:])
            each, more, reach, decay = more, each, 2 * reach, decay * decay
        return each


def log_repeat_counts(
    columns: Tensor, liked: Tensor, width: int, reach: CooccurrenceWindow
) -> Tensor:
    """log(1 + how often it was taken) of each column at each position, [B, L, width].

    Args:
        columns: int64 [B, L], `width` where an item has none.
        liked: [B, L], 1 for what was.
        width: columns there are.
        reach: how far back it counts.
    """
    taken = liked.new_zeros(*columns.shape, width + 1)
    taken.scatter_(2, columns[..., None], liked[..., None])
    return _newest_sum(taken, reach.depth)[:, :, :width].log1p_()


def _newest_sum(each: Tensor, depth: int) -> Tensor:
    """Sums [B, L, W] over each position and the depth - 1 before it."""
    total = each.cumsum(1)
    if depth < each.shape[1]:
        older = total[:, :-depth].clone()
        total[:, depth:].sub_(older).clamp_(min=0)  # what rounding leaves may be below
    return total
