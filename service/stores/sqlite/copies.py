"""Copies of the files of SQLite stores."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw

from service.domain.errors import StoreFull
from service.runtime.durable_files import sync_directory


def kept_path(store: Path, version: int) -> Path:
    """Return the path of the copy of a store with a schema of this version: `heed.db.v5`."""
    return store.with_name(f"{store.name}.v{version}")


def keep_copy(reader: apsw.Connection, store: Path, version: int, vfs: str) -> None:
    """Copy the store, complete and durably, to `kept_path`; an earlier copy is replaced.

    Args:
        reader: a connection without an open transaction.
        store: the path of its file.
        version: of its schema.
        vfs: through which the copy is written.

    Raises:
        StoreFull: the disk has no room for the copy.
    """
    need = reader.pragma("page_count") * reader.pragma("page_size")
    free = shutil.disk_usage(store.parent).free
    # The migration itself writes too: what it adds is first in the log, then in the store.
    if free < 2 * need:
        raise StoreFull(
            f"{store} has schema version {version} and must be migrated, which needs "
            f"{2 * need / 1e6:,.1f} MB, half of it for a copy of the store; the disk has "
            f"{free / 1e6:,.1f} MB free"
        )
    kept = kept_path(store, version)
    temporary = kept.with_name(kept.name + ".tmp")
    temporary.unlink(missing_ok=True)
    copy_pages(reader, temporary, vfs, rest=0)
    os.replace(temporary, kept)
    sync_directory(kept.parent)


def remove_kept_copies(store: Path) -> list[Path]:
    """Remove all copies of a store that were kept; return their paths."""
    name = re.compile(re.escape(store.name) + r"\.v\d+(\.tmp)?")
    found = [path for path in store.parent.iterdir() if name.fullmatch(path.name)]
    for path in found:
        path.unlink(missing_ok=True)
    return found


PAGES_AT_ONCE = 256  # ~1 MiB, copied in about a millisecond
REST = 1.0  # time to rest after each step, as a multiple of the time that the step took

CopyProgress = Callable[[int, int], None]  # bytes copied, bytes in all


def copy_pages(
    source: apsw.Connection,
    target: Path,
    vfs: str,
    *,
    rest: float = REST,
    progress: CopyProgress | None = None,
) -> None:
    """Copy the database of `source` to the new file `target`, durably, as it is at one moment.

    One read transaction is held throughout. Without it, SQLite would start over whenever another
    process commits, and under steady writes would never finish. Writers go on meanwhile; the
    write-ahead log cannot be reset until the copy is done, and grows with what they write.

    Pages that are read from the source's file are verified; all pages of the copy have checksums.

    Args:
        source: a connection without an open transaction.
        target: a file that does not exist.
        vfs: through which the copy is written, and its pages verified.
        rest: time to rest after each step, as a multiple of the time that the step took.
        progress: called after each step.

    Raises:
        apsw.Error: the source is damaged or busy, or the disk is full.
    """
    page_size = source.pragma("page_size")
    source.execute("BEGIN")
    try:
        source.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # begins the transaction
        with closing(apsw.Connection(str(target), vfs=vfs)) as copy:
            # No journal: an unfinished copy is thrown away, and a finished one is synced below.
            copy.pragma("journal_mode", "OFF")
            copy.pragma("synchronous", "OFF")
            _begin_checksums(copy, page_size, source.reserve_bytes("main"))
            with copy.backup("main", source, "main") as backup:
                while not backup.done:
                    started = time.monotonic()
                    backup.step(PAGES_AT_ONCE)
                    took = time.monotonic() - started
                    if progress is not None:
                        pages = backup.page_count
                        progress((pages - backup.remaining) * page_size, pages * page_size)
                    time.sleep(rest * took)
    finally:
        source.execute("ROLLBACK")
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(target.parent)


def _begin_checksums(copy: apsw.Connection, page_size: int, reserved: int) -> None:
    """Write the first page of an empty copy, from which its VFS learns of the checksums.

    Pages in a write-ahead log have no checksums of their own yet. A copy larger than SQLite's cache
    has pages that are written before its first one, and would keep the stale checksums.
    """
    copy.pragma("page_size", page_size)
    copy.reserve_bytes("main", reserved)
    copy.execute("CREATE TABLE first_page (x)")
