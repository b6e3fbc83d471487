"""Writer thread of a store: group commit over SQLite, with acknowledgements after the commit.

Jobs that wait while a commit is being synced share the next one, so that a disk that syncs a
thousand times a second can acknowledge tens of thousands of batches. Each job runs in a savepoint
of its own: only one that fails is rolled back, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import apsw

from service.domain.errors import HeedError, Overloaded, Unavailable
from service.stores.sqlite.guard import StoreGuard
from service.stores.sqlite.transaction import Names, SQLiteTransaction

T = TypeVar("T")

MAX_GROUP_ROWS = 5_000  # rows in one transaction (~0.1 s), unless a single job has more
MAX_QUEUED_ROWS = 200_000  # rows accepted and not yet committed
SCRUB_WAIT_MS = 20  # for readers of the log, before it is emptied; writes wait meanwhile
SCRUB_RETRY = 0.5  # seconds between two attempts to empty the log
SCRUB_POLL = 10.0  # seconds between two looks at what a process that ended has left in the log
NICENESS = 5  # more than the process's: where a core is short, answers come before bulk writes
CHECKPOINT_PAGES = 8_000  # 32 MB of log: a page written often is copied once, recovery is short

_FAULTS_OF_A_STATEMENT = (
    apsw.BindingsError,
    apsw.ConstraintError,
    apsw.MismatchError,
    apsw.RangeError,
    apsw.SQLError,
    apsw.TooBigError,
)


@dataclass(slots=True)
class _Ticket(Generic[T]):
    job: Callable[[SQLiteTransaction], T]
    rows: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[T]
    result: T | None = None
    error: BaseException | None = None
    hooks: list[Callable[[], None]] = field(default_factory=list)


class Writer:
    """Runs jobs on its own thread, over the connection it is given and closes in the end.

    Args:
        connection: to write with.
        explain: turns an error of SQLite into one of the domain, and says whether it is fatal:
            after a fatal one nothing is written or acknowledged any more until the store is opened
            again.
        guard: called before each commit, and before it is acknowledged. An error that it raises
            fails the commit's jobs.
        busy_timeout: of the connection, in milliseconds.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        explain: Callable[[Exception], tuple[HeedError, bool]],
        guard: StoreGuard,
        busy_timeout: int,
    ) -> None:
        self._connection = connection
        self._explain = explain
        self._guard = guard
        self._busy_timeout = busy_timeout
        self._items, self._types = Names("items"), Names("types")
        self._queue: SimpleQueue[_Ticket[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the four below, and that nothing follows the None
        self._waiting = 0
        self._closed = False
        self.failure: HeedError | None = None  # after which no write is possible
        self.log_pages = 0
        self.commits = 0
        self.checkpoints = 0
        self._checkpoint_at = CHECKPOINT_PAGES
        self._scrub_delay = 0.0  # seconds from a commit until the log is emptied
        self._scrub_at = 0.0  # when the log is looked at, or emptied, next (monotonic)
        # A hook of our own takes the place of SQLite's, which checkpoints before COMMIT returns
        # and so before any job is acknowledged.
        connection.set_wal_hook(self._measure_log)
        self._thread = threading.Thread(target=self._run, name="heed-store-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[SQLiteTransaction], T], rows: int = 1) -> asyncio.Future[T]:
        """Queue `job`, which touches about `rows` rows; the future is done once it is durable.

        Call it from a coroutine. Raises `Overloaded` if too much is waiting, `Unavailable` after
        `close` and after a fatal failure. The future fails with what the job raised, or with what
        kept the transaction from being durable. A job whose future is cancelled while it waits is
        not run.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.failure is not None:
                # A raised error keeps its frames, so each caller gets a copy.
                raise copy.copy(self.failure)
            if self._closed:
                raise Unavailable("the store is closed")
            if self._waiting and self._waiting + rows > MAX_QUEUED_ROWS:
                raise Overloaded(f"{self._waiting} rows are waiting to be written already")
            self._waiting += rows
            future: asyncio.Future[T] = loop.create_future()
            self._queue.put(_Ticket(job, rows, loop, future))
        return future

    def close(self) -> None:
        """Finish the accepted jobs and close the connection. Blocks; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Rows that are accepted and not yet taken into a transaction."""
        return self._waiting

    # -------------------------------------------------------------- on the writer thread

    def _run(self) -> None:
        _lower_priority()
        group: list[_Ticket[Any]] | None = []
        try:
            while (group := self._gather()) is not None:
                self._commit(group)
                self._settle(group)
                if self.log_pages >= self._checkpoint_at:
                    self._checkpoint()
                if time.monotonic() >= self._scrub_at:
                    self._scrub()
        except BaseException as error:
            # If the writer dies, waiting requests get an error, and `failure` reports it.
            reason = Unavailable(f"the store's writer stopped: {type(error).__name__}")
            for ticket in group or ():
                ticket.error = ticket.error or reason
            self._settle(group or [])
            self.fail(reason)
            raise
        finally:
            self._connection.close()  # of several connections, the last one to close checkpoints

    def _gather(self) -> list[_Ticket[Any]] | None:
        """Wait for a ticket, and take those queued behind it; None when closed.

        Without any until the log is to be looked at, the list is empty.
        """
        group: list[_Ticket[Any]] = []
        rows = 0
        try:
            ticket = self._queue.get(timeout=max(0, self._scrub_at - time.monotonic()))
        except Empty:
            return group
        while ticket is not None:
            group.append(ticket)
            rows += ticket.rows
            if rows >= MAX_GROUP_ROWS:
                break
            try:
                ticket = self._queue.get_nowait()
            except Empty:
                break
        else:
            self._queue.put(None)  # for the next round: finish this group first
            if not group:
                return None
        with self._lock:
            self._waiting -= rows
        return group

    def _commit(self, group: list[_Ticket[Any]]) -> None:
        """Run the group in one transaction. Afterwards each ticket has a result or an error.

        The events become durable here: COMMIT returns once the log is synced, since
        `DatabaseFile.writer` opens the connection with `synchronous = FULL`.
        """
        execute = self._connection.execute
        if not group:
            return
        if self.failure is not None:
            for ticket in group:
                ticket.error = copy.copy(self.failure)
            return
        try:
            self._guard.prepare(self._connection)
            execute("BEGIN IMMEDIATE")
            transaction = SQLiteTransaction(self._connection, self._items, self._types)
            for ticket in group:
                if not ticket.future.cancelled():
                    self._run_job(transaction, ticket)
            tick = transaction.finish()
            execute("COMMIT")
            self._guard.confirm(self._connection, tick, self.log_pages)
            self.commits += 1
        except Exception as error:  # noqa: BLE001  # after any error no job is acknowledged
            reason, fatal = self._explain(error)
            for ticket in group:
                ticket.error = copy.copy(reason)
                ticket.error.__cause__ = error
            self._roll_back()
            if fatal:
                self.fail(reason)
        else:
            if transaction.scrubs:
                self._scrub_at = min(self._scrub_at, time.monotonic() + self._scrub_delay)
            for ticket in group:
                if ticket.error is None:
                    for hook in ticket.hooks:
                        hook()

    def _run_job(self, transaction: SQLiteTransaction, ticket: _Ticket[Any]) -> None:
        execute = self._connection.execute
        transaction.hooks = ticket.hooks
        execute("SAVEPOINT job")
        try:
            ticket.result = ticket.job(transaction)
        except _FAULTS_OF_A_STATEMENT as error:
            ticket.error = error
        except apsw.Error:
            raise  # an error of the engine fails the whole group
        except Exception as error:  # noqa: BLE001  # delivered to the caller of this job
            ticket.error = error
        if ticket.error is not None:
            execute("ROLLBACK TO job")
        execute("RELEASE job")

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:  # SQLite rolls back after some errors
                self._connection.execute("ROLLBACK")
        except apsw.Error as error:
            self.fail(self._explain(error)[0])

    def _settle(self, group: list[_Ticket[Any]]) -> None:
        """Resolve futures, with one callback for each event loop instead of each future."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Ticket[Any]]] = {}
        for ticket in group:
            by_loop.setdefault(ticket.loop, []).append(ticket)
        for loop, tickets in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, tickets)
            except RuntimeError:  # the loop is closed, and with it its waiters
                continue

    def fail(self, reason: HeedError) -> None:
        """Refuse further jobs, and fail those that are already queued. Call it on any thread."""
        with self._lock:
            self.failure = self.failure or reason
        stranded: list[_Ticket[Any]] = []
        while True:
            try:
                ticket = self._queue.get_nowait()
            except Empty:
                break
            if ticket is None:
                self._queue.put(None)
                break
            ticket.error = copy.copy(reason)
            stranded.append(ticket)
        self._settle(stranded)

    # -------------------------------------------------------------- checkpoints

    def _measure_log(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        self.log_pages = pages
        return apsw.SQLITE_OK

    def _checkpoint(self) -> None:
        """Copy the log into the database. A failure loses nothing: the log is durable."""
        try:
            self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._checkpoint_at = CHECKPOINT_PAGES
            self.checkpoints += 1
        except apsw.BusyError:
            pass  # another process is checkpointing
        except apsw.Error as error:
            reason, fatal = self._explain(error)
            if fatal:
                self.fail(reason)
            self._checkpoint_at = 2 * self.log_pages  # retry later: on a full disk it fails again
        self.log_pages = 0

    def _scrub(self) -> None:
        """Empty the log if personal data was deleted since that was done last, by any process.

        A reader of an earlier state keeps it from being emptied: it is tried again then.
        """
        wait, self._scrub_delay = SCRUB_POLL, 0.0
        execute = self._connection.execute
        try:
            tick = 0 if self.failure else execute("SELECT scrub FROM state").get
            if tick:
                self._connection.set_busy_timeout(SCRUB_WAIT_MS)
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
                execute("UPDATE state SET scrub = 0 WHERE scrub = ?", (tick,))
        except apsw.BusyError:
            wait = self._scrub_delay = SCRUB_RETRY
        except apsw.Error as error:
            reason, fatal = self._explain(error)
            if fatal:
                self.fail(reason)
        finally:
            self._connection.set_busy_timeout(self._busy_timeout)
        self._scrub_at = time.monotonic() + wait


def _lower_priority() -> None:
    """Raise the niceness of only the calling thread, on Linux, where each thread has its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(OSError):  # where a sandbox forbids it, writes go on as they are
            os.setpriority(os.PRIO_PROCESS, thread, min(19, own + NICENESS))


def _deliver(tickets: list[_Ticket[Any]]) -> None:
    """Resolve the futures that are still pending; runs on the event loop."""
    for ticket in tickets:
        if ticket.future.done():
            continue
        if ticket.error is not None:
            ticket.future.set_exception(ticket.error)
        else:
            ticket.future.set_result(ticket.result)
