"""Versions of the catalogue that requests wait for, and those that none has to wait for yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from service.stores.base import OnCatalogueChange


class UnacknowledgedWrites:
    """Tells which catalogue versions an answer may still lack.

    A version is entered by the store's writer before its transaction is committed, so that no
    reader sees a version that is missing here, and is removed when the write is acknowledged.
    Every write of the catalogue by this process must be tracked.
    """

    def __init__(self) -> None:
        self._previous: dict[int, int] = {}  # version -> the catalogue version before it

    @contextmanager
    def track(self) -> Iterator[OnCatalogueChange]:
        """Track the changes of one write, whose acknowledgement is the end of the block.

        Yields:
            A callback for the store, to be called on any thread.
        """
        versions: list[int] = []

        def on_change(previous: int, version: int) -> None:
            # Writes of one transaction share its version: the first knows the one before.
            if previous < version:
                self._previous.setdefault(version, previous)
                versions.append(version)

        try:
            yield on_change
        finally:
            for version in versions:
                self._previous.pop(version, None)

    def acknowledged_at(self, version: int) -> int:
        """Return the latest version, up to this one, that a client may have been told of."""
        while (previous := self._previous.get(version)) is not None:
            version = previous
        return version


class VersionWaiters:
    """Tasks of one event loop that wait until a version of the catalogue is served."""

    def __init__(self) -> None:
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, version: int) -> None:
        """Return when this version is served. Raises the error that `fail` is given."""
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((version, served))
        await served

    def wake(self, version: int) -> None:
        """Resume the tasks that wait for this version or an earlier one."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            awaited, served = waiter
            if awaited > version:
                self._waiters.append(waiter)
            elif not served.done():  # else its task was cancelled
                served.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise an error in every waiting task."""
        waiters, self._waiters = self._waiters, []
        for _, served in waiters:
            if not served.done():
                served.set_exception(error)
