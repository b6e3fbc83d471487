"""Reading the file of a store as it is: nothing is created, migrated or checkpointed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import apsw

from service.domain.errors import Corrupt, HeedError, Incompatible, NotFound, Unavailable
from service.runtime.file_paths import denied, is_denied
from service.stores.sqlite.database_file import APPLICATION_ID, READ_TIMEOUT_MS, checksum_vfs


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
        raise _explain(path, error) from error


def _explain(path: Path, error: apsw.Error) -> HeedError:
    damaged = isinstance(error, (apsw.CorruptError, apsw.NotADBError))
    if damaged or getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
        return Corrupt(f"{path} is damaged: {error}")
    if is_denied(path) or is_denied(path.parent):
        return Unavailable(denied(path))
    return Unavailable(f"{path} cannot be read: {type(error).__name__}: {error}")
