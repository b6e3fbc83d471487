"""Points at which long work asks whether its result is still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")

_WAIT = 0.02  # seconds between two checkpoints of a wait

_thread = threading.local()


def checkpoint() -> None:
    """Let the caller of this thread's work stop it, by an exception, or delay it.

    Loops call it between blocks that take some milliseconds, and where they hold no lock and have
    left nothing half done that others see.
    """
    look: Callable[[], None] | None = getattr(_thread, "look", None)
    if look is not None:
        look()


def watched(look: Callable[[], None], work: Callable[[], T]) -> T:
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
        checkpoint()
    try:
        yield
    finally:
        lock.release()
