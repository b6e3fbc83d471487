"""A disk that fills up, fails to sync, or loses what was not synced: a VFS around the real one."""

import random
import threading
from pathlib import Path
from typing import Any

import apsw

from service.stores.sqlite.database_file import checksum_vfs

SECTOR = 512  # what a disk writes whole or not at all


class FaultyDisk:
    """Pass `disk.name` as the `vfs` of a store; then switch faults on and off."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full = False  # writes fail with ENOSPC
        self.sync_fails = False  # fsync fails with EIO
        self.syncs = 0
        self.busy = threading.Lock()  # held by each change, so that power is lost at one moment
        self._synced: dict[Path, bytes] = {}  # each file as of its last sync
        self._vfs = _VFS(self)

    def lose_power(self, into: Path, rng: random.Random) -> None:
        """Copy the files to `into` as a power failure may leave them.

        What was synced is there. Of what was written since, each sector is there or not, and the
        file may not have grown.
        """
        into.mkdir()
        with self.busy:
            files = {path: path.read_bytes() for path in self._synced if path.exists()}
            synced = dict(self._synced)
        for path, now in files.items():
            before = synced[path]
            image = bytearray(before.ljust(len(now), b"\0")[: len(now)])
            for at in range(0, len(now), SECTOR):
                if rng.random() < 0.5:
                    image[at : at + SECTOR] = now[at : at + SECTOR]
            if rng.random() < 0.25:
                del image[len(before) :]
            (into / path.name).write_bytes(image)

    def opened(self, path: Path) -> None:
        """Note a file; its entry in the directory is taken as durable."""
        self._synced.setdefault(path, b"")

    def synced(self, path: Path) -> None:
        """Note that what the file holds now is durable."""
        self._synced[path] = path.read_bytes()
        self.syncs += 1


class _VFS(apsw.VFS):
    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk
        super().__init__(disk.name, checksum_vfs())

    def xOpen(self, name: Any, flags: list[int]) -> "_File":  # noqa: N802  # SQLite's name
        return _File(self._disk, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: FaultyDisk, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        super().__init__(checksum_vfs(), name, flags)
        disk.opened(self._path)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        if self._disk.full:
            raise apsw.exception_for(apsw.SQLITE_FULL)
        with self._disk.busy:
            super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:  # noqa: N802
        with self._disk.busy:
            super().xTruncate(size)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._disk.sync_fails:
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
        with self._disk.busy:
            super().xSync(flags)
            self._disk.synced(self._path)
