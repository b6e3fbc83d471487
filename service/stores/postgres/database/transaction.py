"""Transactions that write: their tick, and when they are tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.errors import Diagnostic

from service.domain.errors import Busy, HeedError, NotFound, Unconfirmed
from service.stores.jobs import NAMES, Do, Job, Rows, Run
from service.stores.postgres.database.connections import LONG_TIMEOUT, Connections
from service.stores.postgres.database.faults import explain, is_disconnected, is_lost, is_retried
from service.stores.postgres.database.notices import NOTIFY, Notices
from service.stores.postgres.database.ticks.base import TICKS
from service.stores.postgres.dialect import run_job

T = TypeVar("T")

_ATTEMPTS = 8
_PAUSE = 0.01  # seconds by which the time between two attempts grows, from the third one on
# Prefix of the name of a namespace that is being removed; no valid name has it.
REMOVED = "removed:"
IS_THERE = f"NOT starts_with(name, '{REMOVED}')"
_BEGIN = f"""\
SELECT tick_base + {TICKS} * pg_current_xact_id()::text::bigint, names
  FROM heed.installation, heed.namespaces WHERE namespace_no = %s AND {IS_THERE}"""

# A commit waits for disks and standbys only where it has written something, and then for all that
# was committed before. A job that finds its work done already, by an attempt whose commit was not
# confirmed, must wait for that one.
_MARK = b"SELECT pg_logical_emit_message(true, 'heed', '')"
# After a worker was cut off, its rows may be locked until Citus has settled what it had prepared.
_PATIENCE = b"SET LOCAL lock_timeout = '5s'"


class Changed(Exception):  # no error: the transaction begins anew
    """Raised in a job where another transaction has changed what it relies on."""


class PostgresTransaction:
    """Transaction of one job: its connection, its namespace and its tick."""

    __slots__ = ("_tick", "announced", "connection", "is_distributed", "names", "namespace_no")

    def __init__(
        self,
        connection: AsyncConnection,
        is_distributed: bool,
        namespace_no: int,
        tick: int,
        names: int,
    ) -> None:
        self.connection = connection
        self.is_distributed = is_distributed
        self.namespace_no = namespace_no
        self._tick = tick
        self.names = names  # the tick of the last deletion of interned names
        self.announced = (0, 0)  # new versions of the catalogue and of the keys

    def tick(self) -> int:
        """Return the version of the changes.

        It is greater than that of each transaction that had ended when this one began.
        """
        return self._tick

    async def run(self, job: Job[T]) -> T:
        """Run the statements of a job."""
        return await run_job(self.connection, self.namespace_no, job)

    def move_keys(self) -> Job[None]:
        """Move the version of the keys, of which all processes hear after the commit."""
        rows = yield Run(
            "UPDATE heed.namespaces SET keys = greatest(keys + 1, :tick) WHERE $here"
            " RETURNING keys",
            tick=self._tick,
        )
        yield from self._announce(0, rows[0][0])

    def _announce(self, catalogue: int, keys: int) -> Job[None]:
        yield Do(NOTIFY)
        self.announced = max(self.announced[0], catalogue), max(self.announced[1], keys)

    async def announce(self, *, catalogue: int = 0, keys: int = 0) -> None:
        """Tell all processes of a new version once the transaction is committed."""
        await self.connection.execute(NOTIFY.encode())
        self.announced = max(self.announced[0], catalogue), max(self.announced[1], keys)

    async def execute(self, query: str, *values: Any) -> AsyncCursor:
        """Run a statement with the namespace's number before its other values."""
        return await self.connection.execute(
            query.encode(), (self.namespace_no, *values), binary=True
        )

    async def rows(self, query: str, *values: Any) -> Rows:
        """Run a statement as `execute` does, and return its rows."""
        return await (await self.execute(query, *values)).fetchall()

    async def rows_of_each(self, query: str, values: Sequence[Any]) -> Rows:
        """Run a statement for each value, all of them sent at once, and return all rows.

        A distributed database locks rows of one user alone in a statement.
        """
        cursors = [await self.execute(query, value) for value in values]
        return [row for cursor in cursors for row in await cursor.fetchall()]

    async def row(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        """Run a statement as `execute` does, and return its first row, if there is one."""
        return await (await self.execute(query, *values)).fetchone()


class Transactions:
    """Runs jobs in transactions of one namespace.

    A job runs to its end once it has begun, also when its caller is cancelled: so it has changed
    everything or nothing, and its connection is never lent with half of an answer in it.
    """

    def __init__(
        self, connections: Connections, notices: Notices, namespace: str, namespace_no: int
    ) -> None:
        self._connections = connections
        self._notices = notices
        self._namespace = namespace
        self._namespace_no = namespace_no
        self._running: set[asyncio.Task[Any]] = set()
        self.commits = 0

    async def run(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
        alone: tuple[int, ...] = (),
        patience: float = LONG_TIMEOUT,
    ) -> T:
        """Run a job and commit it; the job may run several times, and counts once.

        Args:
            job: what to do.
            prepare: what to do before each attempt, outside of the transaction.
            alone: locks that no other transaction may hold meanwhile, in ascending order. They
                are taken before the tick, so that ticks of one lock's holders grow in the order of
                their commits.
            patience: seconds after which an attempt is given up.

        Raises what the job raises, and `Unavailable` where the transaction was not, or maybe not,
        committed.
        """
        task = asyncio.ensure_future(self._attempts(job, prepare, alone, patience))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait for the jobs that run on this event loop."""
        loop = asyncio.get_running_loop()
        own = [task for task in self._running if task.get_loop() is loop]
        if own:
            await asyncio.wait(own)

    @property
    def running(self) -> int:
        """Number of jobs that run or wait for a connection."""
        return len(self._running)

    async def _attempts(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None,
        alone: tuple[int, ...],
        patience: float,
    ) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            if attempt > 2:
                await asyncio.sleep(_PAUSE * (attempt - 2))
            try:
                if prepare is not None:
                    await prepare()
                async with self._connections.connection(patience) as connection:
                    return await self._once(connection, job, alone)
            except Changed:
                continue
            except HeedError as error:
                if attempt == _ATTEMPTS or not _may_succeed(error, attempt):
                    raise
        raise Busy("other writes kept changing what this one relies on")

    async def _once(
        self,
        connection: AsyncConnection,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        alone: tuple[int, ...],
    ) -> T:
        number, execute = self._namespace_no, connection.execute
        try:
            async with connection.pipeline():
                await execute("BEGIN")
                for lock in alone:
                    await execute(b"SELECT pg_advisory_xact_lock(%s, %s)", (lock, number))
                if NAMES not in alone:
                    await execute(b"SELECT pg_advisory_xact_lock_shared(%s, %s)", (NAMES, number))
                row = await (await execute(_BEGIN.encode(), (number,))).fetchone()
                if row is None:
                    raise NotFound("the namespace was removed")
                is_distributed = self._connections.is_distributed
                if is_distributed:
                    await execute(_PATIENCE)
                transaction = PostgresTransaction(connection, is_distributed, number, *row)
                result = await job(transaction)
                await execute(_MARK)
        except BaseException:
            with suppress(psycopg.Error):
                await execute("ROLLBACK")
            raise
        await _commit(connection)
        self.commits += 1
        catalogue, keys = transaction.announced
        self._notices.note(self._namespace, catalogue=catalogue, keys=keys)
        return result


def _may_succeed(error: HeedError, attempt: int) -> bool:
    """Report whether another attempt may succeed, after one that has changed nothing."""
    cause = error.__cause__
    if isinstance(error, Unconfirmed) or not isinstance(cause, psycopg.Error):
        return False
    # An idle connection may have been lost; where a new one was, the next attempt fails at once.
    return is_retried(cause) or (attempt == 1 and is_lost(cause))


async def _commit(connection: AsyncConnection) -> None:
    """Commit; raise `Unconfirmed` unless the server says that the transaction is safe and visible.

    A server warns, and does not fail, where it no longer waits for its standby, or where a worker
    of a distributed database was lost before it has committed what it has prepared.
    """
    unconfirmed: list[str | None] = []

    def note(diagnostic: Diagnostic) -> None:
        if diagnostic.severity_nonlocalized == "WARNING":
            unconfirmed.append(diagnostic.message_primary)

    connection.add_notice_handler(note)
    try:
        await connection.execute("COMMIT")
    except psycopg.Error as error:
        if is_disconnected(error):
            raise Unconfirmed(f"{explain(error).detail}; the write may have succeeded") from error
        raise
    finally:
        connection.remove_notice_handler(note)
    if unconfirmed:
        raise Unconfirmed(f"PostgreSQL does not confirm the write: {unconfirmed[0]}")
