"""High-water mark of a store: the tick of the last acknowledged change, outside the database.

SQLite takes a shortened log for a crash, and starts with the transactions that are left. The mark
tells the difference. It is written after a commit is durable and before it is acknowledged, without
a sync of its own: after a power failure it may be too low, and is never too high.

The mark also carries whether any process has found the store damaged, so that all of them stop
acknowledging writes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

from service.runtime.durable_files import PRIVATE_FILE, sync_directory

_RECORD = struct.Struct("<8sqq8s")  # magic, tick, whether damaged, digest: 32 bytes of one sector
_MAGIC = b"HeedMark"


class MarkState(NamedTuple):
    """Content of a mark: the tick up to which changes were acknowledged, and a found damage."""

    tick: int
    is_damaged: bool


class HighWaterMark:
    """The file `heed.db-mark`, open. Several processes may write to it.

    Opening creates it. Raises `OSError` if that is not possible.
    """

    def __init__(self, store: Path) -> None:
        path = mark_path(store)
        self._is_closed = False
        is_new = not path.exists()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
        if is_new:
            sync_directory(path.parent)

    def read(self) -> MarkState | None:
        """Return the content; None if nothing was written, or it fails its checksum."""
        return _decode(os.pread(self._file, _RECORD.size, 0))

    def advance(self, tick: int) -> MarkState:
        """Record that changes up to `tick` are durable; return the content."""
        state = self.read() or MarkState(0, False)
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
    """Return the content of the mark of a store; None without a mark, or if it is damaged."""
    try:
        return _decode(mark_path(store).read_bytes())
    except FileNotFoundError:
        return None


def _encode(state: MarkState) -> bytes:
    body = struct.pack("<8sqq", _MAGIC, state.tick, state.is_damaged)
    return body + _digest(body)


def _decode(data: bytes) -> MarkState | None:
    if len(data) != _RECORD.size:
        return None
    magic, tick, is_damaged, digest = _RECORD.unpack(data)
    if magic != _MAGIC or digest != _digest(data[:-8]):
        return None
    return MarkState(tick, bool(is_damaged))


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8, usedforsecurity=False).digest()
