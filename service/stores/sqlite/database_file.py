"""The file of a SQLite store: opened and checked, read while it cannot be written, or as it is.

Every page carries a checksum (SQLite's own cksumvfs), verified whenever the page is read, so that a
flipped bit is an error and not an answer. Any SQLite can read such a file; one without cksumvfs
must not write it. A process that has the store open must not open its files in any other way, not
even to read: by POSIX, closing a file drops all locks that the process holds on it.

SQLite needs room for the index of its log even to read. While the log is empty and nobody writes,
the database can be read without: `immutable` says so.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import apsw
import apsw.sqlite_extra

from service.domain.errors import (
    Corrupt,
    HeedError,
    Incompatible,
    NotFound,
    StoreFull,
    StoreReadOnly,
    Unavailable,
)
from service.runtime.data_layout import MODELS_FOLDER, denied, is_denied
from service.runtime.durable_files import PRIVATE_FILE, make_directory
from service.stores.sqlite.copies import keep_copy, kept_path
from service.stores.sqlite.guard import CHECK, StoreGuard, check_mark, mark_path, read_mark
from service.stores.sqlite.schema import SCHEMA, SCHEMA_VERSION, migrate
from service.stores.sqlite.wal import check_wal, scrubbing_vfs

_log = logging.getLogger(__name__)

APPLICATION_ID = int.from_bytes(b"Heed", "big")  # by which `file` and other programs recognise it
CHECKSUM_BYTES = 8  # at the end of each page; cksumvfs recognises its files by this size
MIN_FREE_BYTES = 1 << 20  # below which a failed write is attributed to a full disk
WRITE_TIMEOUT_MS = 5_000  # for another process's transaction
_WRITER_POLL = 0.001  # seconds between two looks whether it has ended
READ_TIMEOUT_MS = 250  # readers wait only for a recovery, and may run on an event loop

# Before 3.51.3, a checkpoint racing a reset of the log could lose committed transactions.
OLDEST_SQLITE = (3, 51, 3)


class DatabaseFile:
    """One SQLite file with Heed's schema: created if missing, checked if present.

    Raises `Incompatible` if it belongs to another program or a newer Heed, `Corrupt` if it fails
    its checks, or lacks changes that were acknowledged, `Unavailable` if it cannot be opened, all
    naming the file. With `accept_loss`, a store that lacks changes is taken as it is.
    """

    def __init__(self, path: Path, vfs: str | None = None, *, accept_loss: bool = False) -> None:
        self.path = path.absolute()
        self._vfs = vfs or checksum_vfs()
        self._writing_vfs = scrubbing_vfs(self._vfs)  # of all connections that checkpoint
        self._accept_loss = accept_loss
        self.failures = 0  # errors that were explained
        try:
            make_directory(self.path.parent)
            self._prepare()
        except (apsw.Error, OSError) as error:
            raise self.explain(error)[0] from error

    # ------------------------------------------------------------------ connections

    def reader(self) -> apsw.Connection:
        """Open a read-only connection, for use by any thread, one at a time."""
        connection = self._connect(READ_TIMEOUT_MS, self._vfs)
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.pragma("query_only", True)
        connection.pragma("cache_size", -8_000)  # KiB
        return connection

    def writer(self) -> apsw.Connection:
        """Open a connection whose commits are durable when they return."""
        connection = self._connect(WRITE_TIMEOUT_MS, self._writing_vfs)
        connection.set_busy_handler(_writer_wait())
        connection.pragma("synchronous", "FULL")
        connection.pragma("cache_size", -64_000)  # KiB; writes to the index of event ids are random
        connection.pragma("journal_size_limit", 64 << 20)
        # Deleted rows are overwritten, in pages that become free too. Appending frees none.
        connection.pragma("secure_delete", True)
        return connection

    def guard(self) -> StoreGuard:
        """Return the guard of the file; call it while a connection is open."""
        try:
            return StoreGuard(self.path)
        except OSError as error:
            raise self.explain(error)[0] from error

    def _connect(self, wait: int, vfs: str) -> apsw.Connection:
        connection = apsw.Connection(str(self.path), vfs=vfs, statementcachesize=64)
        connection.set_busy_timeout(wait)
        connection.pragma("wal_autocheckpoint", 0)  # the writer checkpoints, after acknowledging
        connection.pragma("temp_store", "MEMORY")
        # Never map the file: a truncated one would be a SIGBUS instead of an error.
        connection.pragma("mmap_size", 0)
        return connection

    # ------------------------------------------------------------------ opening

    def _prepare(self) -> None:
        log = Path(f"{self.path}-wal")
        logged = log.exists() and log.stat().st_size > 0
        if not (self.path.exists() and self.path.stat().st_size):
            self._refuse_loss(log if logged else None)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE))
        connection = self._connect(WRITE_TIMEOUT_MS, self._writing_vfs)
        try:
            # A store that is refused stays as it is, its log too.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if logged:
                connection.execute("BEGIN IMMEDIATE")
                check_wal(log)
                connection.execute("ROLLBACK")
            if _is_new(connection):
                if self.path.stat().st_size and not connection.pragma("page_count"):
                    raise Corrupt(f"{self.path} is damaged: less than a page is left of it")
                self._create(connection)
            self._check_identity(connection)
            self._check_clock(connection)
            self._check_length(connection)
        finally:
            connection.close()

    def _refuse_loss(self, log: Path | None) -> None:
        """Raise `Corrupt` if the file is missing or empty where there was a store before."""
        if log is not None:  # SQLite would delete the log
            raise Corrupt(f"{self.path} is missing or empty, but its log {log} is not")
        if self._accept_loss:
            mark_path(self.path).unlink(missing_ok=True)
            return
        mark = read_mark(self.path)
        remains = None
        if mark is not None and mark.tick:
            remains = f"{mark.tick} changes were acknowledged in it"
        elif (models := self.path.parent / MODELS_FOLDER / "current").exists():
            remains = f"{models} names a model that was trained on it"
        if remains is not None:
            raise Corrupt(
                f"{self.path} is missing or empty, but {remains}: put the store or a backup of it "
                "back, or begin an empty one with `heed check --accept-loss`"
            )

    def _check_clock(self, connection: apsw.Connection) -> None:
        """Raise `Corrupt` if the store lacks changes that were acknowledged."""
        tick: int = connection.execute("SELECT clock FROM state").get
        mark = mark_path(self.path)
        if not tick and mark.exists() and not mark.stat().st_size:
            mark.unlink()  # earlier versions left it empty until the first change
        try:
            check_mark(self.path, tick)
        except Corrupt:
            if not self._accept_loss:
                raise
            mark.unlink()

    def _create(self, connection: apsw.Connection) -> None:
        # Before the first page is written: the space for checksums cannot be made later.
        connection.reserve_bytes("main", CHECKSUM_BYTES)
        connection.pragma("journal_mode", "WAL")
        connection.pragma("synchronous", "FULL")
        connection.execute("BEGIN IMMEDIATE")
        if _is_new(connection):  # another process may have been faster
            connection.execute(SCHEMA)
            connection.pragma("application_id", APPLICATION_ID)
            connection.pragma("user_version", SCHEMA_VERSION)
        connection.execute("COMMIT")

    def _check_identity(self, connection: apsw.Connection) -> None:
        if connection.pragma("application_id") != APPLICATION_ID:
            raise Incompatible(f"{self.path} is a database, but not one of Heed's")
        version = connection.pragma("user_version")
        if version < SCHEMA_VERSION:
            self._migrate(connection)
        elif version > SCHEMA_VERSION:
            raise Incompatible(
                f"{self.path} has schema version {version}; this Heed reads up to "
                f"{SCHEMA_VERSION}. Run the version of Heed that wrote it, or a newer one"
            )
        if connection.reserve_bytes("main") != CHECKSUM_BYTES:
            raise Corrupt(f"{self.path} has lost its page checksums: its header is damaged")

    def _migrate(self, connection: apsw.Connection) -> None:
        """Migrate the store, and keep a copy of it as it was."""

        def keep(version: int) -> None:
            with closing(self._connect(READ_TIMEOUT_MS, self._vfs)) as reader:
                keep_copy(reader, self.path, version, self._vfs)

        earlier = migrate(connection, keep)
        if earlier < SCHEMA_VERSION:
            _log.warning(
                "%s was migrated from schema version %d to %d. The store as it was is kept in %s "
                "until the service has been started and stopped",
                self.path,
                earlier,
                SCHEMA_VERSION,
                kept_path(self.path, earlier),
            )

    def _check_length(self, connection: apsw.Connection) -> None:
        """Raise `Corrupt` if the end of the file is missing."""
        # A truncated page reads as zeros, which have a valid checksum. But once the whole log has
        # been copied, the file must contain every page that it had before.
        pages, size = connection.pragma("page_count"), connection.pragma("page_size")
        try:
            frames, copied = connection.wal_checkpoint()
        except apsw.BusyError:
            return  # another process is checkpointing, and made this check
        if frames == copied and self.path.stat().st_size < pages * size:
            raise Corrupt(
                f"{self.path} is damaged: it should have {pages} pages of {size} bytes; {CHECK}"
            )

    # ------------------------------------------------------------------ errors

    def explain(self, error: Exception) -> tuple[HeedError, bool]:
        """Translate an error of SQLite; also report whether further writes are unsafe."""
        self.failures += not isinstance(error, HeedError)
        return explain(self.path, error)


def explain(path: Path, error: Exception) -> tuple[HeedError, bool]:
    """Translate an error of a database; also report whether further writes are unsafe."""
    if isinstance(error, HeedError):
        return error, isinstance(error, Corrupt)
    extended = getattr(error, "extendedresult", 0)
    if (
        isinstance(error, (apsw.CorruptError, apsw.NotADBError))
        or extended == apsw.SQLITE_IOERR_DATA
    ):
        return Corrupt(f"{path} is damaged: {error}; {CHECK}"), True
    if isinstance(error, apsw.FullError) or (
        isinstance(error, (apsw.IOError, OSError)) and _disk_is_full(path)
    ):
        return StoreFull(f"the disk that holds {path} is full", 5.0), False
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return Unavailable(f"another process keeps {path} locked"), False
    if (
        isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError, OSError))
        and path.parent.is_dir()
        and not os.access(path.parent, os.W_OK, effective_ids=True)
    ):
        is_disk = os.statvfs(path.parent).f_flag & os.ST_RDONLY
        reason = f"the disk that holds {path} can only be read" if is_disk else denied(path)
        return StoreReadOnly(reason, 30.0), True
    if isinstance(error, (apsw.CantOpenError, apsw.ReadOnlyError)) and is_denied(path):
        return Unavailable(denied(path), 30.0), True
    if isinstance(error, (apsw.Error, OSError)):
        # After a failed write or sync the content of the disk is unknown (the kernel may drop
        # the pages and report success next time): further writes could acknowledge a loss.
        return Unavailable(f"{path} failed: {type(error).__name__}: {error}", 30.0), True
    return Unavailable(f"the store failed: {type(error).__name__}: {error}"), False


def _disk_is_full(path: Path) -> bool:
    # Some calls report a full disk as a failed write (growing the log's index, late
    # allocation), which must not stop the writer for ever.
    try:
        return shutil.disk_usage(path.parent).free < MIN_FREE_BYTES
    except OSError:  # the folder is gone, with its namespace
        return False


def file_sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a database and of its log; 0 for a file that is not there."""
    return _size(path), _size(Path(f"{path}-wal"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _writer_wait() -> Callable[[int], bool]:
    """Return a busy handler that waits for another process's transaction, `WRITE_TIMEOUT_MS` long.

    SQLite's own handler looks only every 100 ms in the end, and hardly ever meets the moment
    between two transactions of an import.
    """
    started = 0.0

    def wait(attempts: int) -> bool:
        nonlocal started
        if attempts == 0:
            started = time.monotonic()
        time.sleep(_WRITER_POLL)
        return 1000 * (time.monotonic() - started) < WRITE_TIMEOUT_MS

    return wait


def _is_new(connection: apsw.Connection) -> bool:
    identity = connection.pragma("application_id") or connection.pragma("user_version")
    return not identity and not connection.execute("SELECT count(*) FROM sqlite_schema").get


@cache
def checksum_vfs() -> str:
    """Register cksumvfs with SQLite, once for each process, and return its name."""
    linked = tuple(map(int, apsw.sqlite_lib_version().split(".")))
    if linked < OLDEST_SQLITE:
        raise Incompatible(
            f"SQLite {apsw.sqlite_lib_version()} can lose commits; install apsw from its wheel"
        )
    connection = apsw.Connection(":memory:")
    try:
        apsw.sqlite_extra.load(connection, "cksumvfs")
    except (apsw.sqlite_extra.NotAvailable, apsw.Error) as error:
        raise Incompatible("apsw lacks cksumvfs; install apsw from its wheel") from error
    finally:
        connection.close()
    return "cksmvfs"  # sic


_Signature = tuple[int, int, int, int]


class FrozenFile:
    """The store in the file `path`, which cannot be opened for writing because of `reason`.

    Raises `reason` if it cannot be read either (it is missing, its log has changes, or its version
    is earlier), and `Corrupt` if it lacks changes.
    """

    def __init__(self, path: Path, vfs: str, reason: Unavailable) -> None:
        self.reason = reason
        self._path, self._vfs = path, vfs
        if not path.is_file() or self._is_logged():
            raise reason
        self._signature = self._sign()
        try:
            connection = self.reader()
            try:
                version = connection.pragma("user_version")
                tick: int = connection.execute("SELECT clock FROM state").get
            finally:
                connection.close()
            check_mark(path, tick)
        except (apsw.Error, OSError) as error:
            raise reason from error
        if version != SCHEMA_VERSION:
            raise reason

    def reader(self) -> apsw.Connection:
        """Open a connection that reads the file without any lock."""
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(
            f"file:{quote(str(self._path))}?immutable=1", flags, vfs=self._vfs
        )
        connection.pragma("mmap_size", 0)
        return connection

    def is_unchanged(self) -> bool:
        """True if no process has written to the store since; a connection would not notice."""
        return not self._is_logged() and self._sign() == self._signature

    def _is_logged(self) -> bool:
        log = Path(f"{self._path}-wal")
        return log.exists() and log.stat().st_size > 0

    def _sign(self) -> _Signature:
        status = self._path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class StoreFile(NamedTuple):
    """A store's file, open for reading."""

    path: Path
    connection: apsw.Connection
    schema: int  # version of its schema, which may be older or newer than this Heed's


@contextmanager
def read_store_file(path: Path, *, immutable: bool = False) -> Iterator[StoreFile]:
    """Open the file of a store for reading, whatever the version of its schema.

    A write-ahead log that a killed process left stays as it is. `immutable` promises that nobody
    writes to the file; then no file is made beside it.

    Raises:
        NotFound: there is no such file.
        Incompatible: it is not the file of a store.
        Corrupt: it is damaged; also where a page that is read in the block fails its checksum.
        Unavailable: it cannot be read now.
    """
    if not path.is_file() or not path.stat().st_size:
        raise NotFound(f"there is no store at {path}")
    log = Path(f"{path}-wal")
    is_logged = log.exists() and log.stat().st_size > 0
    try:
        name, flags = str(path), apsw.SQLITE_OPEN_READWRITE  # WAL needs the file of its index
        if immutable:
            name = f"file:{quote(str(path.absolute()))}?immutable=1"
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with closing(apsw.Connection(name, flags=flags, vfs=checksum_vfs())) as connection:
            connection.set_busy_timeout(READ_TIMEOUT_MS)
            connection.pragma("query_only", True)
            connection.pragma("mmap_size", 0)
            if is_logged:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if connection.pragma("application_id") != APPLICATION_ID:
                raise Incompatible(f"{path} is a database, but not one of Heed's")
            yield StoreFile(path, connection, connection.pragma("user_version"))
    except apsw.Error as error:
        raise _explain_reading(path, error) from error


def _explain_reading(path: Path, error: apsw.Error) -> HeedError:
    damaged = isinstance(error, (apsw.CorruptError, apsw.NotADBError))
    if damaged or getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
        return Corrupt(f"{path} is damaged: {error}")
    if is_denied(path) or is_denied(path.parent):
        return Unavailable(denied(path))
    return Unavailable(f"{path} cannot be read: {type(error).__name__}: {error}")
