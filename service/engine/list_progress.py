"""Progress file of a run over all users, from which the next run continues a killed one.

The file stands beside the output. Each line starts with the CRC-32 of its rest. The first line
describes the run; each other one holds the lists of a few users, in the order of user ids. Lines
are only appended: a kill or a power loss can tear the last ones, which the next run cuts off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from service.domain.errors import Conflict
from service.runtime import durable_files

_FORMAT = 1  # changes with the lines
_CHECKSUM = 8  # hexadecimal digits, and a space after them
_SYNC = 256  # lines between two fsyncs: what a power loss takes, not what a kill does


class UserList(NamedTuple):
    """The recommendations of one user, best first."""

    user_id: str
    item_ids: list[str]
    scores: list[float]


class ListBatch(NamedTuple):
    """Lists of a few users, and the recalls of those that are in the sample."""

    lists: list[UserList]
    recalls: list[float]


@dataclass(frozen=True, slots=True)
class ListRun:
    """Description of a run. Only a run of the same `identity` may continue it.

    A run that is continued keeps its time and its beginning.
    """

    identity: Mapping[str, str]  # name of what lists depend on -> its value
    at: int  # request time, microseconds UTC
    begun: int  # microseconds UTC
    catalogue_version: int  # of the store's catalogue at the beginning


class ListProgress:
    """The lists that a run, and the runs that it continues, have computed. Not thread-safe.

    Use `open_progress`.

    Args:
        path: of the file.
        descriptor: of the open file, whose lock the caller holds.
        run: that begins, where it cannot continue the one in the file.
        restart: whether it must not continue it.
    """

    def __init__(self, path: Path, descriptor: int, run: ListRun, *, restart: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        self._unsynced = 0
        self.run = run
        self.users = 0  # whose lists there are
        self.last: str | None = None  # the greatest of their ids
        self.recalls: list[float] = []
        # Names of what the run in the file depended on and this one does not; it is discarded.
        self.differences: tuple[str, ...] = ()
        lines = self._lines()
        first, end = next(lines, (b"", 0))
        earlier = _parse_run(first)
        if earlier is not None:
            self.differences = _differences(earlier.identity, run.identity)
        if earlier is None or self.differences or restart:
            self._begin()
            return
        self.run = earlier
        for payload, after in lines:
            self._count(_parse_batch(payload))
            end = after
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)

    def append(self, batch: ListBatch) -> None:
        """Append lists of the users that come next. They survive a kill when this returns.

        Raises:
            StoreFull: the disk is full.
        """
        self._write(orjson.dumps([[tuple(each) for each in batch.lists], batch.recalls]))
        self._count(batch)
        self._unsynced += 1
        if self._unsynced >= _SYNC:
            os.fsync(self._descriptor)
            self._unsynced = 0

    def batches(self) -> Iterator[ListBatch]:
        """Read all lists from the file, in the order of user ids."""
        lines = self._lines()
        next(lines)
        return (_parse_batch(payload) for payload, _ in lines)

    def remove(self) -> None:
        """Delete the file durably, since the output is complete."""
        self._path.unlink()
        durable_files.sync_directory(self._path.parent)

    def _begin(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._write(orjson.dumps({"format": _FORMAT, **asdict(self.run)}))
        os.fsync(self._descriptor)
        durable_files.sync_directory(self._path.parent)

    def _count(self, batch: ListBatch) -> None:
        self.users += len(batch.lists)
        self.last = batch.lists[-1].user_id
        self.recalls += batch.recalls

    def _write(self, payload: bytes) -> None:
        left = memoryview(_line(payload))
        with durable_files.translate_disk_full(f"there is no room to write {self._path}"):
            while left:
                left = left[os.write(self._descriptor, left) :]

    def _lines(self) -> Iterator[tuple[bytes, int]]:
        """Yield the rest of each line after its checksum, and its end; stop at a damaged line."""
        end = 0
        with self._path.open("rb") as file:
            for line in file:
                payload = line[_CHECKSUM + 1 : -1]
                if line != _line(payload):
                    return
                end += len(line)
                yield payload, end


@contextmanager
def open_progress(path: Path, run: ListRun, *, restart: bool = False) -> Iterator[ListProgress]:
    """Yield the progress of the run that an earlier process began, or of a new one.

    The file stays when the block ends, unless `ListProgress.remove` was called.

    Args:
        path: of the file; created when missing.
        run: as it is now; continued is a run of the same identity.
        restart: begin again in any case.

    Raises:
        Conflict: another process has the file open.
        StoreFull: the disk is full.
    """
    descriptor = _lock(path)
    try:
        yield ListProgress(path, descriptor, run, restart=restart)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Open the file and lock it."""
    while True:
        descriptor = durable_files.try_lock(path)
        if descriptor is None:
            raise Conflict(f"another process is computing these lists: it has {path} open")
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its owner removed it in between


def _line(payload: bytes) -> bytes:
    return b"%08x %s\n" % (crc32(payload), payload)


def _parse_run(payload: bytes) -> ListRun | None:
    """Return the run of a first line; None without one that this version can read."""
    if not payload:
        return None
    fields: dict[str, Any] = orjson.loads(payload)
    return ListRun(**fields) if fields.pop("format") == _FORMAT else None


def _parse_batch(payload: bytes) -> ListBatch:
    lists, recalls = orjson.loads(payload)
    return ListBatch([UserList(*each) for each in lists], recalls)


def _differences(earlier: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names whose values differ."""
    return tuple(name for name in {**earlier, **now} if earlier.get(name) != now.get(name))
