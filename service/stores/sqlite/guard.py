"""High-water mark of a store, and the guard that watches its files while they are in use.

SQLite takes a shortened log for a crash, and starts with the transactions that are left. The mark
tells the difference. It is written after a commit is durable and before it is acknowledged, without
a sync of its own: after a power failure it may be too low, and is never too high.

A damaged mark is refused, never taken for the mark of an empty store.

The mark also carries whether any process has found the store damaged, so that all of them stop
acknowledging writes.

A process goes on writing to a file that was deleted or replaced, and finds nothing wrong with it.
Each commit is therefore followed by a comparison of what the path leads to with what is open,
before the commit is acknowledged: some microseconds.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import apsw

from service.domain.errors import Corrupt
from service.runtime import durable_files

_RECORD = struct.Struct("<8sqq8s")  # magic, tick, whether damaged, digest: 32 bytes of one sector
_MAGIC = b"HeedMark"
_ATTEMPTS, _PAUSE = 20, 0.001  # of reading while another process writes; seconds


class MarkState(NamedTuple):
    """Content of a mark: the tick up to which changes were acknowledged, and a found damage."""

    tick: int
    is_damaged: bool


class HighWaterMark:
    """The file `heed.db-mark`, open. Several processes may write to it.

    Opening creates it. Raises `OSError` if that is not possible.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._is_closed = False
        if not mark_path(store).exists():
            _create(store)
        self._file = _open(store, os.O_RDWR)

    def read(self) -> MarkState:
        """Return the content. Raises `Corrupt` if it fails its checksum."""
        return _read(self._file, self._store)

    def advance(self, tick: int) -> MarkState:
        """Record that changes up to `tick` are durable; return the content. Raises as `read`."""
        state = self.read()
        if tick > state.tick:
            state = MarkState(tick, state.is_damaged)
            self.write(state)
        return state

    def write(self, state: MarkState) -> None:
        """Replace the content."""
        os.pwrite(self._file, _encode(state), 0)

    def close(self) -> None:
        """Make the content durable, and close the file. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


def mark_path(store: Path) -> Path:
    """Return the path of the mark of the store in the file `store`."""
    return store.with_name(f"{store.name}-mark")


def read_mark(store: Path) -> MarkState | None:
    """Return the content of the mark of a store; None without a mark.

    Raises:
        Corrupt: it fails its checksum.
    """
    try:
        file = _open(store, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _read(file, store)
    finally:
        os.close(file)


def check_mark(store: Path, tick: int) -> None:
    """Compare the mark of a store, if there is one, with the clock of the store.

    Raises:
        Corrupt: the store lacks changes that were acknowledged, or the mark is damaged.
    """
    mark = read_mark(store)
    if mark is not None and mark.tick > tick:
        raise Corrupt(
            f"{store} lacks {mark.tick - tick} of the {mark.tick} changes that were "
            f"acknowledged: its log {store}-wal was shortened or lost, or an older copy was "
            "put in its place. Put the files or a newer backup back, or serve what is left with "
            "`heed check --accept-loss`"
        )


def _create(store: Path) -> None:
    """Create the mark whole, since an empty one counts as damaged."""
    path = mark_path(store)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        durable_files.write(temporary, _encode(MarkState(0, False)))
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster
        except OSError:  # a file system without links
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    durable_files.sync_directory(path.parent)


def _open(store: Path, flags: int) -> int:
    return os.open(mark_path(store), flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read(file: int, store: Path) -> MarkState:
    for attempt in range(_ATTEMPTS):
        state = _decode(os.pread(file, _RECORD.size + 1, 0))
        if state is not None:
            return state
        time.sleep(_PAUSE if attempt + 1 < _ATTEMPTS else 0)
    raise Corrupt(
        f"{mark_path(store)} is damaged, so that acknowledged changes that {store} lacks would not "
        "be noticed. Put the file or a backup back, or serve what is there with "
        "`heed check --accept-loss`"
    )


def _encode(state: MarkState) -> bytes:
    body = struct.pack("<8sqq", _MAGIC, state.tick, state.is_damaged)
    return body + _digest(body)


def _decode(data: bytes) -> MarkState | None:
    if len(data) != _RECORD.size:
        return None
    magic, tick, is_damaged, digest = _RECORD.unpack(data)
    if magic != _MAGIC or digest != _digest(data[:-8]) or tick < 0 or is_damaged not in {0, 1}:
        return None
    return MarkState(tick, bool(is_damaged))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8, usedforsecurity=False).digest()


CHECK = "run `heed check`"
_LOG_HEADER, _FRAME_HEADER = 32, 24  # bytes of the write-ahead log besides its pages
_LOOKS = 3  # to tell a log that was cut from one that another process has just reset
_BUSY_ATTEMPTS, _BUSY_PAUSE = 200, 0.005  # to read its length while others commit; seconds
_NO_CHECKPOINT = -1  # SQLITE_CHECKPOINT_NOOP: reports the length of the log, and changes nothing


class StoreGuard:
    """Compares the files at a store's path with those that this process has open.

    Construct it once the store is open. Thread-safe, but for `prepare` and `confirm`, which the
    writer calls.

    Raises:
        OSError: the files cannot be examined, or the mark cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._log = path, Path(f"{path}-wal")
        status = path.stat()
        self._identity = _identity(status)
        self._size = status.st_size  # the database never shrinks
        self._log_identity: tuple[int, int] | None = None  # learned after the first commit
        self._frame = 0  # bytes of a page in the log, learned with it
        self._log_pages = 0  # after the last commit of this process
        self._mark = HighWaterMark(path)

    def prepare(self, connection: apsw.Connection) -> None:
        """Check the log before a commit, which would fill a part that was cut off with zeros.

        Raises:
            Corrupt: the log was shortened, or a process has found the store damaged.
        """
        if self.is_damaged():
            raise self._damage()
        if self._log_pages:
            self._check_log(connection, self._log_pages)

    def confirm(self, connection: apsw.Connection, tick: int, log_pages: int) -> None:
        """Confirm a commit, and record its tick. Call it before the commit is acknowledged.

        Args:
            connection: the one that has committed.
            tick: of the change; 0 if nothing that has a version was changed.
            log_pages: length of the write-ahead log after the commit.

        Raises:
            Corrupt: the change is not, or no longer, part of the store at this path, or a process
                has found the store damaged.
        """
        self.check_files()
        self._check_log(connection, log_pages)
        self._log_pages = log_pages
        try:
            state = self._mark.advance(tick)
        except OSError as error:
            raise Corrupt(f"{self._path}-mark cannot be written: {error.strerror}") from error
        if state.is_damaged:
            raise self._damage()

    def check(self) -> None:
        """Raise `Corrupt` if the database is no longer the one in use, or was found damaged."""
        self.check_files()
        if self.is_damaged():
            raise self._damage()

    def check_files(self) -> None:
        """Raise `Corrupt` if the database was deleted, replaced or shortened."""
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise Corrupt(f"{self._path} was deleted while it was in use: {CHECK}") from None
        if _identity(status) != self._identity:
            raise Corrupt(f"{self._path} was replaced while it was in use: {CHECK}")
        if status.st_size < self._size:
            raise Corrupt(f"{self._path} was shortened while it was in use: {CHECK}")
        self._size = status.st_size

    def is_damaged(self) -> bool:
        """Report whether a process found the store damaged. Raises `Corrupt` for a damaged mark."""
        return self._mark.read().is_damaged

    def record_damage(self) -> None:
        """Record that the store is damaged, until `heed check` finds it intact."""
        with suppress(Corrupt):  # the store cannot be opened with a refused mark either
            self._mark.write(MarkState(self._mark.read().tick, True))

    def clear_damage(self) -> None:
        """Record that the store is intact."""
        self._mark.write(MarkState(self._mark.read().tick, False))

    def close(self) -> None:
        """Close the mark."""
        self._mark.close()

    def _damage(self) -> Corrupt:
        return Corrupt(f"{self._path} was found damaged by another process: {CHECK}")

    def _check_log(self, connection: apsw.Connection, pages: int) -> None:
        try:
            log = self._log.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise Corrupt(f"{self._log} was deleted while it was in use: {CHECK}") from None
        if self._log_identity is None:
            self._log_identity = _identity(log)
        if _identity(log) != self._log_identity:
            raise Corrupt(f"{self._log} was replaced while it was in use: {CHECK}")
        if not self._frame:
            self._frame = connection.pragma("page_size") + _FRAME_HEADER
        page = self._frame
        if log.st_size < _LOG_HEADER + pages * page and self._is_log_cut(connection, page):
            raise Corrupt(f"{self._log} was shortened while it was in use: {CHECK}")

    def _is_log_cut(self, connection: apsw.Connection, page: int) -> bool:
        for _ in range(_LOOKS):
            frames = _log_frames(connection)
            try:
                size = self._log.stat().st_size
            except FileNotFoundError:
                return True
            if size >= _LOG_HEADER + frames * page or frames == 0:
                return False
            if _log_frames(connection) == frames:
                return True
        return False


def _log_frames(connection: apsw.Connection) -> int:
    """Return the number of pages in the log.

    Another process that is in the middle of a commit makes SQLite refuse at once, without a call of
    the busy handler, so that is tried again.
    """
    for _ in range(_BUSY_ATTEMPTS):
        try:
            return connection.wal_checkpoint(mode=_NO_CHECKPOINT)[0]
        except apsw.BusyError:
            time.sleep(_BUSY_PAUSE)
    return connection.wal_checkpoint(mode=_NO_CHECKPOINT)[0]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
