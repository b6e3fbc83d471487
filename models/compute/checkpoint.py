"""Long work: the points at which it asks whether its result is still wanted, and its progress."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")

ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""

_WAIT = 0.02  # seconds between two checkpoints of a wait

_thread = threading.local()


Look = Callable[[bool], None]
"""Called at a checkpoint; true if the work waits for other work instead of computing."""


def checkpoint(*, waits: bool = False) -> None:
    """Let the caller of this thread's work stop it, by an exception, or delay it.

    Loops call it between blocks that take some milliseconds, where nothing is half done that others
    see.
    """
    look: Look | None = getattr(_thread, "look", None)
    if look is not None:
        look(waits)


def watched(look: Look, work: Callable[[], T]) -> T:
    _thread.look = look
    try:
        return work()
    finally:
        _thread.look = None


class _Lock(Protocol):
    def acquire(self, *, timeout: float) -> bool: ...
    def release(self) -> None: ...


@contextmanager
def holding(lock: _Lock) -> Iterator[None]:
    """Hold a lock; the wait for it has checkpoints."""
    while not lock.acquire(timeout=_WAIT):
        checkpoint(waits=True)
    try:
        yield
    finally:
        lock.release()


class Stopwatch:
    """Measures elapsed time in seconds of `time.monotonic`, and estimates what remains."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._offset: tuple[float, float] | None = None  # share and time at the first estimate

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def remaining(self, share: float) -> float:
        if self._offset is None:
            self._offset = (share, self.seconds)
        done, since = share - self._offset[0], self.seconds - self._offset[1]
        return (1 - share) * since / done if done > 0 else math.nan
