"""Progress of long work: the callback, and a stopwatch that estimates the remaining time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""


class Stopwatch:
    """Measures elapsed time in seconds of `time.monotonic`, and estimates what remains."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._offset: tuple[float, float] | None = None  # share and time at the first estimate

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def remaining(self, share: float) -> float:
        """Estimate the seconds to the end, at the pace since the first call."""
        if self._offset is None:
            self._offset = (share, self.seconds)
        done, since = share - self._offset[0], self.seconds - self._offset[1]
        return (1 - share) * since / done if done > 0 else math.nan
