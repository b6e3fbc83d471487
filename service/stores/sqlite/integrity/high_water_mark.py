"""High-water mark of a store: the tick of the last acknowledged change, outside the database.

SQLite takes a shortened log for a crash, and starts with the transactions that are left. The mark
tells the difference. It is written after a commit is durable and before it is acknowledged, without
a sync of its own: after a power failure it may be too low, and is never too high.

A damaged mark is refused, never taken for the mark of an empty store.

The mark also carries whether any process has found the store damaged, so that all of them stop
acknowledging writes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import time
from pathlib import Path
from typing import NamedTuple

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
