"""Counts of item pairs within a window of each history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.data.interactions import Interactions

# Pairs sorted at once while counting: bounds the working memory to some 100 MB.
CHUNK = 1 << 22

PairSums = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys item * n_items + item that followed, ascending, and their sums."""


def transition_matrix(log: Interactions, *, window: int, power: float) -> Tensor:
    """Sum 1 / distance ** power over all pairs of events of a user at most `window` apart.

    M[a, b] counts a followed by b, so M is not symmetric; dislikes follow nothing. Working memory
    is bounded; the result holds at most window * E entries. Collective over the shards of the log:
    each process returns the whole matrix. Raises ValueError for a window below 1.

    Returns:
        Tensor: sparse COO [n_items, n_items], coalesced, float32.
    """
    n, shards = log.n_items, log.shards
    keys, counts = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.float32)]
    for chunk_keys, chunk_counts in pair_chunks(log, window=window, power=power):
        keys.append(shards.gather(chunk_keys))
        counts.append(shards.gather(chunk_counts))
    indices = np.stack(np.divmod(np.concatenate(keys), max(n, 1)))
    values = torch.from_numpy(np.concatenate(counts))
    return torch.sparse_coo_tensor(
        torch.from_numpy(indices), values, (n, n), is_coalesced=True, check_invariants=True
    )


def pair_chunks(log: Interactions, *, window: int, power: float) -> Iterator[PairSums]:
    """Iterate over the sums of `transition_matrix`, some whole rows of it at a time.

    Of a log in several shards each process adds up the sums of all for a part of the rows of a
    chunk: those of the first shard come first. Collective: a process goes through all chunks.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    n, shards = log.n_items, log.shards
    # Events in order of their item: one chunk then holds whole rows of M.
    by_item = np.argsort(log.items, kind="stable")
    edges = np.concatenate(([0], np.cumsum(log.item_counts())))  # [n + 1] rows of by_item
    every = shards.sum(edges)  # of all shards, so that their chunks are of the same rows
    first = 0
    while first < n:  # so many items that their events are about a chunk, or a single one
        size = every[first] + max(1, shards.count * CHUNK // window)
        last = max(first + 1, int(np.searchsorted(every, size, side="right")) - 1)
        events = by_item[edges[first] : edges[last]]
        keys, sums = _sum_pairs(log, log.items, events, window, power)
        if shards.count > 1:
            shares = np.linspace(every[first], every[last], shards.count + 1)[1:-1]
            rows = np.clip(np.searchsorted(every, shares), first, last)
            keys, sums = _merged(log, keys, sums, np.searchsorted(keys, rows * n))
        yield keys, sums.astype(np.float32)
        first = last


def _merged(
    log: Interactions,
    keys: NDArray[np.int64],
    sums: NDArray[np.float64],
    cuts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Send the parts of ascending keys and their sums to a shard each; add up what came."""
    received = np.concatenate(log.shards.exchange(np.split(keys, cuts)))
    parts = np.concatenate(log.shards.exchange(np.split(sums, cuts)))
    order = np.argsort(received, kind="stable")
    return _add_up(received[order], parts[order])


def sum_pairs(
    log: Interactions,
    sources: NDArray[np.integer[Any]],
    events: NDArray[np.int64],
    window: int,
    power: float,
) -> PairSums:
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
    keys, sums = _sum_pairs(log, sources, events, window, power)
    return keys, sums.astype(np.float32)


def _sum_pairs(
    log: Interactions,
    sources: NDArray[np.integer[Any]],
    events: NDArray[np.int64],
    window: int,
    power: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sum as `sum_pairs` does, in float64."""
    following = np.repeat(log.offsets[1:], log.lengths)[events] - events - 1
    pairs = np.minimum(following, window)
    first = np.repeat(events, pairs)
    distance = np.arange(len(first)) - np.repeat(np.cumsum(pairs) - pairs, pairs) + 1
    liked = ~log.disliked[first + distance]
    first, distance = first[liked], distance[liked]
    keys = sources[first].astype(np.int64) * log.n_items + log.items[first + distance]
    order = np.argsort(keys, kind="stable")
    weights = np.concatenate(([0.0], np.arange(1.0, window + 1) ** -power))[distance[order]]
    return _add_up(keys[order], weights)


def _add_up(
    keys: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Sum the weights of equal keys, which are ascending [n]; returns distinct keys and sums."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(weights, starts) if len(starts) else weights
