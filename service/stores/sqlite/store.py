"""The embedded store: one SQLite file, durable when acknowledged, open to several processes.

Short reads run where they are called, on the event loop too: a version takes microseconds, a
history of hundreds of events a fraction of a millisecond. Long ones move to threads of their own.
Changes go to the writer's thread. Nothing is cached that another process could invalidate.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakSet

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Corrupt, HeedError, Invalid, Unavailable
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
from service.domain.scenarios import Scenario
from service.stores.base import (
    AppendResult,
    CatalogueChanges,
    History,
    ImportRecord,
    LogChanges,
    LogColumns,
    OnCatalogueChange,
    PatchResult,
    Store,
    UndoneImport,
)
from service.stores.encoding import check_limit, user_document
from service.stores.sqlite import import_ledger, scenarios
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.items import ItemWrites
from service.stores.sqlite.log_changes import log_changes
from service.stores.sqlite.reads import Reads, read_transaction
from service.stores.sqlite.scan import scan, scan_events, scan_items, scan_user_ids, scan_users
from service.stores.sqlite.writer import Transaction, Writer
from service.stores.sqlite.writes import Names, Writes

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNDONE_ROWS = 20_000  # events of an import that are taken back in one transaction
MAX_INLINE_ROWS = 2_000  # rows that may be read on the event loop, ~1 ms
ALL_ROWS = 1 << 62  # more than any log has
READER_THREADS = 2  # threads for longer reads


class SQLiteStore(Store):
    """Store in the file `path`.

    The file and its directory are created if they are not there. `vfs` names another SQLite
    VFS to go through; tests inject faults with it.

    Raises `Incompatible`, `Corrupt` or `Unavailable` if the file is not, or no longer, a store.
    """

    def __init__(self, path: Path | str, *, vfs: str | None = None) -> None:
        self._file = DatabaseFile(Path(path), vfs)
        self._reads = Reads()
        items = Names("items")
        self._writes, self._item_writes = Writes(items), ItemWrites(items)
        self._writer = Writer(self._file.writer(), self._file.explain)
        self._pool = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="heed-store-reader")
        self._local = threading.local()
        self._connections: WeakSet[apsw.Connection] = WeakSet()
        self._connecting = threading.Lock()
        self._closed = False
        self._damaged = False

    # ------------------------------------------------------------------ histories

    async def append(
        self, events: Sequence[Event], *, import_id: int | None = None
    ) -> AppendResult:
        check_each(events, check_event, "/events")
        if not events:
            return AppendResult(0, 0)
        now = time.time_ns() // 1000
        return await self._write(self._writes.append, events, now, import_id, rows=len(events))

    async def version(self, user_id: str) -> int:
        return self._read(self._reads.version, check_id(user_id, "/user_id"))

    async def history(self, user_id: str, *, after: int = 0) -> History:
        rows = self._read(self._reads.length, check_id(user_id, "/user_id"))
        return await self._read_rows(rows, self._reads.history, user_id, after)

    async def page(
        self, user_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Event], str | None]:
        check_id(user_id, "/user_id")
        return await self._read_rows(check_limit(limit), self._reads.page, user_id, cursor, limit)

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        check_id(user_id, "/user_id")
        return await self._read_rows(len(seqs), self._reads.event_ids, user_id, seqs, timestamps)

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        check_id(user_id, "/user_id")
        check_id(event_id, "/event_id")
        return await self._write(self._writes.delete_event, user_id, event_id)

    async def forget(self, user_id: str) -> int:
        check_id(user_id, "/user_id")
        return await self._write(self._writes.forget, user_id)

    async def merge(self, user_id: str, source: str) -> int:
        check_id(user_id, "/user_id")
        if check_id(source, "/from") == user_id:
            raise Invalid("/from", "must be another user")
        return await self._write(self._writes.merge, user_id, source)

    async def put_user(self, user: User, *, import_id: int | None = None) -> None:
        check_user(user)
        profile = user_document(user)
        return await self._write(self._writes.put_user, user.user_id, profile, import_id)

    async def get_user(self, user_id: str) -> User | None:
        return self._read(self._reads.user, check_id(user_id, "/user_id"))

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
        return await self._write(job, items, on_change, import_id, rows=len(items))

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
        return await self._write(job, patches, create, on_change, import_id, rows=len(patches))

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        for index, item_id in enumerate(item_ids):
            check_id(item_id, f"/item_ids/{index}")
        if not item_ids:
            return []
        return await self._read_rows(10 * len(item_ids), self._reads.items, item_ids)

    async def delete_item(
        self, item_id: str, *, on_change: OnCatalogueChange | None = None
    ) -> bool:
        check_id(item_id, "/item_id")
        return await self._write(self._item_writes.delete_item, item_id, on_change)

    async def page_items(
        self, *, cursor: str | None = None, limit: int = 100, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        # Hidden items are found by looking at all.
        rows = 10 * check_limit(limit) + hidden * MAX_INLINE_ROWS
        return await self._read_rows(rows, self._reads.page_items, cursor, limit, hidden)

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[User], str | None]:
        return await self._read_rows(10 * check_limit(limit), self._reads.page_users, cursor, limit)

    async def catalogue_version(self) -> int:
        return self._read(self._reads.catalogue_version)

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        return await self._read_rows(
            MAX_INLINE_ROWS + 1, self._reads.catalogue_changes, after, limit
        )

    # ------------------------------------------------------------------ scenarios

    async def put_scenario(self, name: str, body: Mapping[str, Any]) -> Scenario:
        now = time.time_ns() // 1000
        return await self._write(scenarios.put, check_id(name, "/name"), body, now)

    async def scenario(self, name: str) -> Scenario | None:
        return self._read(scenarios.current, check_id(name, "/name"))

    async def page_scenarios(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Scenario], str | None]:
        return await self._read_rows(10 * check_limit(limit), scenarios.page, cursor, limit)

    async def page_scenario_versions(
        self, name: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Scenario], str | None]:
        check_id(name, "/name")
        return await self._read_rows(
            10 * check_limit(limit), scenarios.versions, name, cursor, limit
        )

    async def delete_scenario(self, name: str) -> bool:
        now = time.time_ns() // 1000
        return await self._write(scenarios.delete, check_id(name, "/name"), now)

    # ------------------------------------------------------------------ imports and their undoing

    async def begin_import(self, source: str) -> int:
        now = time.time_ns() // 1000
        return await self._write(import_ledger.begin, source, now)

    async def imports(self) -> list[ImportRecord]:
        return self._read(import_ledger.records)

    async def undo_import(
        self, import_id: int, *, progress: Callable[[int], None] | None = None
    ) -> UndoneImport:
        after: import_ledger.Position | None
        events, shared, after = 0, 0, await self._write(import_ledger.begin_undo, import_id)
        while after is not None:
            deleted, handed, after = await self._write(
                import_ledger.undo_events, import_id, after, UNDONE_ROWS, rows=UNDONE_ROWS
            )
            events, shared = events + deleted, shared + handed
            if progress is not None:
                progress(events)
        items, users, kept = await self._write(import_ledger.undo_documents, import_id)
        return UndoneImport(events, items, users, kept, shared)

    # ------------------------------------------------------------------ the store itself

    async def clock(self) -> int:
        return self._read(self._reads.clock)

    async def counts(self) -> dict[str, int]:
        return self._read(self._reads.counts)

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        return await self._read_rows(MAX_INLINE_ROWS + 1, self._reads.popularity)

    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        most = ALL_ROWS if limit is None else check_limit(limit)
        return await self._read_rows(MAX_INLINE_ROWS + 1, log_changes, after, known, most)

    async def user_ids(self, numbers: Sequence[int]) -> list[str | None]:
        if not numbers:
            return []
        return await self._read_rows(len(numbers), self._reads.user_ids, numbers)

    async def healthy(self) -> bool:
        if self._closed or self._damaged or self._writer.failure is not None:
            return False
        try:
            self._read(self._reads.catalogue_version)
        except HeedError:
            return False
        return True

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._shut)

    def scan(self, rows: int = 100_000) -> Iterator[LogColumns]:
        return self._scan(scan, check_limit(rows))

    def scan_events(self) -> Iterator[Event]:
        return self._scan(scan_events, self._reads)

    def scan_items(self) -> Iterator[Item]:
        return self._scan(scan_items)

    def scan_users(self) -> Iterator[User]:
        return self._scan(scan_users)

    def scan_user_ids(self) -> Iterator[str]:
        return self._scan(scan_user_ids)

    # ------------------------------------------------------------------ inside

    def _write(
        self, job: Callable[[Transaction, *Ts], T], *args: *Ts, rows: int = 1
    ) -> asyncio.Future[T]:
        return self._writer.submit(lambda transaction: job(transaction, *args), rows)

    def _read(self, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts) -> T:
        """Read on this thread, over its own connection."""
        self._check_open()
        try:
            return question(self._connection(), *args)
        except (apsw.Error, OSError) as error:
            raise self._explain(error) from error

    async def _read_rows(
        self, rows: int, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts
    ) -> T:
        """Read on this thread if about `rows` rows are short enough, else off the event loop."""
        if rows <= MAX_INLINE_ROWS:
            return self._read(question, *args)
        self._check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, question, *args)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the store is closed")

    def _connection(self) -> apsw.Connection:
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._file.reader()
            with self._connecting:
                self._connections.add(connection)  # weakly: it ends with its thread
        return connection

    def _scan(
        self, answers: Callable[[apsw.Connection, *Ts], Iterator[T]], *args: *Ts
    ) -> Iterator[T]:
        """Read all in one transaction over a connection of its own, which it closes."""
        self._check_open()
        try:
            with closing(self._file.reader()) as connection, read_transaction(connection):
                yield from answers(connection, *args)
        except (apsw.Error, OSError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> HeedError:
        reason, _ = self._file.explain(error)
        self._damaged = self._damaged or isinstance(reason, Corrupt)
        return reason

    def _shut(self) -> None:
        self._pool.shutdown()
        with self._connecting:
            for connection in self._connections:
                connection.close()
        self._writer.close()  # last, since it checkpoints the log into the database
