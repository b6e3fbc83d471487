"""Clients that disconnect before their answer: nothing more is computed for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Scope

CLIENT = "heed.client"  # in the scope: the `ClientConnection`, where the protocol knows of one
CLOSED_REQUEST = 499  # nginx's status for a client that closed its request; it is sent to nobody
DISCONNECTED = "heed.disconnected"  # in the scope of a request whose client has left


class ClientConnection:
    """One client's connection, as the requests that arrive over it see it.

    `sender` sent the last request; before the first, it is the client's address. The wait for the
    client began at `since`.
    """

    __slots__ = ("_task", "_wait", "is_lost", "refusal", "sender", "since")

    def __init__(self, sender: str = "") -> None:
        self.sender = sender
        self.since = time.monotonic()
        self.is_lost = False
        self.refusal = ""  # why the last wait was ended
        self._wait: asyncio.Timeout | None = None  # for bytes of the client
        self._task: asyncio.Task[Any] | None = None  # the work to cancel

    def lose(self) -> None:
        """Note that the connection is lost, and cancel what is computed for it."""
        self.is_lost = True
        if self._task is not None:
            self._task.cancel()

    @contextmanager
    def waits(self, timer: asyncio.Timeout) -> Iterator[None]:
        """Let `refuse` end the block, a wait for the client's bytes, as its timeout would."""
        self._wait, self.refusal, self.since = timer, "", time.monotonic()
        try:
            yield
        finally:
            self._wait = None

    @property
    def is_waiting(self) -> bool:
        """True while a request waits only for the client's bytes."""
        return self._wait is not None

    def refuse(self, reason: str) -> None:
        """End the wait for the client's bytes, with `refusal` set to the reason."""
        if self._wait is not None and not self._wait.expired():
            self.refusal = reason
            self._wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """Cancel the block's work when the client disconnects.

        Work that waits for a thread is then taken out of the queue; what a thread has begun ends.

        Raises:
            ClientDisconnect: the client has left, before the block or during it.
        """
        if self.is_lost:
            raise ClientDisconnect
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_lost:  # the deadline, or the end of the server
                raise
            if task is not None:
                task.uncancel()
            raise ClientDisconnect from None
        finally:
            self._task = None


def connection_of(scope: Scope) -> ClientConnection:
    """Return the connection of a request; one that is never lost where the server has none."""
    return scope.get(CLIENT) or ClientConnection()
