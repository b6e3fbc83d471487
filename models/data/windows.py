"""Windows of histories, and batches of windows of like length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.interactions import Interactions


class PaddedWindows(NamedTuple):
    """Stretches of histories as rectangles [B, longest], oldest first; padding follows."""

    items: NDArray[np.int64]  # row 0 in the padding
    timestamps: NDArray[np.int64]  # the stretch's last in the padding, so that ages stay small
    weights: NDArray[np.float32]
    types: NDArray[np.int64]
    events: NDArray[np.int64]  # places in the log
    lengths: NDArray[np.int64]  # [B]


def pad_windows(
    log: Interactions, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> PaddedWindows:
    """The events [begin, end) of the log, one row each; at least one column wide."""
    lengths = ends - begins
    width = max(1, int(lengths.max(initial=1)))
    place = np.arange(width)
    real = place < lengths[:, None]
    events = np.minimum(begins[:, None] + place, np.maximum(begins, ends - 1)[:, None])
    if not len(log):
        nothing = np.zeros(events.shape, dtype=np.int64)
        ones = np.ones(events.shape, dtype=np.float32)
        return PaddedWindows(nothing, nothing, ones, nothing, nothing, lengths)
    events = np.minimum(events, len(log) - 1)
    items = np.where(real, log.items[events], 0).astype(np.int64)
    times, weights = log.timestamps[events], log.weights[events]
    return PaddedWindows(items, times, weights, log.types[events].astype(np.int64), events, lengths)


def window_start(length: int, window: int) -> int:
    """The first event that the encoder reads of a history of this length.

    It moves in steps of a quarter of the window, so that what is kept of the events read can be
    appended to in between: three quarters of the window are read at least, where there are as many.
    """
    step = max(1, window // 4)
    return max(0, -(-(length - window) // step) * step)


def newest_windows(log: Interactions, users: NDArray[np.int32], window: int) -> PaddedWindows:
    """What the encoder reads of these users' histories [B]."""
    begins, ends = log.offsets[users], log.offsets[users + 1]
    starts = [window_start(int(length), window) for length in ends - begins]
    return pad_windows(log, begins + np.array(starts, dtype=np.int64), ends)


def tile_windows(
    log: Interactions, longest: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Each history tiled backwards from its end into (first event, end) [n, 2], drawn anew.

    A window overlaps the next at random, so that targets early in a window, which see little
    history, see more of it in another epoch.
    """
    spans: list[tuple[int, int]] = []
    for user in np.flatnonzero(log.lengths >= 2):
        begin, end = int(log.offsets[user]), int(log.offsets[user + 1])
        while end - begin >= 2:
            first = max(begin, end - longest)
            spans.append((first, end))
            if first == begin:
                break
            end -= int(generator.integers(longest // 2, longest))
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


def batch_windows(
    windows: NDArray[np.int64], tokens: int, generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Windows of like length together, at most `tokens` padded inputs each, in random order."""
    lengths = windows[:, 1] - windows[:, 0]
    jitter = generator.uniform(-2, 2, len(windows))
    windows = windows[np.argsort(lengths + jitter, kind="stable")]
    parts: list[NDArray[np.int64]] = []
    start = longest = 0
    for at, (first, end) in enumerate(windows):
        inputs = int(end - first) - 1
        if at > start and max(longest, inputs) * (at - start + 1) > tokens:
            parts.append(windows[start:at])
            start, longest = at, 0
        longest = max(longest, inputs)
    parts.append(windows[start:])
    return [parts[i] for i in generator.permutation(len(parts))]
