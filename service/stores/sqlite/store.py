"""The embedded store: one SQLite file, durable when acknowledged, open to several processes.

Short reads run where they are called, on the event loop too: a version takes microseconds, a
history of hundreds of events a fraction of a millisecond. Long ones move to threads of their own.
Changes go to the writer's thread. Nothing is cached that another process could invalidate.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar, TypeVarTuple
from weakref import WeakSet

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.errors import (
    Corrupt,
    HeedError,
    Invalid,
    StoreFull,
    StoreReadOnly,
    Unavailable,
)
from service.domain.item_patch import ItemPatch
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
from service.stores.jobs import Job, Transaction
from service.stores.quota import StoreQuota
from service.stores.records import keys
from service.stores.sqlite import forgetting
from service.stores.sqlite.bulk import copy_record
from service.stores.sqlite.bulk.sqlite_bulk import SQLiteBulk
from service.stores.sqlite.database_file import (
    WRITE_TIMEOUT_MS,
    DatabaseFile,
    checksum_vfs,
    explain,
    file_sizes,
)
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.imports import import_ledger
from service.stores.sqlite.integrity.frozen_file import FrozenFile
from service.stores.sqlite.integrity.store_guard import CHECK, StoreGuard
from service.stores.sqlite.items import ItemWrites
from service.stores.sqlite.log_changes import log_changes
from service.stores.sqlite.reads import Reads, read_transaction, usage
from service.stores.sqlite.scan import scan, scan_events, scan_items, scan_user_ids, scan_users
from service.stores.sqlite.schema import check_schema
from service.stores.sqlite.writer import SQLiteTransaction, Writer
from service.stores.sqlite.writes import Names, Writes
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
MAX_INLINE_ROWS = 2_000  # rows that may be read on the event loop, ~1 ms
ALL_ROWS = 1 << 62  # more than any log has
REOPEN_INTERVAL = 1.0  # seconds between two attempts to open a store that can only be read
READER_THREADS = 2  # threads for longer reads


class SQLiteStore(Store):
    """Store in the file `path`.

    The file and its directory are created if they are not there. `quota` bounds what this client
    of the file may add to it. `vfs` names another SQLite VFS to go through; tests inject faults
    with it. `is_target` opens an unfinished copy too, so that it goes on.

    Raises `Incompatible`, `Corrupt` or `Unavailable` if the file is not, or no longer, a store.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        quota: StoreQuota | None = None,
        vfs: str | None = None,
        is_target: bool = False,
    ) -> None:
        self._quota = quota if quota and any(quota) else None
        self._path, self._vfs = Path(path).absolute(), vfs
        self._reads = Reads()
        items = Names("items")
        self._writes, self._item_writes = Writes(items), ItemWrites(items)
        self._pool = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="heed-store-reader")
        self._local = threading.local()
        self._connections: WeakSet[apsw.Connection] = WeakSet()
        self._connecting = threading.Lock()
        self._closed = False
        self._damaged = False
        self._frozen: FrozenFile | None = None  # where the store cannot be written
        self._opening = threading.Lock()
        self._open_again = 0.0  # when the store may be opened for writing again (monotonic)
        self._file: DatabaseFile
        self._guard: StoreGuard
        self._writer: Writer
        try:
            self._open()
        except (StoreFull, StoreReadOnly) as error:
            self._frozen = FrozenFile(self._path, vfs or checksum_vfs(), error)
        origin = None if is_target else self._look(copy_record.unfinished)
        if origin is not None:
            self._shut()
            raise copy_unfinished(str(self._path), origin)

    # ------------------------------------------------------------------ histories

    async def append(
        self, events: Sequence[Event], *, import_id: int | None = None
    ) -> AppendResult:
        check_each(events, check_event, "/events")
        if not events:
            return AppendResult(0, 0)
        now = time.time_ns() // 1000
        job = self._writes.append
        return await self._submit_adding(job, events, now, import_id, rows=len(events))

    async def version(self, user_id: str) -> int:
        return self._look(self._reads.version, check_id(user_id, "/user_id"))

    async def history(self, user_id: str, *, after: int = 0) -> History:
        rows = self._look(self._reads.length, check_id(user_id, "/user_id"))
        return await self._look_rows(rows, self._reads.history, user_id, after)

    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        if await self.version(user_id) == version:
            return None
        if seq:
            later = await self.history(user_id, after=seq)
            if later.generation == generation:
                return later
        return await self.history(user_id)

    async def page(
        self, user_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Event], str | None]:
        check_id(user_id, "/user_id")
        return await self._look_rows(check_limit(limit), self._reads.page, user_id, cursor, limit)

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        check_id(user_id, "/user_id")
        return await self._look_rows(len(seqs), self._reads.event_ids, user_id, seqs, timestamps)

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        check_id(user_id, "/user_id")
        check_id(event_id, "/event_id")
        return await self._submit(self._writes.delete_event, user_id, event_id)

    async def forget(self, user_id: str) -> int:
        check_id(user_id, "/user_id")
        return await self._submit(forgetting.forget, user_id, time.time_ns() // 1000)

    async def merge(self, user_id: str, source: str) -> int:
        check_id(user_id, "/user_id")
        if check_id(source, "/from") == user_id:
            raise Invalid("/from", "must be another user")
        return await self._submit(self._writes.merge, user_id, source)

    async def put_user(self, user: User, *, import_id: int | None = None) -> None:
        check_user(user)
        profile = user_document(user)
        return await self._submit_adding(self._writes.put_user, user.user_id, profile, import_id)

    async def get_user(self, user_id: str) -> User | None:
        return self._look(self._reads.user, check_id(user_id, "/user_id"))

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
        job = self._item_writes.put_items
        return await self._submit_adding(job, items, on_change, import_id, rows=len(items))

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
        job = self._item_writes.patch_items
        return await self._submit_adding(
            job, patches, create, on_change, import_id, rows=len(patches)
        )

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        for index, item_id in enumerate(item_ids):
            check_id(item_id, f"/item_ids/{index}")
        if not item_ids:
            return []
        return await self._look_rows(10 * len(item_ids), self._reads.items, item_ids)

    async def delete_item(
        self, item_id: str, *, on_change: OnCatalogueChange | None = None
    ) -> bool:
        check_id(item_id, "/item_id")
        return await self._submit(self._item_writes.delete_item, item_id, on_change)

    async def page_items(
        self, *, cursor: str | None = None, limit: int = 100, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        # Hidden items are found by looking at all.
        rows = 10 * check_limit(limit) + hidden * MAX_INLINE_ROWS
        return await self._look_rows(rows, self._reads.page_items, cursor, limit, hidden)

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100, prefix: str = ""
    ) -> tuple[list[User], str | None]:
        rows = 10 * check_limit(limit)
        return await self._look_rows(rows, self._reads.page_users, cursor, limit, prefix)

    async def event_counts(self, user_ids: Sequence[str]) -> list[int]:
        if not user_ids:
            return []
        return await self._look_off_loop(self._reads.event_counts, user_ids)

    async def catalogue_version(self) -> int:
        return self._look(self._reads.catalogue_version)

    def announced_catalogue(self) -> int:
        return self._look(self._reads.catalogue_version)

    async def catalogue_digest(self) -> CatalogueDigest:
        return await self._look_rows(MAX_INLINE_ROWS + 1, self._reads.catalogue_digest)

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        return await self._look_rows(
            MAX_INLINE_ROWS + 1, self._reads.catalogue_changes, after, limit
        )

    def announced_keys(self) -> int:
        return self._look(run_job, keys.version())

    # ------------------------------------------------------------------ forgotten users

    async def page_forgotten(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[ForgottenUser], str | None]:
        return await self._look_rows(10 * check_limit(limit), forgetting.page, cursor, limit)

    async def find_forgotten(self, user_id: str) -> list[ForgottenUser]:
        return self._look(forgetting.find, check_id(user_id, "/user_id"))

    async def count_forgotten(self, since: int) -> int:
        return self._look(forgetting.count, since)

    async def forget_again(self, entries: Sequence[ForgottenUser]) -> ForgottenAgain:
        new = await self._look_rows(len(entries), forgetting.unknown_entries, entries)
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
            await self._submit(forgetting.forget_entry, user_id, entry, now)
            for user_id, entry in matches
        ]
        await self._submit(forgetting.add_entries, new)
        events = [count for count in found if count is not None]
        return ForgottenAgain(len(events), sum(events), len(new))

    async def clean_up(self) -> bool:
        if not self._look(forgetting.has_noted_names):
            return False
        noted, unused = await self._look_rows(MAX_INLINE_ROWS + 1, forgetting.find_unused)
        # Twice, since the writer's thread is to look at little: at what changes meanwhile.
        since, unused = await self._look_rows(
            MAX_INLINE_ROWS + 1, forgetting.still_unused, noted, unused
        )
        await self._submit(forgetting.delete_names, noted, since, unused)
        return True

    # ------------------------------------------------------------------ imports and their undoing

    async def begin_import(self, source: str) -> int:
        now = time.time_ns() // 1000
        return await self._submit(import_ledger.begin, source, now)

    async def imports(self) -> list[ImportRecord]:
        return self._look(import_ledger.records)

    async def undo_import(
        self, import_id: int, *, progress: Callable[[int], None] | None = None
    ) -> UndoneImport:
        after: import_ledger.Position | None
        events, shared, after = 0, 0, await self._submit(import_ledger.begin_undo, import_id)
        while after is not None:
            deleted, handed, after = await self._submit(
                import_ledger.undo_events, import_id, after, UNDONE_ROWS, rows=UNDONE_ROWS
            )
            events, shared = events + deleted, shared + handed
            if progress is not None:
                progress(events)
        items, users, kept = await self._submit(import_ledger.undo_documents, import_id)
        return UndoneImport(events, items, users, kept, shared)

    # ------------------------------------------------------------------ the store itself

    async def clock(self, *, patient: bool = False) -> int:  # noqa: ARG002 - there is no server
        return self._look(self._reads.clock)

    async def counts(self) -> dict[str, int]:
        return self._look(self._reads.counts)

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        return await self._look_rows(MAX_INLINE_ROWS + 1, self._reads.popularity)

    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        most = ALL_ROWS if limit is None else check_limit(limit)
        return await self._look_rows(MAX_INLINE_ROWS + 1, log_changes, after, known, most)

    async def user_ids(self, numbers: Sequence[int]) -> list[str | None]:
        if not numbers:
            return []
        return await self._look_rows(len(numbers), self._reads.user_ids, numbers)

    def bulk(self) -> BulkAccess:
        return SQLiteBulk(self._look_off_loop, self._submit)

    async def problem(self) -> str | None:
        if self._closed:
            return "the store is closed"
        try:
            if self._frozen is not None:
                self._thaw()
            if self._writer.failure is not None:
                return self._writer.failure.detail
            self._guard.check()
            check_schema(self._look(lambda connection: connection.pragma("user_version")))
        except HeedError as error:
            return error.detail
        return None

    def measures(self) -> StoreMeasures:
        database, log = file_sizes(self._path)
        if self._frozen is not None:
            return StoreMeasures(database, log, 0, 0, 0, 0, 0, failed=True)
        writer = self._writer
        return StoreMeasures(
            database,
            log,
            writer.log_pages,
            writer.waiting,
            writer.commits,
            writer.checkpoints,
            self._file.failures,
            writer.failure is not None or self._damaged,
        )

    @property
    def shared(self) -> None:
        return None

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._shut)

    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        return self._scan(scan, check_limit(rows), shard)

    def scan_events(self) -> Iterator[Event]:
        return self._scan(scan_events, self._reads)

    def scan_items(self) -> Iterator[Item]:
        return self._scan(scan_items)

    def scan_users(self) -> Iterator[User]:
        return self._scan(scan_users)

    def scan_user_ids(self) -> Iterator[str]:
        return self._scan(scan_user_ids)

    # ------------------------------------------------------------------ inside

    async def _ask(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> T:
        return self._look(_run_reading, job(*args))

    async def _read(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:
        return await self._look_rows(rows, _run_reading, job(*args))

    def _write(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,
        alone: tuple[int, ...] = (),  # noqa: ARG002 - one thread writes
        items: Sequence[str] = (),  # noqa: ARG002 - found in the transaction
    ) -> asyncio.Future[T]:
        return self._submit(lambda each: each.run(job(each, *args)), rows=rows)

    def _add(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,
        alone: tuple[int, ...] = (),  # noqa: ARG002
        items: Sequence[str] = (),  # noqa: ARG002
    ) -> asyncio.Future[T]:
        return self._submit_adding(lambda each: each.run(job(each, *args)), rows=rows)

    def _submit_adding(
        self, job: Callable[[SQLiteTransaction, *Ts], T], *args: *Ts, rows: int = 1
    ) -> asyncio.Future[T]:
        """Write what adds to the store, within its quota."""
        quota = self._quota
        if quota is None:
            return self._submit(job, *args, rows=rows)

        def bounded(transaction: SQLiteTransaction) -> T:
            before = usage(transaction.connection)
            result = job(transaction, *args)
            quota.check(before, usage(transaction.connection))  # which rolls the job back
            return result

        return self._submit(bounded, rows=rows)

    def _submit(
        self, job: Callable[[SQLiteTransaction, *Ts], T], *args: *Ts, rows: int = 1
    ) -> asyncio.Future[T]:
        if self._frozen is not None:
            self._thaw()
        return self._writer.submit(lambda transaction: job(transaction, *args), rows)

    def _look(self, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts) -> T:
        """Read on this thread, over its own connection."""
        self._check_open()
        try:
            return question(self._connection(), *args)
        except (apsw.Error, OSError) as error:
            raise self._explain(error)[0] from error

    async def _look_rows(
        self, rows: int, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts
    ) -> T:
        """Read on this thread if about `rows` rows are short enough, else off the event loop."""
        if rows <= MAX_INLINE_ROWS:
            return self._look(question, *args)
        return await self._look_off_loop(question, *args)

    async def _look_off_loop(self, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._look, question, *args)

    def _open(self) -> None:
        """Open the file for reading and writing."""
        self._file = DatabaseFile(self._path, self._vfs)
        connection = self._file.writer()
        try:
            connection.execute("SELECT clock FROM state").get  # noqa: B018  # opens the log
            self._guard = self._file.guard()
        except (apsw.Error, OSError, HeedError) as error:
            connection.close()
            raise explain(self._path, error)[0] from error
        self._writer = Writer(connection, self._explain, self._guard, WRITE_TIMEOUT_MS)
        if self._guard.is_damaged():
            self._stop_writes(Corrupt(f"{self._path} was found damaged before: {CHECK}"))

    def _thaw(self) -> None:
        """Open a store for writing that could only be read. Raises why it still cannot."""
        with self._opening:
            frozen, now = self._frozen, time.monotonic()
            if frozen is None:
                return
            self._check_open()
            if now < self._open_again:
                raise copy.copy(frozen.reason)
            self._open_again = now + REOPEN_INTERVAL
            try:
                self._open()
            except Unavailable as error:
                frozen.reason = error
                raise
            self._local = threading.local()  # connections that would not notice a change
            self._frozen = None

    def _reader(self) -> apsw.Connection:
        frozen = self._frozen
        return self._file.reader() if frozen is None else frozen.reader()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _connection(self) -> apsw.Connection:
        if self._frozen is not None and not self._frozen.is_unchanged():
            self._thaw()
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._reader()
            with self._connecting:
                self._connections.add(connection)  # weakly: it ends with its thread
        return connection

    def _scan(
        self, answers: Callable[[apsw.Connection, *Ts], Iterator[T]], *args: *Ts
    ) -> Iterator[T]:
        """Read all in one transaction over a connection of its own, which it closes."""
        self._check_open()
        try:
            with closing(self._reader()) as connection, read_transaction(connection):
                yield from answers(connection, *args)
        except (apsw.Error, OSError) as error:
            raise self._explain(error)[0] from error

    def _explain(self, error: Exception) -> tuple[HeedError, bool]:
        """Translate an error of SQLite; once it has found damage, no process writes any more."""
        reason, is_fatal = explain(self._path, error)
        if isinstance(reason, Corrupt) and not self._damaged and self._frozen is None:
            self._stop_writes(reason)
            if not isinstance(error, HeedError):
                with suppress(OSError):  # the disk that is failing holds the mark too
                    self._guard.record_damage()
        return reason, is_fatal

    def _stop_writes(self, reason: HeedError) -> None:
        self._damaged = True
        self._writer.fail(reason)

    def _shut(self) -> None:
        self._pool.shutdown()
        with self._connecting:
            for connection in self._connections:
                connection.close()
        if self._frozen is None:
            self._writer.close()  # last, since it checkpoints the log into the database
            self._guard.close()


def _run_reading(connection: apsw.Connection, job: Job[T]) -> T:
    with read_transaction(connection):
        return run_job(connection, job)
