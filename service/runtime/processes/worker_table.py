"""Table of worker processes, written by their parent and read by the workers."""

from __future__ import annotations

import mmap
import time
from typing import NamedTuple

import numpy as np

_COLUMNS = 3  # process id, start, restarts


class WorkerRow(NamedTuple):
    """One worker number as its parent sees it."""

    is_running: bool
    started: float  # of its latest process, by the monotonic clock; 0 before the first
    restarts: int


class WorkerTable:
    """One row for each worker, in memory that forked processes share.

    Times are of the system's monotonic clock, the same in all processes, which nobody sets.
    """

    def __init__(self, count: int) -> None:
        memory = mmap.mmap(-1, count * _COLUMNS * 8)
        self._rows = np.frombuffer(memory, np.float64).reshape(count, _COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> WorkerRow:
        running, started, restarts = self._rows[number].tolist()
        return WorkerRow(bool(running), started, int(restarts))

    def start(self, number: int) -> None:
        """Note that a process of this worker is about to start."""
        restarts = self._rows[number, 2] + (self._rows[number, 1] > 0)
        self._rows[number] = 1, time.monotonic(), restarts

    def end(self, number: int) -> None:
        """Note that the process of this worker has ended."""
        self._rows[number, 0] = 0
