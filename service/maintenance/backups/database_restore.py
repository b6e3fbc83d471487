"""Restoration of a backup into an empty PostgreSQL database.

The backup is restored into a temporary directory first, which verifies it, and from there its
records are copied and its models published. Whoever else opens the database meanwhile is refused.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from service.domain.errors import Conflict, Corrupt
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.timestamps import to_rfc3339
from service.jobs.job_files import parse_job
from service.jobs.job_records import KEPT
from service.maintenance.backups.backup_writer import BackupProgress
from service.maintenance.backups.manifest import BackupManifest
from service.maintenance.backups.objects import copy_file
from service.maintenance.backups.restore import restore
from service.maintenance.copying.store_copy import copy_store
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    MODELS_FOLDER,
    STORE_FILE,
    namespace_folder,
)
from service.runtime.durable_files import make_directory
from service.runtime.namespace_folders import namespace_id
from service.snapshots.registry import Registry
from service.snapshots.versions.manifest import MANIFEST, read_file, read_manifest
from service.snapshots.versions.shared_registry import KIND
from service.snapshots.versions.transfer import send_files
from service.stores.namespace_directory import open_directory
from service.stores.postgres.namespaces import (
    find_or_create_namespace,
    is_unused,
    namespace_names,
)
from service.stores.postgres.notices import SharedDatabase, open_database
from service.stores.postgres.schema import (
    begin_restore,
    finish_restore,
    open_installation,
    unfinished_restore,
)
from service.stores.postgres.shared_files import SharedFiles
from service.stores.postgres.shared_parts import SharedJobs
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore

_PASSES = 2  # of copying: the second one repairs what an interrupted restore has left


def restore_to_database(
    source: Path,
    url: str,
    data: Path,
    *,
    work: Path | None = None,
    before_use: Callable[[Path, Path], None] | None = None,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> BackupManifest:
    """Restore the backup in the folder `source` into an empty database.

    Until it is finished, Heed refuses to use the database; the same call, made again, goes on where
    an interrupted one stopped.

    Args:
        source: the backup's folder, which stays as it is.
        url: of the database: new, or without any record, model or further namespace.
        data: the data directory of this machine, to which come what search was fitted to and the
            stored embeddings, unless they are there.
        work: where the temporary directory is made, which takes the size of the backup; by default
            the system's place for them.
        before_use: as of `restore`, for the temporary directory.
        progress: called as it proceeds.

    Raises:
        NotFound, Incompatible, Corrupt: as `restore`; Corrupt also where the records of the
            database are not those of the backup in the end.
        Conflict: the database is not empty, or something else writes to it meanwhile.
        StoreFull: the disk of `work` or of the database is full.
        Unavailable: the database does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="heed-restore-", dir=work) as temporary:
        folder = Path(temporary, "data")
        manifest = restore(source, folder, before_use=before_use, progress=progress)
        backup = f"backup of {to_rfc3339(manifest.created)}"
        database = open_database(url)
        try:
            with database.connections.plain() as connection:
                open_installation(connection, restoring=backup)
                if unfinished_restore(connection) is None and not is_unused(connection):
                    raise Conflict(
                        f"the database {database.connections.name} is not empty: a backup is never "
                        "restored over data. Create another database"
                    )
                begin_restore(connection, backup)
                for name in manifest.namespaces:
                    own_id = namespace_id(namespace_folder(folder, name))
                    find_or_create_namespace(connection, name, own_id)
                    _restore_namespace(
                        name, namespace_folder(folder, name), database, backup, progress
                    )
                others = {*namespace_names(connection)} - {DEFAULT_NAMESPACE, *manifest.namespaces}
                if others:
                    raise Conflict(
                        f"the namespace {min(others)} was created while the backup was restored"
                    )
                finish_restore(connection)
        finally:
            database.abandon()
        _restore_files(manifest, folder, url, data)
    return manifest


def _restore_namespace(
    name: str, folder: Path, database: SharedDatabase, backup: str, progress: BackupProgress
) -> None:
    target = PostgresStore(database, namespace=name, is_target=True)

    async def run() -> None:
        source = SQLiteStore(folder / STORE_FILE)
        try:
            for _ in range(_PASSES):
                copied = await copy_store(
                    source,
                    target,
                    f"the namespace {name} of the {backup}",
                    progress=lambda stage, done, of: progress(f"{name}: {stage}", done, of),
                )
                if not copied.differing:
                    return
            differing = ", ".join(copied.differing)
            raise Corrupt(f"{name}: the database differs from the backup in {differing}")
        finally:
            await source.close()

    try:
        asyncio.run(run())
        _restore_models(name, folder / MODELS_FOLDER, target.shared.files(KIND), progress)
        _restore_jobs(folder / JOBS_FOLDER, target.shared.jobs)
    finally:
        asyncio.run(target.close())


def _restore_models(name: str, folder: Path, shared: SharedFiles, progress: BackupProgress) -> None:
    versions = folder / "versions"
    directories = list(versions.iterdir()) if versions.is_dir() else []
    manifests = [read_manifest(each) for each in directories]
    for at, manifest in enumerate(sorted(manifests, key=lambda each: each.created)):
        progress(f"{name}: publishing the models", at, len(manifests))
        directory = versions / manifest.version
        if shared.find(manifest.version) is None:
            sealed = bytes(read_file(directory, MANIFEST))
            shared.put(manifest.version, sealed, send_files(directory, manifest))
    current = Registry(folder).current() if directories else None
    if current is not None and shared.last_activation().name != current:
        shared.activate(current)


def _restore_jobs(folder: Path, shared: SharedJobs) -> None:
    for path in sorted(folder.glob("*.json")):
        document = path.read_bytes()
        shared.add(path.stem, document, KEPT)
        # One that ran when the backup was made is marked as interrupted by the next training.
        shared.write(path.stem, document, has_ended=parse_job(path.stem, document).is_final)


def _restore_files(manifest: BackupManifest, folder: Path, url: str, data: Path) -> None:
    """Copy what is of this machine alone, and can be made again."""
    directory = open_directory(data, url)
    try:
        for name in manifest.namespaces:
            source, target = namespace_folder(folder, name), directory.find(name)
            make_directory(target)
            for file in BACKED_UP_FILES:
                if (source / file).exists() and not (target / file).exists():
                    copy_file(source / file, target / file)
    finally:
        directory.close()
