"""Leave-one-out transition counts: each user's own pairs are subtracted while training on them.

A model that sees its own targets counted learns to trust counts that a request will not have.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions
from models.data.vocabulary import expand_ranges, user_item_keys
from models.recommender.co_occurrence import MAX_PAIR_DISTANCE, TransitionCounts, sum_pairs


class HeldOutTransitions:
    """Transition counts at every position of a window, without the window's own user."""

    def __init__(self, counts: TransitionCounts, log: Interactions) -> None:
        """Prepare the counts of a log, which `counts` were counted from."""
        self._items, self._counts, self._window = counts.items.long(), counts.counts, counts.window
        n = max(log.n_items, 1)
        # Dense codes of (user, item), so that pairs of them fit an integer in any log.
        held: NDArray[np.int64]
        sources: NDArray[np.int64]
        held, sources = np.unique(user_item_keys(log.users, log.items, n), return_inverse=True)
        keys, sums = sum_pairs(
            log, sources, np.arange(len(log)), MAX_PAIR_DISTANCE, counts.window.power
        )
        source, self._own_items = np.divmod(keys, n)
        self._own_counts = sums * counts.window.item_weights(log)[held[source] % n]
        self._begin = np.searchsorted(source, sources, "left")  # [E]
        self._lengths = np.searchsorted(source, sources, "right") - self._begin

    def log_counts(
        self, items: Tensor, events: NDArray[np.int64], column: Tensor | None, width: int
    ) -> Tensor:
        """Return log(1 + 2F) at each position, [B, L, width].

        Args:
            items: int64 [B, L] item rows.
            events: their rows in the log, [B, L].
            column: int64 [N + 1], the column of each item, `width` if it has none; None if an
                item's column is its row.
            width: number of columns.
        """
        batch, length = items.shape
        flat = items.reshape(-1)
        total = self._counts.new_zeros(batch * length, width + 1)
        columns = self._items[flat]
        # The pairs that start at each event's item in its user's history: no item comes twice.
        starts = events.reshape(-1)
        place, pairs = expand_ranges(self._begin[starts], self._lengths[starts])
        index, own, counts = (
            torch.from_numpy(part).to(items.device)
            for part in (place, self._own_items[pairs], self._own_counts[pairs])
        )
        if column is not None:
            columns, own = column[columns], column[own]
        # A row has duplicates in the last, unread column only, so nothing needs adding up.
        total.scatter_(1, columns, self._counts[flat])
        entries, at = total.view(-1), index * (width + 1) + own
        counted = entries[at]  # 0 for a pair outside the table
        entries[at] = counted - torch.minimum(counted, counts)
        total = self._decayed_sum(total.view(batch, length, width + 1))
        return total[:, :, :width].mul_(2).log1p_()

    def _decayed_sum(self, x: Tensor) -> Tensor:
        """Sum x [B, L, W] over each position's window with decaying weights; overwrites x."""
        decay, depth = self._window.decay, self._window.depth
        if decay == 1:
            return _window_sum(x, depth)
        doubled, reach = torch.empty_like(x), 1
        while reach < min(depth, x.shape[1]):  # sums over 1, 2, 4, 8 positions
            doubled[:, :reach] = x[:, :reach]
            torch.add(x[:, reach:], x[:, :-reach], alpha=decay, out=doubled[:, reach:])
            x, doubled, reach, decay = doubled, x, 2 * reach, decay * decay
        return x


def log_repeat_counts(columns: Tensor, liked: Tensor, width: int, depth: int) -> Tensor:
    """Return log(1 + the user's own count) of each column at each position, [B, L, width].

    Args:
        columns: int64 [B, L], `width` for an item without a column.
        liked: [B, L], 0 for dislikes, else 1.
        width: number of columns.
        depth: number of newest positions that count.
    """
    counts = liked.new_zeros(*columns.shape, width + 1)
    counts.scatter_(2, columns[..., None], liked[..., None])
    return _window_sum(counts, depth)[:, :, :width].log1p_()


def _window_sum(x: Tensor, depth: int) -> Tensor:
    """Sum x [B, L, W] over each position and the depth - 1 before it."""
    total = x.cumsum(1)
    if depth < x.shape[1]:
        older = total[:, :-depth].clone()
        total[:, depth:].sub_(older).clamp_(min=0)  # rounding may leave a negative rest
    return total
