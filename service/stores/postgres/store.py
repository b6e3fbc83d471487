"""The store in PostgreSQL: one namespace of a database that any number of processes share.

A call takes one connection of its event loop's pool. Changes run as transactions that are tried
again where another one was faster; reads are one statement wherever a request waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import AsyncConnection, Connection

from service.domain.errors import HeedError, Invalid, NotFound, StoreUnreachable, Unavailable
from service.domain.item_patch import ItemPatch
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.records import (
    Event,
    Item,
    User,
    check_each,
    check_event,
    check_id,
    check_item,
    check_user,
)
from service.stores.base import Store
from service.stores.bulk_access import BulkAccess
from service.stores.encoding import check_limit, user_document
from service.stores.jobs import CATALOGUE, FOLDING, NAMES, QUOTA, Job, Transaction
from service.stores.postgres import catalogue, forgetting, users
from service.stores.postgres.bulk import copy_record
from service.stores.postgres.bulk.postgres_bulk import PostgresBulk
from service.stores.postgres.database.connections import LONG_TIMEOUT, QUICK_TIMEOUT
from service.stores.postgres.database.faults import is_lost
from service.stores.postgres.database.installation import open_installation
from service.stores.postgres.database.shared import SharedDatabase, open_database
from service.stores.postgres.database.transaction import PostgresTransaction, Transactions
from service.stores.postgres.dialect import run_job
from service.stores.postgres.events import log_changes, scan, tallies
from service.stores.postgres.events.appending import Appending
from service.stores.postgres.events.histories import Histories
from service.stores.postgres.events.names import InternedNames
from service.stores.postgres.imports import ledger
from service.stores.postgres.namespaces import find_namespace, find_or_create_namespace
from service.stores.postgres.registers.rate_windows import PostgresRateWindows
from service.stores.postgres.shared_parts import SharedParts
from service.stores.quota import StoreQuota
from service.stores.values import (
    AppendResult,
    CatalogueChanges,
    CatalogueDigest,
    ForgottenAgain,
    ForgottenUser,
    History,
    ImportRecord,
    LogChanges,
    LogColumns,
    OnCatalogueChange,
    PatchResult,
    Shard,
    StoreMeasures,
    UndoneImport,
    copy_unfinished,
    user_digest,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNDONE_ROWS = 20_000  # events of an import that are taken back in one transaction
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
                origin = None if is_target else copy_record.unfinished(connection, found)
                if origin is not None:
                    place = f"the namespace {namespace} of {self._connections.name}"
                    raise copy_unfinished(place, origin)
                self._database_bytes = _database_size(connection)
        except BaseException:
            self._database.abandon()
            raise
        self._transactions = Transactions(self._connections, self._notices, namespace, self._no)
        self._is_closed = False
        self._quota = quota if quota and any(quota) else None
        self._patience = patience
        self._items = InternedNames(self._connections, self._no, "items")
        self._types = InternedNames(self._connections, self._no, "types")
        self._appending = Appending(self._items, self._types)
        self._catalogue = catalogue.CatalogueWrites(self._items)
        self._histories = Histories(self._no, self._items, self._types)
        self.rate_windows = PostgresRateWindows(
            lambda: self._connections.connection(patience), self._no
        )
        self._fold_at = 0.0  # when counts may be folded next (monotonic)

    # ------------------------------------------------------------------ histories

    async def append(
        self, events: Sequence[Event], *, import_id: int | None = None
    ) -> AppendResult:
        check_each(events, check_event, "/events")
        if not events:
            return AppendResult(0, 0)
        batch = self._appending.batch(events, time.time_ns() // 1000, import_id)
        return await self._adding(
            lambda each: self._appending.append(each, batch),
            lambda: self._appending.prepare(events),
        )

    async def version(self, user_id: str) -> int:
        return await self._ask_user(self._histories.version, user_id)

    async def history(self, user_id: str, *, after: int = 0) -> History:
        return await self._ask_user(self._histories.history, user_id, after)

    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        return await self._ask_user(self._histories.changed, user_id, version, generation, seq)

    async def page(
        self, user_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Event], str | None]:
        check_id(user_id, "/user_id")
        return await self._on_connection(
            self._histories.page,
            user_id,
            cursor,
            check_limit(limit),
        )

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        return await self._ask_user(self._histories.event_ids, user_id, seqs, timestamps)

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        check_id(user_id, "/user_id")
        check_id(event_id, "/event_id")
        return await self._in_transaction(
            lambda each: users.delete_event(each, user_id, event_id),
        )

    async def forget(self, user_id: str) -> int:
        check_id(user_id, "/user_id")
        now = time.time_ns() // 1000
        return await self._in_transaction(
            lambda each: forgetting.forget(each, user_id, now),
        )

    async def merge(self, user_id: str, source: str) -> int:
        check_id(user_id, "/user_id")
        if check_id(source, "/from") == user_id:
            raise Invalid("/from", "must be another user")
        return await self._in_transaction(
            lambda each: users.merge(each, user_id, source),
        )

    async def put_user(self, user: User, *, import_id: int | None = None) -> None:
        check_user(user)
        profile = user_document(user)
        await self._adding(
            lambda each: users.put_user(each, user.user_id, profile, import_id),
        )

    async def get_user(self, user_id: str) -> User | None:
        return await self._ask_user(self._histories.user, user_id)

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100, prefix: str = ""
    ) -> tuple[list[User], str | None]:
        return await self._on_connection(
            self._histories.page_users,
            cursor,
            check_limit(limit),
            prefix,
        )

    async def event_counts(self, user_ids: Sequence[str]) -> list[int]:
        return await self._on_connection(self._histories.event_counts, user_ids)

    # ------------------------------------------------------------------ catalogue

    async def put_items(
        self,
        items: Sequence[Item],
        *,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> int:
        check_each(items, check_item, "/items")
        if not items:
            return 0
        ids = [item.item_id for item in items]
        return await self._adding(
            lambda each: self._catalogue.put_items(each, items, on_change, import_id),
            lambda: self._catalogue.prepare(ids),
            alone=(CATALOGUE,),
        )

    async def patch_items(
        self,
        patches: Sequence[ItemPatch],
        *,
        create: bool = True,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> PatchResult:
        check_each([patch.apply(None) for patch in patches], check_item, "/items")
        if not patches:
            return PatchResult(0, ())
        ids = [patch.item_id for patch in patches]
        return await self._adding(
            lambda each: self._catalogue.patch_items(each, patches, create, on_change, import_id),
            lambda: self._catalogue.prepare(ids),
            alone=(CATALOGUE,),
        )

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        for index, item_id in enumerate(item_ids):
            check_id(item_id, f"/item_ids/{index}")
        if not item_ids:
            return []
        return await self._on_connection(
            catalogue.get_items, self._no, item_ids, patience=self._patience
        )

    async def delete_item(
        self, item_id: str, *, on_change: OnCatalogueChange | None = None
    ) -> bool:
        check_id(item_id, "/item_id")
        return await self._in_transaction(
            lambda each: catalogue.delete_item(each, item_id, on_change), alone=(CATALOGUE,)
        )

    async def page_items(
        self, *, cursor: str | None = None, limit: int = 100, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        return await self._on_connection(
            catalogue.page_items, self._no, cursor, check_limit(limit), hidden
        )

    async def catalogue_version(self) -> int:
        return await self._on_connection(catalogue.catalogue_version, self._no)

    def announced_catalogue(self) -> int:
        return self._notices.versions(self._namespace)[0]

    async def catalogue_digest(self) -> CatalogueDigest:
        return await self._on_connection(catalogue.catalogue_digest, self._no)

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        return await self._on_connection(catalogue.catalogue_changes, self._no, after, limit)

    # ------------------------------------------------------------------ versions

    def announced_keys(self) -> int:
        return self._notices.versions(self._namespace)[1]

    # ------------------------------------------------------------------ forgotten users

    async def page_forgotten(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[ForgottenUser], str | None]:
        return await self._on_connection(forgetting.page, self._no, cursor, check_limit(limit))

    async def find_forgotten(self, user_id: str) -> list[ForgottenUser]:
        return await self._on_connection(forgetting.find, self._no, check_id(user_id, "/user_id"))

    async def count_forgotten(self, since: int) -> int:
        return await self._on_connection(forgetting.count, self._no, since)

    async def forget_again(self, entries: Sequence[ForgottenUser]) -> ForgottenAgain:
        new = await self._on_connection(forgetting.unknown_entries, self._no, entries)
        by_salt: dict[bytes, dict[bytes, ForgottenUser]] = {}
        for entry in new:
            by_salt.setdefault(entry.salt, {})[entry.digest] = entry
        matches = await asyncio.to_thread(
            lambda: [
                (user_id, entry)
                for user_id in (self.scan_user_ids() if by_salt else ())
                for salt, named in by_salt.items()
                if (entry := named.get(user_digest(salt, user_id))) is not None
            ]
        )
        now = time.time_ns() // 1000
        found = [
            await self._in_transaction(
                lambda each, user_id=user_id, entry=entry: forgetting.forget_entry(  # type: ignore[misc]
                    each, user_id, entry, now
                ),
            )
            for user_id, entry in matches
        ]
        await self._in_transaction(lambda each: forgetting.add_entries(each, new))
        events = [count for count in found if count is not None]
        return ForgottenAgain(len(events), sum(events), len(new))

    async def clean_up(self) -> bool:
        if time.monotonic() >= self._fold_at:
            self._fold_at = time.monotonic() + FOLD_INTERVAL
            await self._in_transaction(tallies.fold, alone=(FOLDING,))
        if not await self._on_connection(forgetting.has_noted_names, self._no):
            return False
        noted, since, unused = await self._on_connection(
            forgetting.find_unused,
            self._no,
            self._connections.is_distributed,
        )
        return await self._in_transaction(
            lambda each: forgetting.delete_names(each, noted, since, unused),
            alone=(NAMES,),
        )

    # ------------------------------------------------------------------ imports and their undoing

    async def begin_import(self, source: str) -> int:
        now = time.time_ns() // 1000
        return await self._in_transaction(lambda each: ledger.begin(each, source, now))

    async def imports(self) -> list[ImportRecord]:
        return await self._on_connection(ledger.records, self._no)

    async def undo_import(
        self, import_id: int, *, progress: Callable[[int], None] | None = None
    ) -> UndoneImport:
        events = shared = 0
        after = await self._in_transaction(lambda each: ledger.begin_undo(each, import_id))
        while True:
            place = after
            deleted, handed, last = await self._in_transaction(
                lambda each, place=place: ledger.undo_events(each, import_id, place, UNDONE_ROWS),  # type: ignore[misc]
            )
            events, shared = events + deleted, shared + handed
            if progress is not None:
                progress(events)
            if last is None:
                break
            after = last
        items, profiles, kept = await self._in_transaction(
            lambda each: ledger.undo_documents(each, import_id),
            alone=(CATALOGUE,),
        )
        return UndoneImport(events, items, profiles, kept, shared)

    # ------------------------------------------------------------------ the store itself

    async def clock(self, *, patient: bool = False) -> int:
        return await self._on_connection(
            log_changes.clock,
            self._no,
            self._connections.is_distributed,
            patience=LONG_TIMEOUT if patient else self._patience,
        )

    async def counts(self) -> dict[str, int]:
        return await self._on_connection(tallies.counts, self._no)

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        return await self._on_connection(tallies.popularity, self._no)

    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        most = None if limit is None else check_limit(limit)

        def read() -> LogChanges:
            with self._connections.snapshot() as connection:
                return log_changes.log_changes(
                    connection, self._no, after, known, most, self._connections.is_distributed
                )

        self._check_open()
        return await asyncio.to_thread(read)

    async def user_ids(self, numbers: Sequence[int]) -> list[str | None]:
        if not numbers:
            return []

        async def read(connection: AsyncConnection) -> list[str | None]:
            cursor = await connection.execute(
                b"SELECT user_no, user_id FROM heed.users"
                b" WHERE namespace_no = %s AND user_no = ANY(%s::bigint[])",
                (self._no, list(numbers)),
            )
            found: dict[int, str] = dict(await cursor.fetchall())
            return [found.get(number) for number in numbers]

        return await self._on_connection(read, patience=self._patience)

    def bulk(self) -> BulkAccess:
        names = self._items, self._types
        return PostgresBulk(self._connections, self._no, names, self._in_transaction)

    async def problem(self) -> str | None:
        read = catalogue.catalogue_version
        try:
            await self._on_connection(read, self._no, patience=QUICK_TIMEOUT)
        except HeedError as error:
            return error.told
        return None

    def measures(self) -> StoreMeasures:
        writes, failures = self._transactions, self._connections.failures
        return StoreMeasures(
            self._database_bytes, 0, 0, writes.running, writes.commits, 0, failures, self._is_closed
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
        return self._scan(lambda each: scan.scan(each, self._no, check_limit(rows), shard))

    def scan_events(self) -> Iterator[Event]:
        return self._scan(lambda each: scan.scan_events(each, self._no))

    def scan_items(self) -> Iterator[Item]:
        return self._scan(lambda each: scan.scan_items(each, self._no))

    def scan_users(self) -> Iterator[User]:
        return self._scan(lambda each: scan.scan_users(each, self._no))

    def scan_user_ids(self) -> Iterator[str]:
        return self._scan(lambda each: scan.scan_user_ids(each, self._no))

    # ------------------------------------------------------------------ inside

    async def _ask(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> T:
        return await self._on_connection(self._run, job, *args, patience=self._patience)

    async def _read(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:  # noqa: ARG002
        return await self._on_connection(self._run, job, *args)

    async def _write(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,  # noqa: ARG002 - each job is a transaction
        alone: tuple[int, ...] = (),
        items: Sequence[str] = (),
    ) -> T:
        return await self._in_transaction(
            lambda transaction: transaction.run(job(transaction, *args)),
            partial(self._items.learn, items) if items else None,
            alone=alone,
        )

    async def _add(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,  # noqa: ARG002
        alone: tuple[int, ...] = (),
        items: Sequence[str] = (),
    ) -> T:
        return await self._adding(
            lambda transaction: transaction.run(job(transaction, *args)),
            partial(self._items.learn, items) if items else None,
            alone=alone,
        )

    async def _run(
        self, connection: AsyncConnection, job: Callable[[*Ts], Job[T]], *args: *Ts
    ) -> T:
        return await run_job(connection, self._no, job(*args))

    async def _adding(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
    ) -> T:
        """Write what adds to the store, within its quota."""
        quota = self._quota
        if quota is None:
            return await self._in_transaction(job, prepare, alone=alone)

        async def bounded(transaction: PostgresTransaction) -> T:
            before = await tallies.usage(transaction)
            result = await job(transaction)
            quota.check(before, await tallies.usage(transaction))  # which rolls the job back
            return result

        return await self._in_transaction(bounded, prepare, alone=tuple(sorted((*alone, QUOTA))))

    async def _in_transaction(
        self,
        job: Callable[[PostgresTransaction], Awaitable[T]],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
        patience: float = LONG_TIMEOUT,
    ) -> T:
        """Run a job as `Transactions.run` does."""
        self._check_open()
        return await self._transactions.run(job, prepare=prepare, alone=alone, patience=patience)

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
        # Where a new connection was lost, the breaker is open by now.
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

    def _scan(self, answers: Callable[[Connection], Iterator[T]]) -> Iterator[T]:
        """Read all in one transaction over a connection of its own."""
        self._check_open()
        with self._connections.snapshot() as connection:
            yield from answers(connection)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the store is closed")


def _database_size(connection: Connection) -> int:
    row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    return 0 if row is None else int(row[0])
