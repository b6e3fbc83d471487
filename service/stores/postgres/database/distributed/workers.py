"""Calls to the workers of a distributed database, kept apart so that one worker holds up no other.

A call to a worker that does not answer holds its connection until its deadline. So each worker has
a circuit breaker, as the coordinator has, and a part of the connections is all that may wait for a
worker: one part for reading, one for writing, which waits for locks too, and one for calls to
several workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from service.domain.errors import StoreUnreachable
from service.stores.postgres.database.distributed.placement import Placement
from service.stores.postgres.database.lending.breaker import Breaker

NOWHERE: frozenset[int] = frozenset()
"""Workers of calls that the coordinator answers by itself, and of a database without workers."""

_FREE = 2  # connections that are left when calls to one worker, and to several, have their parts
_PARTS = 3  # that can be held up by one worker


class Workers:
    """Breakers of the workers, and parts of the connections of each event loop.

    Args:
        placement: of rows on the workers; None for a database without workers.
        connections: of an event loop.
    """

    def __init__(self, placement: Placement | None = None, connections: int = 0) -> None:
        self.placement = placement
        self._part = max(1, (connections - _FREE) // _PARTS)
        self._breakers: dict[int, Breaker] = {}
        self._parts: WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[tuple[int, ...], asyncio.BoundedSemaphore]
        ] = WeakKeyDictionary()

    @property
    def everywhere(self) -> frozenset[int]:
        """All workers."""
        return NOWHERE if self.placement is None else self.placement.everywhere

    def of(self, users: Collection[str], ids: Collection[bytes] = ()) -> frozenset[int]:
        """Return the workers that have users, by their ids, and events' ids, by their keys."""
        if self.placement is None:
            return NOWHERE
        return self.placement.workers(users, ids)

    @asynccontextmanager
    async def call(
        self, workers: frozenset[int], patience: float, *, only_reads: bool = False
    ) -> AsyncIterator[None]:
        """Take a part of the connections for a block that calls workers.

        Args:
            workers: that the block calls.
            patience: seconds to wait for the part.
            only_reads: whether the block waits for no lock: if it fails on its only worker, it
                opens the worker's circuit.

        Raises:
            StoreUnreachable: a circuit is open, or no part becomes free in time.
        """
        if not workers:
            yield
            return
        breakers = [self._breakers.setdefault(each, Breaker()) for each in sorted(workers)]
        closed = [breaker for breaker in breakers if not breaker.is_open]
        for breaker in breakers:
            if not breaker.permits():
                raise StoreUnreachable(breaker.reason)
        part = self._part_of(workers, only_reads)
        try:
            async with asyncio.timeout(patience):
                await part.acquire()
        except TimeoutError:
            raise StoreUnreachable("other calls wait for the same workers of PostgreSQL") from None
        opened = [breaker for breaker in closed if breaker.is_open]  # while this call waited
        if opened:
            part.release()
            raise StoreUnreachable(opened[0].reason)
        try:
            yield
        except StoreUnreachable as error:
            for breaker in breakers:
                if breaker.is_open or (only_reads and len(breakers) == 1):
                    breaker.failed(f"a worker of PostgreSQL does not answer: {error.detail}")
            raise
        else:
            for breaker in breakers:
                breaker.succeeded()
        finally:
            part.release()

    def _part_of(self, workers: frozenset[int], only_reads: bool) -> asyncio.BoundedSemaphore:
        parts = self._parts.setdefault(asyncio.get_running_loop(), {})
        name = (*workers, only_reads) if len(workers) == 1 else ()
        return parts.setdefault(name, asyncio.BoundedSemaphore(self._part))
