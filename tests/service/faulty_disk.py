"""A disk that fills up, fails to sync, or loses what was not synced: a VFS around the real one."""

import random
import shutil
from pathlib import Path
from typing import Any

import apsw

from service.stores.sqlite_file import checksum_vfs

SECTOR = 512  # what a disk writes whole or not at all


class FaultyDisk:
    """Pass `disk.name` as the `vfs` of a store; then switch faults on and off."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full = False  # writes fail with ENOSPC
        self.sync_fails = False  # fsync fails with EIO
        self.syncs = 0
        self._synced: dict[Path, bytes] = {}  # each file as of its last sync
        self._vfs = _VFS(self)

    def lose_power(self, into: Path, rng: random.Random) -> None:
        """Copy the files to `into` as a power failure may leave them.

        What was synced is there. Of what was written since, each sector is there or not.
        """
        into.mkdir()
        for path, before in self._synced.items():
            if not path.exists():
                continue
            now = path.read_bytes()
            image = bytearray(before.ljust(len(now), b"\0")[: len(now)])
            for at in range(0, len(now), SECTOR):
                if rng.random() < 0.5:
                    image[at : at + SECTOR] = now[at : at + SECTOR]
            (into / path.name).write_bytes(image)

    def copy(self, into: Path) -> None:
        """Copy the files to `into` as kill -9 would leave them."""
        into.mkdir()
        for path in self._synced:
            if path.exists():
                shutil.copy(path, into / path.name)

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
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._disk.sync_fails:
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)
        super().xSync(flags)
        self._disk.synced(self._path)
