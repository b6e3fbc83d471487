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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakSet

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.errors import (
    Corrupt,
    HeedError,
    StoreFull,
    StoreReadOnly,
    Unavailable,
)
from service.domain.records import (
    Event,
    check_id,
)
from service.stores.base import Store
from service.stores.encoding import check_limit
from service.stores.jobs import Job, Transaction, translate
from service.stores.quota import StoreQuota
from service.stores.records import copying
from service.stores.sqlite.database_file import (
    WRITE_TIMEOUT_MS,
    DatabaseFile,
    FrozenFile,
    checksum_vfs,
    explain,
    file_sizes,
)
from service.stores.sqlite.events import (
    Appending,
    Reads,
    log_changes,
    read_transaction,
    scan,
    usage,
)
from service.stores.sqlite.guard import CHECK, StoreGuard
from service.stores.sqlite.transaction import SQLiteTransaction, check_schema, run_job
from service.stores.sqlite.writer import Writer
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
        self._appending = Appending()
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
        origin = None if is_target else self._look(_run_reading, copying.unfinished())
        if origin is not None:
            self._shut()
            raise copy_unfinished(str(self._path), origin)

    # ------------------------------------------------------------------ histories

    async def version(self, user_id: str) -> int:
        return self._look(self._reads.version, check_id(user_id, "/user_id"))

    async def history(self, user_id: str) -> History:
        rows = self._look(self._reads.length, check_id(user_id, "/user_id"))
        return await self._look_rows(rows, self._reads.history, user_id)

    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        if await self.version(user_id) == version:
            return None
        rows = self._look(self._reads.length, user_id)
        return await self._look_rows(rows, self._reads.history, user_id, generation, seq)

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        check_id(user_id, "/user_id")
        return await self._look_rows(len(seqs), self._reads.event_ids, user_id, seqs, timestamps)

    def _append(
        self, events: Sequence[Event], now: int, import_no: int | None
    ) -> asyncio.Future[AppendResult]:
        append = self._appending.append
        return self._submit(
            lambda each: append(each, events, now, import_no), len(events), adds=True
        )

    # ------------------------------------------------------------------ the store itself

    def announced_catalogue(self) -> int:
        return self._look(self._reads.catalogue_version)

    def announced_keys(self) -> int:
        return self._look(self._reads.keys_version)

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
            return StoreMeasures(
                database_bytes=database,
                log_bytes=log,
                log_pages=0,
                queued_rows=0,
                commits=0,
                checkpoints=0,
                failures=0,
                failed=True,
            )
        writer = self._writer
        return StoreMeasures(
            database_bytes=database,
            log_bytes=log,
            log_pages=writer.log_pages,
            queued_rows=writer.waiting,
            commits=writer.commits,
            checkpoints=writer.checkpoints,
            failures=self._file.failures,
            failed=writer.failure is not None or self._damaged,
        )

    @property
    def shared(self) -> None:
        return None

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._shut)

    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        return self._scan(scan, check_limit(rows), shard)

    # ------------------------------------------------------------------ inside

    _horizon = "SELECT clock FROM state"

    async def _ask(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:
        return await self._look_rows(rows, _run_reading, job(*args))

    async def _read(self, job: Callable[[*Ts], Job[T]], *args: *Ts, rows: int = 1) -> T:
        return await self._look_rows(rows, _run_reading, job(*args))

    async def _read_apart(self, job: Callable[[*Ts], Job[T]], *args: *Ts) -> T:
        return await self._look_off_loop(_run_reading, job(*args))

    def _scan_rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        return self._scan(_rows, sql)

    def _write(
        self,
        job: Callable[[Transaction, *Ts], Job[T]],
        *args: *Ts,
        rows: int = 1,
        alone: tuple[int, ...] = (),  # noqa: ARG002 - one thread writes
        items: Iterable[str] = (),  # noqa: ARG002 - numbered in the transaction
        types: Iterable[str] = (),  # noqa: ARG002
        adds: bool = False,
        is_long: bool = False,  # noqa: ARG002
    ) -> asyncio.Future[T]:
        return self._submit(lambda each: each.run(job(each, *args)), rows, adds=adds)

    def _submit(
        self, job: Callable[[SQLiteTransaction], T], rows: int, *, adds: bool
    ) -> asyncio.Future[T]:
        if self._frozen is not None:
            self._thaw()
        quota = self._quota
        if quota is None or not adds:
            return self._writer.submit(job, rows)

        def bounded(transaction: SQLiteTransaction) -> T:
            before = usage(transaction.connection)
            result = job(transaction)
            quota.check(before, usage(transaction.connection))  # which rolls the job back
            return result

        return self._writer.submit(bounded, rows)

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


def _rows(connection: apsw.Connection, sql: str) -> Iterator[tuple[Any, ...]]:
    return connection.execute(translate(sql, "sqlite"))
