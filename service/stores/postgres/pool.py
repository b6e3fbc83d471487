"""Connections lent to calls: a pool of each event loop, a deadline, a circuit breaker.

Timeouts of the server do not help where it hangs itself, and those of TCP do not where its machine
still confirms packets: a caller would wait for as long as the server hangs. So a connection with
which a block takes too long is cut, and the block fails: a statement cannot be cancelled on a
server that hangs.

While no server answers, the circuit is open, and calls fail at once instead of waiting for their
timeouts. Now and then one call is let through; the circuit closes when one succeeds.

`psycopg_pool` connects in background tasks. These outlive a cancelled call, so that `asyncio.run`
waits for them for ever, and a caller learns of a refused connection only when its wait times out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

from service.domain.errors import Overloaded, StoreUnreachable
from service.stores.postgres.faults import explain, is_disconnected, is_lost

ANSWER_SECONDS = 15.0  # seconds that a thread waits for one answer


class PatientConnection(Connection[tuple[Any, ...]]):
    """Connection whose every answer must come within `ANSWER_SECONDS` seconds; else it is lost."""

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for the server as psycopg does, and no longer than that."""
        with cut_after(ANSWER_SECONDS, self):
            return super().wait(*args, **options)


def cut_off(connection: Connection | AsyncConnection) -> None:
    """Shut a connection's socket down, which wakes the thread or the loop that waits for it."""
    with (
        suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(connection.fileno())) as own,
    ):
        own.shutdown(socket.SHUT_RDWR)


@contextmanager
def cut_after(seconds: float, connection: Connection) -> Iterator[None]:
    """Cut a thread's connection where the block takes longer, so that it fails."""
    lock, is_over = threading.Lock(), False

    def cut_now() -> None:
        with lock:
            if not is_over:  # else the socket may be closed, and its number another file's
                cut_off(connection)

    timer = threading.Timer(seconds, cut_now)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()


_BREAKER_PAUSE = 0.5  # seconds between two calls that are let through


class Breaker:
    """State of one circuit. Not thread-safe; a race costs a call its timeout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_until: float | None = None  # None: closed
        self.reason = ""

    def permits(self) -> bool:
        """Report whether a call may be tried now; the next one may be, after a pause."""
        if self._open_until is None:
            return True
        now = self._clock()
        if now < self._open_until:
            return False
        self._open_until = now + _BREAKER_PAUSE
        return True

    def succeeded(self) -> None:
        """Close the circuit."""
        self._open_until = None

    def failed(self, reason: str) -> None:
        """Open the circuit."""
        self.reason = reason
        self._open_until = self._clock() + _BREAKER_PAUSE


Connect = Callable[[], Awaitable[AsyncConnection]]


class ConnectionPool:
    """Lends up to `size` connections, which are made when they are needed.

    Args:
        connect: opens a connection.
        size: connections at once.
        queue: calls that may wait for one.
    """

    def __init__(self, connect: Connect, size: int, queue: int) -> None:
        self._connect = connect
        self._idle: list[AsyncConnection] = []
        self._free = asyncio.Semaphore(size)
        self._queue = queue
        self._waiting = 0
        self._is_closed = False

    async def take(self, patience: float) -> tuple[AsyncConnection, bool]:
        """Return a connection that is the caller's until `give_back`, and whether it is new.

        Raises:
            Overloaded: too many calls wait.
            StoreUnreachable: none was free, or could be opened, within `patience` seconds.
            psycopg.Error: the connection was refused.
        """
        if self._free.locked():
            await self._wait(patience)
        else:  # without a timer, which every call would pay for
            await self._free.acquire()
        connection = self._take_idle()
        if connection is not None:
            return connection, False
        try:
            return await self._open(patience), True
        except BaseException:
            self._free.release()
            raise

    def give_back(self, connection: AsyncConnection) -> None:
        """Keep a connection for later calls, unless it is lost or in the middle of an answer."""
        self._keep(connection)
        self._free.release()

    async def _wait(self, patience: float) -> None:
        if self._waiting >= self._queue:
            raise Overloaded("all connections to PostgreSQL are in use, and too many calls wait")
        self._waiting += 1
        try:
            async with asyncio.timeout(patience):
                await self._free.acquire()
        except TimeoutError:
            raise StoreUnreachable("no connection to PostgreSQL became free in time") from None
        finally:
            self._waiting -= 1

    async def _open(self, patience: float) -> AsyncConnection:
        """Open a connection; one that takes longer is for a later call.

        The driver gives up a host that hangs after seconds, which a request does not have.
        """
        task = asyncio.ensure_future(self._connect())
        try:
            done, _ = await asyncio.wait({task}, timeout=patience)
        except asyncio.CancelledError:
            task.add_done_callback(self._keep_late)
            raise
        if done:
            return task.result()
        task.add_done_callback(self._keep_late)
        raise StoreUnreachable("PostgreSQL does not accept connections")

    def _keep_late(self, task: asyncio.Future[AsyncConnection]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._keep(task.result())

    def close(self) -> None:
        """Close the idle connections, and each that is in use when it is given back."""
        self._is_closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close the connections that nobody uses now."""
        while self._idle:
            connection = self._idle.pop()
            connection.pgconn.finish()

    def _take_idle(self) -> AsyncConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    def _keep(self, connection: AsyncConnection) -> None:
        status = connection.info.transaction_status
        if status == TransactionStatus.IDLE and not self._is_closed:
            self._idle.append(connection)
        else:  # lost, or given up in the middle of an answer
            connection.pgconn.finish()


MAX_WAITING = 1_000  # calls that wait for a connection of a loop


class Leases:
    """Lends the connections of each event loop's pool.

    Args:
        connect: opens a connection.
        size: connections of an event loop.
    """

    def __init__(self, connect: Connect, size: int) -> None:
        self.size = size
        self.is_distributed = False  # over workers, each of which may fail to answer
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
        # A call to a distributed database may have waited for one of the workers.
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
