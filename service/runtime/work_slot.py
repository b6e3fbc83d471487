"""Slot that a request holds while it computes, and gives away while it waits for something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class WorkSlot(Protocol):
    """One of the few places in which work is done."""

    def pause(self) -> None:
        """Give the place to the next request."""

    def resume(self) -> None:
        """Take a place again, also where none is free: the work has begun already."""


# The slot of the request that this task works for.
current_slot: ContextVar[WorkSlot | None] = ContextVar("current_slot", default=None)


@contextmanager
def slot_released() -> Iterator[None]:
    """Release the slot of the current request, if it has one, until the block ends."""
    slot = current_slot.get()
    if slot is None:
        yield
        return
    slot.pause()
    try:
        yield
    finally:
        slot.resume()
