"""The memorising head: what followed a user's last items in other histories, as a log count.

    F(c) = Σ_k decay^k M[item k from the end, c],  M[a, b] = Σ 1 / distance²

over pairs of events at most 20 apart, and the head gives λ(h) · log(1 + 2 F(c)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data import Interactions
from models.transitions import Transitions, transitions

DECAY = 0.3
DEPTH = 8  # events that count: the ninth would weigh 7e-5
WINDOW = 20
POWER = 2.0


class Followers(NamedTuple):
    """The items that most followed each item: N items, K kept of each."""

    columns: Tensor  # int32 [N, K], N where fewer than K followed
    counts: Tensor  # float32 [N, K], 0 there


def followers(log: Interactions, most: int) -> Followers:
    """Count what follows what, and keep the `most` frequent followers of each item.

    Raises ValueError for `most` below 1.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    return _kept(transitions(log, window=WINDOW, power=POWER), most)


def _kept(matrix: Transitions, most: int) -> Followers:
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
    return Followers(torch.from_numpy(columns), torch.from_numpy(counts))


def followed(kept: Followers, items: Tensor) -> Tensor:
    """F(c) after a user's last items.

    Args:
        kept: what follows each item.
        items: int64 [n] item rows, newest first, of which the first `DEPTH` count; -1 where an item
            is none of these, which takes its place all the same.

    Returns:
        Tensor: [N].
    """
    size = len(kept.columns)
    total = kept.counts.new_zeros(size + 1)
    for place, item in enumerate(items[:DEPTH].tolist()):
        if item >= 0:
            total.index_add_(0, kept.columns[item], kept.counts[item], alpha=DECAY**place)
    return total[:size]


def share(kept: Followers, items: Tensor, target: int) -> Tensor:
    """What each of a user's last items adds to F(target), [min(n, DEPTH)].

    items as in `followed`.
    """
    items = items[:DEPTH]
    if target < 0:
        return kept.counts.new_zeros(len(items))
    rows = items.clamp(min=0)
    there = (kept.columns[rows] == target) & (items >= 0)[:, None]
    decay = DECAY ** torch.arange(len(items))
    return (kept.counts[rows] * there).sum(1) * decay


class OwnPairs:
    """What each user's own history put into the counts, to be taken out while training on it.

    A model that sees its own targets counted learns to trust counts that will not be there.
    """

    def __init__(self, log: Interactions) -> None:
        n = log.n_items
        users, liked = log.users, ~log.disliked
        # One number for each user's item, so that pairs fit an integer however many there are.
        own = users.astype(np.int64) * n + log.items
        owned: NDArray[np.int64] = np.unique(own, return_inverse=True)[1]
        keys, values = [np.zeros(0, np.int64)], [np.zeros(0)]
        for distance in range(1, min(WINDOW, max(0, len(log) - 1)) + 1):
            same = np.flatnonzero((users[:-distance] == users[distance:]) & liked[distance:])
            keys.append(owned[same] * n + log.items[same + distance])
            values.append(np.full(len(same), distance**-POWER))
        pairs, weights = np.concatenate(keys), np.concatenate(values)
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        heads = np.flatnonzero(np.diff(pairs, prepend=-1))
        sums = np.add.reduceat(weights[order], heads) if len(heads) else weights
        source = pairs[heads] // n
        self._columns: NDArray[np.int64] = pairs[heads] % n
        self._counts: NDArray[np.float32] = sums.astype(np.float32)
        self._begin = np.searchsorted(source, owned, "left")  # [E]
        self._lengths = np.searchsorted(source, owned, "right") - self._begin

    def of(self, events: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
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


class Counting:
    """F of every position of whole windows, each user's own share taken out."""

    def __init__(self, kept: Followers, own: OwnPairs) -> None:
        self._columns, self._counts, self._own = kept.columns.long(), kept.counts, own

    def at(
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
        place, own, counts = (part.to(items.device) for part in self._own.of(events.reshape(-1)))
        if column is not None:
            columns, own = column[columns], column[own]
        # Only the last, unread column comes twice in a row; elsewhere nothing needs adding up.
        total.scatter_(1, columns, self._counts[flat])
        everywhere, at = total.view(-1), place * (width + 1) + own
        there = everywhere[at]  # nothing where the pair was not kept
        everywhere[at] = there - torch.minimum(there, counts)
        total = total.view(batch, length, width + 1)
        more, reach, share = torch.empty_like(total), 1, DECAY
        while reach < min(DEPTH, length):  # F over 1, 2, 4, 8 events
            more[:, :reach] = total[:, :reach]
            torch.add(total[:, reach:], total[:, :-reach], alpha=share, out=more[:, reach:])
            total, more, reach, share = more, total, 2 * reach, share * share
        return total[:, :, :width].mul_(2).log1p_()
