"""How often one item follows another: co-occurrence within a window, as sparse rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions

# Pairs sorted at once while counting: bounds the working memory to some 100 MB.
CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class TransitionMatrix:
    """Sparse [n_items, n_items], compressed by row: row a holds the items that followed a.

    Row a is columns[offsets[a]:offsets[a + 1]], rising, with their counts.
    """

    offsets: NDArray[np.int64]  # [n_items + 1]
    columns: NDArray[np.int32]  # [nonzero]
    counts: NDArray[np.float32]  # [nonzero]

    @property
    def n_items(self) -> int:
        """The size of the catalogue."""
        return len(self.offsets) - 1

    def dense(self) -> NDArray[np.float32]:
        """[n_items, n_items]; for small catalogues and tests."""
        out = np.zeros((self.n_items, self.n_items), dtype=np.float32)
        rows = np.repeat(np.arange(self.n_items), np.diff(self.offsets))
        out[rows, self.columns] = self.counts
        return out

    def weighted_sums(
        self,
        batch: NDArray[np.int64],
        items: NDArray[np.int32],
        weights: NDArray[np.float32],
        size: int,
    ) -> NDArray[np.float32]:
        """[size, n_items] whose row b is the sum of weights[i] * self[items[i]] where batch[i] = b.

        Equals W @ self for the sparse W [size, n_items] with those entries.
        """
        starts = self.offsets[items]
        lengths = self.offsets[items + 1] - starts
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
            starts - (ends - lengths), lengths
        )
        keys = np.repeat(batch * self.n_items, lengths) + self.columns[places]
        values = self.counts[places] * np.repeat(weights, lengths)
        flat = np.bincount(keys, weights=values, minlength=size * self.n_items)
        return flat.reshape(size, self.n_items).astype(np.float32)


def transition_matrix(
    log: Interactions, *, window: int = 20, power: float = 1.0
) -> TransitionMatrix:
    """Count, for every pair of events of a user at most `window` apart, 1 / distance ** power.

    M[a, b] sums over a being followed by b, so M is not symmetric; what was not liked follows
    nothing. Working memory is bounded; the result holds at most window * E entries. Raises
    ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    n = log.n_items
    # Events in order of their item: one chunk then holds whole rows of M.
    by_item = np.argsort(log.items, kind="stable")
    edges = np.concatenate(([0], np.cumsum(log.item_counts())))  # [n + 1] rows of by_item
    left = np.repeat(log.offsets[1:], log.lengths) - np.arange(len(log)) - 1  # [E] events after
    worth = np.concatenate(([0.0], np.arange(1.0, window + 1) ** -power))  # [window + 1]
    row_lengths = np.zeros(n, dtype=np.int64)
    liked = ~log.disliked
    columns, counts = [], []
    for first, last in _chunks(edges, max(1, CHUNK // window)):
        events = by_item[edges[first] : edges[last]]
        reach = np.minimum(left[events], window)
        source = np.repeat(events, reach)
        distance = np.arange(len(source)) - np.repeat(np.cumsum(reach) - reach, reach) + 1
        taken = liked[source + distance]
        source, distance = source[taken], distance[taken]
        keys = log.items[source].astype(np.int64) * n + log.items[source + distance]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        heads = np.flatnonzero(np.diff(keys, prepend=-1))
        if not len(heads):
            continue
        columns.append((keys[heads] % n).astype(np.int32))
        counts.append(np.add.reduceat(worth[distance[order]], heads).astype(np.float32))
        row_lengths += np.bincount(keys[heads] // n, minlength=n)
    return TransitionMatrix(
        np.concatenate(([0], np.cumsum(row_lengths))).astype(np.int64),
        np.concatenate([np.empty(0, dtype=np.int32), *columns]),
        np.concatenate([np.empty(0, dtype=np.float32), *counts]),
    )


def _chunks(edges: NDArray[np.int64], size: int) -> list[tuple[int, int]]:
    """Ranges of items that together cover all, each of about `size` events or a single item."""
    items, out, first = len(edges) - 1, [], 0
    while first < items:
        last = int(np.searchsorted(edges, edges[first] + size, side="right")) - 1
        last = min(max(last, first + 1), items)
        out.append((first, last))
        first = last
    return out
