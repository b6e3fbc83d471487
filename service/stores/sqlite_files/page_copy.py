"""Copy of a database, page by page, while other processes read and write it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw

from service.runtime.durable_files import sync_directory

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

    Pages in a write-ahead log have no checksums of their own yet. Those of a copy larger than
    SQLite's cache are written before its first page, and would keep the stale ones.
    """
    copy.pragma("page_size", page_size)
    copy.reserve_bytes("main", reserved)
    copy.execute("CREATE TABLE first_page (x)")
