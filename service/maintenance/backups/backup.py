"""Online backup of a data directory or a database, consistent while a service writes to it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import service
from service.domain.errors import Invalid, NotFound, Unavailable
from service.maintenance.backups.backup_writer import BackupProgress, BackupWriter
from service.maintenance.backups.database_contents import add_database
from service.maintenance.backups.directory_contents import add_directory
from service.maintenance.backups.manifest import BACKUP_FILE, BackupManifest
from service.runtime import durable_files
from service.runtime.data_layout import LAST_BACKUP_FILE, STORE_FILE, check_restored
from service.stores.opening import is_shared
from service.stores.sqlite.copies import REST

_LOCK = "lock"


def back_up(
    data: Path,
    target: Path,
    *,
    settings: Mapping[str, Any],
    store: str = "",
    rest: float = REST,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> BackupManifest:
    """Back up an installation into the folder `target`, also while it is served.

    Every event that was acknowledged before the call is in the backup. The store of each namespace
    is as it was at one moment; those of a database are all of the same moment. The manifest is
    replaced last: until then, `target` is no backup, or still the previous one. Objects that are in
    `target` already are not copied again, and those that only the previous backup had are removed
    at the end.

    Args:
        data: the data directory.
        target: a folder that is missing, empty, or a backup.
        settings: recorded in the manifest, for the service that is started on a restored copy.
        store: `Settings.store`: URL of the database that has the namespaces, with their models and
            jobs; else they are in `data`.
        rest: of a data directory: time to rest after each step of copying, as a multiple of the
            time that it took.
        progress: called as it proceeds.

    Raises:
        NotFound: there is no store in `data`, or nothing of Heed in the database.
        Invalid: `target` is neither missing nor empty nor a backup, or lies in `data`.
        Corrupt: a store is damaged; nothing was backed up. Damaged models are left out.
        StoreFull: the disk of `target` has too little room.
        Incompatible: a store, or the database, is of another version of Heed.
        Unavailable: another process is backing up into `target`; or the database does not answer.
    """
    created = time.time_ns() // 1000
    check_restored(data)
    if not is_shared(store) and not (data / STORE_FILE).exists():
        raise NotFound(f"there is no store to back up: {data / STORE_FILE} does not exist")
    _check_target(data, target)
    # Histories are personal: the folder is its owner's alone.
    durable_files.make_directory(target)
    try:
        with durable_files.locked(target / _LOCK, 0):
            writer = BackupWriter(target, progress)
            if is_shared(store):
                namespaces = add_database(store, data, writer)
            else:
                namespaces = add_directory(data, writer, rest)
            manifest = BackupManifest(
                created,
                service.__version__,
                writer.files,
                namespaces,
                settings,
                tuple(writer.left_out),
            )
            writer.objects.sync()
            manifest.write(target)
            writer.objects.keep_only({digest for _, digest in manifest.files.values()})
    except TimeoutError as error:
        raise Unavailable(f"another process is backing up into {target}") from error
    _record(data, target, manifest)
    return manifest


def _record(data: Path, target: Path, manifest: BackupManifest) -> None:
    """Note in the data directory that there is a backup; a directory that is read-only has none."""
    record = {"target": str(target.resolve()), "created": manifest.created}
    with contextlib.suppress(OSError):
        durable_files.replace(data / LAST_BACKUP_FILE, json.dumps(record).encode() + b"\n")


def _check_target(data: Path, target: Path) -> None:
    inside, outside = target.resolve(), data.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise Invalid("", f"{target} must lie outside of the data directory, {data}")
    if not target.exists():
        return
    if not target.is_dir():
        raise Invalid("", f"{target} must be a folder that is missing, empty, or a backup")
    entries = {path.name for path in target.iterdir()}
    if others := entries - {BACKUP_FILE, BACKUP_FILE + ".tmp", "objects", "incoming", _LOCK}:
        raise Invalid(
            "",
            f"{target} must be a folder that is missing, empty, or a backup; it contains "
            f"{min(others)}",
        )
