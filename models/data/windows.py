"""Windows of user histories: cut for training, padded into rectangles, batched by length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.compute.device import Processes
from models.data.interactions import Interactions


class PaddedWindows(NamedTuple):
    """Windows of histories as rectangles [B, L], oldest event first, padded at the end."""

    items: NDArray[np.int64]  # row 0 in the padding
    timestamps: NDArray[np.int64]  # the window's newest in the padding, so that ages stay small
    weights: NDArray[np.float32]
    types: NDArray[np.int64]
    events: NDArray[np.int64]  # row of each event in the log
    lengths: NDArray[np.int64]  # [B]


def pad_windows(
    log: Interactions, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> PaddedWindows:
    """Copy the events [begin, end) of the log into one row each, at least one column wide."""
    lengths = ends - begins
    column = np.arange(max(1, int(lengths.max(initial=1))))
    events = np.minimum(begins[:, None] + column, np.maximum(begins, ends - 1)[:, None])
    if not len(log):
        zeros = np.zeros(events.shape, dtype=np.int64)
        ones = np.ones(events.shape, dtype=np.float32)
        return PaddedWindows(zeros, zeros, ones, zeros, zeros, lengths)
    events = np.minimum(events, len(log) - 1)
    return PaddedWindows(
        np.where(column < lengths[:, None], log.items[events], 0).astype(np.int64),
        log.timestamps[events],
        log.weights[events],
        log.types[events].astype(np.int64),
        events,
        lengths,
    )


def window_start(length: int, window: int) -> int:
    """Return the first event that the encoder reads of a history of `length` events.

    The start moves in steps of a quarter of the window, so that between two moves new events are
    appended to the encoder's cache. At least three quarters of the window are read, or all events
    if there are fewer.
    """
    step = max(1, window // 4)
    return max(0, -(-(length - window) // step) * step)


def newest_windows(log: Interactions, users: NDArray[np.int32], window: int) -> PaddedWindows:
    """The events that the encoder reads of the histories of `users` [B]."""
    begins, ends = log.offsets[users], log.offsets[users + 1]
    starts = [window_start(int(length), window) for length in ends - begins]
    return pad_windows(log, begins + np.array(starts, dtype=np.int64), ends)


def tile_windows(
    log: Interactions, longest: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Tile each history backwards from its end into windows (first event, end) [n, 2].

    Consecutive windows overlap by a random amount, so that targets early in a window, which see
    little history, see more of it in another epoch.
    """
    windows: list[tuple[int, int]] = []
    for user in np.flatnonzero(log.lengths >= 2):
        begin, end = int(log.offsets[user]), int(log.offsets[user + 1])
        while end - begin >= 2:
            first = max(begin, end - longest)
            windows.append((first, end))
            if first == begin:
                break
            end -= int(generator.integers(longest // 2, longest))
    return np.array(windows, dtype=np.int64).reshape(-1, 2)


def batch_windows(
    windows: NDArray[np.int64], tokens: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Group windows of similar length into batches of at most `tokens` padded inputs, shuffled."""
    lengths = windows[:, 1] - windows[:, 0]
    jitter = generator.uniform(-2, 2, len(windows))
    windows = windows[np.argsort(lengths + jitter, kind="stable")]
    batches: list[NDArray[np.int64]] = []
    start = longest = 0
    for at, (first, end) in enumerate(windows):
        inputs = int(end - first) - 1
        if at > start and max(longest, inputs) * (at - start + 1) > tokens:
            batches.append(windows[start:at])
            start, longest = at, 0
        longest = max(longest, inputs)
    batches.append(windows[start:])
    return [batches[i] for i in generator.permutation(len(batches))]


def batch_shard(
    windows: NDArray[np.int64],
    tokens: int,
    shards: Processes,
    own: np.random.Generator,
    common: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Divide the windows of a shard among the batches that all shards take together, shuffled.

    A batch has windows (first event, end) [n, 2] of similar length of all shards and about `tokens`
    padded inputs, as if one process had grouped all windows; a shard's part may be empty.
    Collective; all shards return equally many batches. The generator `own` is the shard's, `common`
    in the same state in all shards.
    """
    windows = own.permutation(windows)
    inputs = windows[:, 1] - windows[:, 0] - 1
    order = np.argsort(inputs, kind="stable")
    windows, inputs = windows[order], inputs[order]
    mine = np.bincount(inputs, minlength=1 + shards.max(int(inputs.max(initial=0))))
    every = shards.sum(mine)
    ends = _pack_lengths(every.tolist(), tokens)
    # Windows of one length stand at even distances among those of all shards.
    nth = np.arange(len(windows)) - (np.cumsum(mine) - mine)[inputs]
    among = (nth + (shards.index + 0.5) / shards.count) * (every / np.maximum(mine, 1))[inputs]
    batch = np.searchsorted(ends, (np.cumsum(every) - every)[inputs] + among, side="right")
    batches = np.split(windows, np.searchsorted(batch, np.arange(1, len(ends))))
    return [batches[i] for i in common.permutation(len(ends))]


def _pack_lengths(counts: list[int], tokens: int) -> list[int]:
    """Pack `counts` windows with 0, 1, 2, … inputs into batches of at most `tokens`, or of one
    window.

    Returns the number of windows up to the end of each batch.
    """
    ends: list[int] = []
    first = total = 0  # windows before the batch that is being packed, and so far
    for inputs, count in enumerate(counts):
        most = max(1, tokens // max(1, inputs))
        total += count
        while count and total - first > most:
            first = max(first + most, total - count)  # shorter ones may be more than that
            ends.append(first)
    return [*ends, total] if total > first or not ends else ends
