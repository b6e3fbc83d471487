"""Points at which long work asks whether its result is still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")

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
    """Return the result of work whose checkpoints call `look`."""
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
