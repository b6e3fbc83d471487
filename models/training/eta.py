"""A stopwatch for long work: how long it took, and how long it will."""

from __future__ import annotations

import math
import time


class Stopwatch:
    """How long it took since a start, in seconds of `time.monotonic`, and how long it will."""

    def __init__(self, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self._offset: tuple[float, float] | None = None  # share and time first heard of

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def remaining(self, share: float) -> float:
        """Seconds to the end at the pace since the first asking, with this share done."""
        if self._offset is None:
            self._offset = (share, self.seconds)
        done, since = share - self._offset[0], self.seconds - self._offset[1]
        return (1 - share) * since / done if done > 0 else math.nan
