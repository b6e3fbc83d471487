"""Copies of stores as they were before a migration, for going back to the earlier Heed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import apsw

from service.domain.errors import StoreFull
from service.runtime.durable_files import sync_directory
from service.stores.sqlite_files.page_copy import copy_pages


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
