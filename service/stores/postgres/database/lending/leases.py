"""Connections lent to calls, each for one block.

A connection with which a block takes too long is cut, so that the block fails: a statement cannot
be cancelled on a server that hangs. A breaker makes calls fail at once while no server answers.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import psycopg
from psycopg import AsyncConnection

from service.domain.errors import StoreUnreachable
from service.stores.postgres.database.faults import explain, is_disconnected, is_lost
from service.stores.postgres.database.lending.breaker import Breaker
from service.stores.postgres.database.lending.pool import Connect, ConnectionPool
from service.stores.postgres.database.patience import cut_off

MAX_WAITING = 1_000  # calls that wait for a connection of a loop


class Leases:
    """Lends the connections of each event loop's pool.

    Args:
        connect: opens a connection.
        size: connections of an event loop.
    """

    def __init__(self, connect: Connect, size: int) -> None:
        self.size = size
        self.is_distributed = False  # over workers, which may not answer by themselves
        self.failures = 0  # of connections and statements
        self._connect = connect
        self._breaker = Breaker()
        self._pools: dict[asyncio.AbstractEventLoop, ConnectionPool] = {}
        self._lock = threading.Lock()

    def lease(self, patience: float) -> Lease:
        """Return a lease of a connection of this loop, for a block of `patience` seconds at most.

        Raises `StoreUnreachable` while the breaker is open.
        """
        if not self._breaker.permits():
            raise StoreUnreachable(self._breaker.reason)
        return Lease(self, self._pool(), patience)

    def drop_idle(self) -> None:
        """Close the idle connections of this loop, all of which a failover breaks at once."""
        self._pool().drop_idle()

    def close(self) -> None:
        """Close the connections of this loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close()

    def drop_ended(self) -> None:
        """Close the connections of loops that have ended, as those of commands do."""
        with self._lock:
            for loop in [each for each in self._pools if each.is_closed()]:
                self._pools.pop(loop).close()

    def succeeded(self) -> None:
        """Note that a block has ended without an error."""
        self._breaker.succeeded()

    def failed(self, error: StoreUnreachable) -> None:
        """Note that no connection could be lent."""
        self.failures += 1
        self._breaker.failed(error.detail)

    def explained(self, error: psycopg.Error, *, is_new: bool, was_cut: bool) -> Exception:
        """Note an error of PostgreSQL, and return it in Heed's terms."""
        self.failures += 1
        reason = explain(error)
        # Of a distributed database, a call may have waited for one of the workers.
        is_servers = not self.is_distributed or (is_lost(error) and not was_cut)
        if isinstance(reason, StoreUnreachable) and is_servers:
            self.drop_idle()
            # An idle connection is lost with the server that it was to; a new one may be had.
            if is_new or was_cut or not is_disconnected(error):
                self._breaker.failed(reason.detail)
        return reason

    def _pool(self) -> ConnectionPool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            self.drop_ended()
            pool = self._pools[loop] = ConnectionPool(self._connect, self.size, MAX_WAITING)
        return pool


class Lease(AbstractAsyncContextManager[AsyncConnection]):
    """Context manager of one connection for one block.

    It is a class, since a generator would cost each call several times as much.
    """

    def __init__(self, leases: Leases, pool: ConnectionPool, patience: float) -> None:
        self._leases = leases
        self._pool = pool
        self._patience = patience
        self._is_new = self._was_cut = False

    async def __aenter__(self) -> AsyncConnection:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        try:
            self._connection, self._is_new = await self._pool.take(self._patience)
        except (StoreUnreachable, psycopg.Error) as error:
            self._translate(error)
            raise
        self._guard = loop.call_at(until, self._cut)
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.cancel()
        self._pool.give_back(self._connection)
        if error is None:
            self._leases.succeeded()
        else:
            self._translate(error)

    def _cut(self) -> None:
        self._was_cut = True
        cut_off(self._connection)

    def _translate(self, error: BaseException) -> None:
        """Raise the error of Heed that an error of PostgreSQL means."""
        if isinstance(error, StoreUnreachable):
            self._leases.failed(error)
        elif isinstance(error, psycopg.Error):
            reason = self._leases.explained(error, is_new=self._is_new, was_cut=self._was_cut)
            if self._was_cut:
                raise reason from None  # another attempt would take as long
            raise reason from error
