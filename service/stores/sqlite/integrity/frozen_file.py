"""Store on a disk that is full or read-only when it is opened: readable, until it can be written.

SQLite needs room for the index of its log even to read. Where the log is empty and nobody writes,
the database can be read without: `immutable` says so.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import apsw

from service.domain.errors import Unavailable
from service.stores.sqlite.integrity.high_water_mark import check_mark
from service.stores.sqlite.schema import SCHEMA_VERSION

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
