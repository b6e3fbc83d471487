"""Contents of a PostgreSQL database for a backup, as of one moment for all namespaces.

The backup has the form of a data directory's: each namespace's records are copied into the file of
a SQLite store. So it can be restored into a directory as well as into a database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from service.domain.errors import Corrupt
from service.jobs.job_records import KEPT
from service.maintenance.backups.backup_writer import BackupWriter
from service.maintenance.backups.manifest import NamespaceContent
from service.maintenance.copying.store_copy import copy_store
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    STORE_FILE,
    namespace_folder,
)
from service.snapshots.versions.manifest import MANIFEST, parse_manifest, seal
from service.snapshots.versions.shared_registry import KIND
from service.snapshots.versions.transfer import check_chunks
from service.stores.base import Store
from service.stores.postgres.frozen_database import frozen_database
from service.stores.postgres.namespaces import namespace_ids, namespace_names
from service.stores.postgres.shared_files import FileSet, SharedFiles
from service.stores.postgres.shared_parts import SharedParts
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from service.stores.store_digest import TableDigest

_BESIDE = ("-wal", "-shm", "-mark")  # the file of a SQLite store


def add_database(url: str, data: Path, writer: BackupWriter) -> dict[str, NamespaceContent]:
    """Add all namespaces of a database to a backup; return their contents by name.

    Args:
        url: of the database.
        data: the data directory of this machine, for what search was fitted to.
        writer: of the backup.

    Raises:
        NotFound: the database holds nothing of Heed.
        Incompatible: its schema is not the one of this version of Heed.
        Corrupt: PostgreSQL has found damage, or the copy is not what was copied. Damaged models are
            left out.
        StoreFull: the disk of the backup is full.
        Unavailable: the database does not answer, or its moment was lost with a connection.
    """
    with frozen_database(url) as database:
        with database.connections.plain() as connection:
            names, ids = namespace_names(connection), namespace_ids(connection)
        found = {}
        for name in names:
            store = PostgresStore(database, namespace=name, create=False)
            try:
                found[name] = _add_namespace(name, store, data, writer)
                if own_id := ids[name]:  # its keys have it
                    place = namespace_folder(Path(), name) / NAMESPACE_ID_FILE
                    writer.add_bytes(place, own_id.encode())
            finally:
                asyncio.run(store.close())
        return found


def _add_namespace(
    name: str, store: PostgresStore, data: Path, writer: BackupWriter
) -> NamespaceContent:
    place = namespace_folder(Path(), name)
    folder = namespace_folder(data, name)
    models, current = _add_models(name, store.shared, place / MODELS_FOLDER, writer)
    for row in store.shared.jobs.latest(KEPT):
        writer.add_bytes(place / JOBS_FOLDER / f"{row.job_id}.json", row.document)
    for file in BACKED_UP_FILES:
        writer.add_file(place / file, folder / file)
    digests = _add_store(name, store, place / STORE_FILE, writer)
    return NamespaceContent(SCHEMA_VERSION, current, tuple(models), digests)


def _add_store(
    name: str, store: Store, place: Path, writer: BackupWriter
) -> Mapping[str, TableDigest]:
    copy = writer.objects.incoming / STORE_FILE

    async def run() -> Mapping[str, TableDigest]:
        target = SQLiteStore(copy, is_target=True)
        try:
            copied = await copy_store(
                store,
                target,
                f"the namespace {name} of a backup",
                progress=lambda stage, done, of: writer.progress(f"{name}: {stage}", done, of),
            )
        finally:
            await target.close()
        if copied.differing:
            raise Corrupt(
                f"the copy of the namespace {name} differs from the database in "
                f"{', '.join(copied.differing)}: run heed check"
            )
        return {table.name: table.source for table in copied.tables}

    with durable_files.translate_disk_full(f"there is no room to copy the namespace {name}"):
        digests = asyncio.run(run())
        writer.progress(f"{name}: checking and hashing the store", 0, 0)
        writer.add_store(place, copy, f"the namespace {name}")
    for part in _BESIDE:
        Path(f"{copy}{part}").unlink(missing_ok=True)
    return digests


def _add_models(
    name: str, shared: SharedParts, place: Path, writer: BackupWriter
) -> tuple[list[str], str | None]:
    """Add all intact versions; return their names, and the one in use."""
    files = shared.files(KIND)
    added = []
    sets = files.sets()
    for at, stored in enumerate(sets):
        writer.progress(f"{name}: adding the models", at, len(sets))
        try:
            found = _add_version(files, stored, writer)
        except Corrupt as error:
            # The events are worth more than a model, which can be trained again.
            writer.leave_out(error.detail)
            continue
        writer.files |= {
            str(place / "versions" / stored.name / file): entry for file, entry in found.items()
        }
        added.append(stored.name)
    current = files.last_activation().name
    if current is None:
        return added, None
    if current not in added:
        writer.leave_out(f"{current}, the model in use, is damaged: none will be in use")
        return added, None
    writer.add_bytes(place / "current", seal({"version": current}))
    return added, current


def _add_version(
    files: SharedFiles, stored: FileSet, writer: BackupWriter
) -> dict[str, tuple[int, str]]:
    manifest, objects = parse_manifest(stored.description, stored.name), writer.objects
    # What an earlier backup has is not read again.
    if not all(objects.has(digest, size) for size, digest in manifest.files.values()):
        with closing(files.read(stored.name)) as chunks:
            for _, parts in groupby(check_chunks(manifest, chunks), key=itemgetter(0)):
                objects.add_chunks(data for _, data in parts)
    return {**manifest.files, MANIFEST: objects.add_chunks([stored.description])}
