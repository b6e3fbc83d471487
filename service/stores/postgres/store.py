"""The store in PostgreSQL: one namespace of a database that any number of processes share.

A call takes one connection of its event loop's pool. Changes run as transactions that are tried
again where another one was faster; reads are one statement wherever a request waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import AsyncConnection, Connection

from service.domain.errors import HeedError, NotFound, StoreUnreachable, Unavailable
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.records import (
    Event,
    check_id,
)
from service.stores.base import Store
from service.stores.encoding import check_limit
from service.stores.jobs import FOLDING, QUOTA, Job, Transaction
from service.stores.postgres import event_log, tallies
from service.stores.postgres.appending import Appending
from service.stores.postgres.connections import LONG_TIMEOUT, QUICK_TIMEOUT
from service.stores.postgres.dialect import run_job, run_job_blocking
from service.stores.postgres.faults import is_lost
from service.stores.postgres.histories import Histories
from service.stores.postgres.names import InternedNames
from service.stores.postgres.namespaces import find_namespace, find_or_create_namespace
from service.stores.postgres.notices import SharedDatabase, open_database
from service.stores.postgres.rate_windows import PostgresRateWindows
from service.stores.postgres.schema import open_installation
from service.stores.postgres.shared_parts import SharedParts
from service.stores.postgres.ticks import horizon_query
from service.stores.postgres.transaction import PostgresTransaction, Transactions
from service.stores.quota import StoreQuota
from service.stores.records import catalogue, copying
from service.stores.values import (
    AppendResult,
    History,
    LogChanges,
    LogColumns,
    Shard,
    StoreMeasures,
    copy_unfinished,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HOURS_TIMEOUT = 3_600.0  # seconds of a write that may take hours
FOLD_INTERVAL = 10.0  # seconds between two attempts to fold counts


class PostgresStore(Store):
    """Store in one namespace of a database, whose schema is created or migrated.

    Args:
        database: its URL, or a database that is open, with its schema up to date.
        namespace: its name.
        create: create the namespace where there is none of this name.
        quota: bounds what this client may add to the namespace.
        patience: seconds that what a request waits for may take, before `StoreUnreachable`.
        is_target: open an unfinished copy too, so that it goes on.

    Raises:
        NotFound: there is no such namespace.
        Invalid: the URL is none of PostgreSQL, or the database is not encoded in UTF8.
        Incompatible: a newer Heed has migrated the database.
        Corrupt: it holds part of a backup, or the namespace part of a copy.
        Unavailable: the database does not answer.
    """

    def __init__(
        self,
        database: str | SharedDatabase,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        create: bool = True,
        quota: StoreQuota | None = None,
        patience: float = QUICK_TIMEOUT,
        is_target: bool = False,
    ) -> None:
        is_new = isinstance(database, str)
        self._database = open_database(database) if isinstance(database, str) else database.join()
        self._connections = self._database.connections
        self._notices = self._database.notices
        self._namespace = namespace
        try:
            with self._connections.plain() as connection:
                if is_new:
                    open_installation(connection)
                self._connections.recognise(connection)
                find = find_or_create_namespace if create else find_namespace
                found = find(connection, namespace)
                if found is None:
                    raise NotFound(f"there is no namespace {namespace!r}")
                self._no = found
                origin = None if is_target else _unfinished_copy(connection, found)
                if origin is not None:
                    place = f"the namespace {namespace} of {self._connections.name}"
                    raise copy_unfinished(place, origin)
                self._database_bytes = _database_size(connection)
        except BaseException:
            self._database.abandon()
            raise
        self._is_closed = False
        self._quota = quota if quota and any(quota) else None
        self._patience = patience
        self._items = InternedNames(self._connections, self._no, "items")
        self._types = InternedNames(self._connections, self._no, "types")
        self._appending = Appending(self._items, self._types)
        self._transactions = Transactions(
            self._connections,
            self._notices,
            namespace=namespace,
            namespace_no=self._no,
            interned=(self._items, self._types),
        )
        self._histories = Histories(self._no, self._items, self._types)
        self.rate_windows = PostgresRateWindows(
            lambda: self._connections.connection(patience), self._no
        )
        self._fold_at = 0.0  # when counts may be folded next (monotonic)

    # ------------------------------------------------------------------ histories

    async def version(self, user_id: str) -> int:
        return await self._ask_user(self._histories.version, user_id)

    async def history(self, user_id: str) -> History:
        return await self._ask_user(self._histories.history, user_id)

    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        return await self._ask_user(self._histories.changed, user_id, version, generation, seq)

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        return await self._ask_user(self._histories.event_ids, user_id, seqs, timestamps)

    async def _append(
        self, events: Sequence[Event], now: int, import_no: int | None
    ) -> AppendResult:
        batch = self._appending.batch(events, now, import_no)
        return await self._transact(
            lambda each: self._appending.append(each, batch),
            lambda: self._appending.prepare(events),
            adds=True,
        )

    # ------------------------------------------------------------------ the store itself

    def announced_catalogue(self) -> int:
        return self._notices.versions(self._namespace)[0]

    def announced_keys(self) -> int:
        return self._notices.versions(self._namespace)[1]

    async def clean_up(self) -> bool:
        if time.monotonic() >= self._fold_at:
            self._fold_at = time.monotonic() + FOLD_INTERVAL
            await self._write(lambda _: tallies.fold(), alone=(FOLDING,))
        return await super().clean_up()

    async def counts(self) -> dict[str, int]:
        return await self._read(tallies.counts)

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        return await self._read(tallies.popularity)

    async def clock(self, *, patient: bool = False) -> int:
        return await self._on_connection(
            event_log.clock,
            self._no,
            self._connections.is_distributed,
            patience=LONG_TIMEOUT if patient else self._patience,
        )

    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        most = None if limit is None else check_limit(limit)

        def read() -> LogChanges:
            with self._connections.snapshot() as connection:
                return event_log.log_changes(
                    connection, self._no, after, known, most, self._connections.is_distributed
                )

        self._check_open()
        return await asyncio.to_thread(read)

    async def problem(self) -> str | None:
        try:
            await self._on_connection(self._run, catalogue.version, patience=QUICK_TIMEOUT)
        except HeedError as error:
            return error.told
        return None

    def measures(self) -> StoreMeasures:
        writes = self._transactions
        return StoreMeasures(
            database_bytes=self._database_bytes,
            log_bytes=0,
            log_pages=0,
            queued_rows=writes.running,
            commits=writes.commits,
            checkpoints=0,
            failures=self._connections.failures,
            failed=self._is_closed,
        )

    @property
    def shared(self) -> SharedParts:
        return SharedParts(self._connections, self._no)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._transactions.finish()
            await self._database.close()

    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        return self._scan(lambda each: event_log.scan(each, self._no, check_limit(rows), shard))

    # ------------------------------------------------------------------ inside

    @property
    def _horizon(self) -> str:  # type: ignore[override]
        return horizon_query(self._connections.is_distributed)

    async def _ask(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:  # noqa: ARG002
        return await self._on_connection(self._run, job, *args, patience=self._patience)

    async def _read(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:  # noqa: ARG002
        return await self._on_connection(self._run, job, *args)

    async def _read_apart(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> T:
        def read() -> T:
            with self._connections.snapshot() as connection:
                return run_job_blocking(connection, self._no, job(*args))

        self._check_open()
        return await asyncio.to_thread(read)

    async def _run(
        self, connection: AsyncConnection, job: Callable[[*Ts], Job[T]], *args: *Ts
    ) -> T:
        return await run_job(connection, self._no, job(*args))

    async def _write(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,  # noqa: ARG002 - each job is a transaction
        alone: tuple[int, ...] = (),
        items: Iterable[str] = (),
        types: Iterable[str] = (),
        adds: bool = False,
        is_long: bool = False,
    ) -> T:
        async def attempt(transaction: PostgresTransaction) -> T:
            if is_long:
                await transaction.connection.execute(b"SET LOCAL statement_timeout = 0")
            return await transaction.run(job(transaction, *args))

        return await self._transact(
            attempt,
            partial(self._learn, items, types) if items or types else None,
            alone=alone,
            adds=adds,
            patience=HOURS_TIMEOUT if is_long else LONG_TIMEOUT,
        )

    async def _transact(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None,
        *,
        alone: tuple[int, ...] = (),
        adds: bool = False,
        patience: float = LONG_TIMEOUT,
    ) -> T:
        self._check_open()
        quota = self._quota
        if quota is None or not adds:
            return await self._transactions.run(
                job, prepare=prepare, alone=alone, patience=patience
            )

        async def bounded(transaction: PostgresTransaction) -> T:
            before = await transaction.run(tallies.usage())
            result = await job(transaction)
            after = await transaction.run(tallies.usage())
            quota.check(before, after)  # which rolls the job back
            return result

        alone = tuple(sorted((*alone, QUOTA)))
        return await self._transactions.run(
            bounded, prepare=prepare, alone=alone, patience=patience
        )

    async def _learn(self, items: Iterable[str], types: Iterable[str]) -> None:
        await self._items.learn(items)
        await self._types.learn(types)

    async def _on_connection(
        self,
        question: Callable[[AsyncConnection, *Ts], Awaitable[T]],
        *args: *Ts,
        patience: float = LONG_TIMEOUT,
    ) -> T:
        """Read over a connection. A read whose idle connection was lost is tried once more."""
        self._check_open()
        try:
            async with self._connections.connection(patience) as connection:
                return await question(connection, *args)
        except StoreUnreachable as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.Error) or not is_lost(cause):
                raise
        # If a new connection was lost, the breaker is open by now.
        async with self._connections.connection(patience) as connection:
            return await question(connection, *args)

    async def _ask_user(
        self,
        question: Callable[[AsyncConnection, str, *Ts], Awaitable[T]],
        user_id: str,
        *args: *Ts,
    ) -> T:
        """Read what a request waits for of one user."""
        check_id(user_id, "/user_id")
        return await self._on_connection(question, user_id, *args, patience=self._patience)

    def _scan_rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        return self._scan(lambda each: event_log.scan_rows(each, self._no, sql))

    def _scan(self, answers: Callable[[Connection], Iterator[T]]) -> Iterator[T]:
        """Read all in one transaction over a connection of its own."""
        self._check_open()
        with self._connections.snapshot() as connection:
            yield from answers(connection)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the store is closed")


def _unfinished_copy(connection: Connection, namespace_no: int) -> str | None:
    return run_job_blocking(connection, namespace_no, copying.unfinished())


def _database_size(connection: Connection) -> int:
    row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    return 0 if row is None else int(row[0])
