"""A pool of the connections of one event loop, without tasks of its own.

`psycopg_pool` connects in background tasks. These outlive a cancelled call, so that `asyncio.run`
waits for them for ever, and a caller learns of a refused connection only when its wait times out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from service.domain.errors import Overloaded, StoreUnreachable

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

        Of several hosts, one that hangs is given up after seconds, which a request does not have.
        """
        task = asyncio.ensure_future(self._connect())
        done, _ = await asyncio.wait({task}, timeout=patience)
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
