"""Counts of item pairs within a window of each history."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions

# Pairs sorted at once while counting: bounds the working memory to some 100 MB.
CHUNK = 1 << 22


def transition_matrix(log: Interactions, *, window: int, power: float) -> Tensor:
    """Sum 1 / distance ** power over all pairs of events of a user at most `window` apart.

    M[a, b] counts a followed by b, so M is not symmetric; dislikes follow nothing. Working memory
    is bounded; the result holds at most window * E entries. Raises ValueError for a window
    below 1.

    Returns:
        Tensor: sparse COO [n_items, n_items], coalesced, float32.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    n = log.n_items
    # Events in order of their item: one chunk then holds whole rows of M.
    by_item = np.argsort(log.items, kind="stable")
    edges = np.concatenate(([0], np.cumsum(log.item_counts())))  # [n + 1] rows of by_item
    keys, counts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    first = 0
    while first < n:  # so many items that their events are about a chunk, or a single one
        size = edges[first] + max(1, CHUNK // window)
        last = max(first + 1, int(np.searchsorted(edges, size, side="right")) - 1)
        events = by_item[edges[first] : edges[last]]
        chunk_keys, chunk_counts = sum_pairs(log, log.items, events, window, power)
        keys.append(chunk_keys)
        counts.append(chunk_counts)
        first = last
    indices = np.stack(np.divmod(np.concatenate(keys), max(n, 1)))
    values = torch.from_numpy(np.concatenate(counts))
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices), values, (n, n), is_coalesced=True, check_invariants=True
    )


def sum_pairs(
    log: Interactions,
    sources: NDArray[np.integer[Any]],
    events: NDArray[np.int64],
    window: int,
    power: float,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sum 1 / distance ** power over the pairs that start at some events, by source and item.

    Args:
        log: the events.
        sources: a code for each event of the log, [E].
        events: rows of the log, [n].
        window: largest distance between the events of a pair.
        power: of the distance.

    Returns:
        tuple: keys source * n_items + item of the second event, ascending, and their sums.
    """
    following = np.repeat(log.offsets[1:], log.lengths)[events] - events - 1
    pairs = np.minimum(following, window)
    first = np.repeat(events, pairs)
    distance = np.arange(len(first)) - np.repeat(np.cumsum(pairs) - pairs, pairs) + 1
    liked = ~log.disliked[first + distance]
    first, distance = first[liked], distance[liked]
    keys = sources[first].astype(np.int64) * log.n_items + log.items[first + distance]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    weights = np.concatenate(([0.0], np.arange(1.0, window + 1) ** -power))[distance[order]]
    sums = np.add.reduceat(weights, starts) if len(starts) else weights
    return keys[starts], sums.astype(np.float32)
