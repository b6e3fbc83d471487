"""Contents of a data directory for a backup, read while a service writes to it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from service.domain.errors import HeedError, Incompatible, NotFound, StoreFull
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.maintenance.backups.backup_writer import BackupWriter
from service.maintenance.backups.manifest import NamespaceContent
from service.maintenance.backups.objects import ObjectFolder
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    STORE_FILE,
    namespace_folder,
)
from service.runtime.namespace_folders import namespace_names, store_token
from service.snapshots.versions.manifest import MANIFEST, read_file, read_manifest, unseal
from service.stores.records import copying
from service.stores.sqlite.copies import copy_pages
from service.stores.sqlite.database_file import checksum_vfs, read_store_file
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from service.stores.store_digest import TableDigest, digest_store
from service.stores.values import copy_unfinished

_TRIES = 3  # to copy the models while others are activated and pruned


def find_namespaces(data: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of each namespace that has a store, `default` first."""
    yield DEFAULT_NAMESPACE, data
    for name in namespace_names(data):
        path = namespace_folder(data, name)
        if (path / STORE_FILE).exists():
            yield name, path


async def digest_file(path: Path) -> Mapping[str, TableDigest]:
    """Return the digests of the store in a file."""
    store = SQLiteStore(path)
    try:
        return await digest_store(store)
    finally:
        await store.close()


def add_directory(data: Path, writer: BackupWriter, rest: float) -> dict[str, NamespaceContent]:
    """Add all namespaces of a data directory to a backup; return their contents by name.

    Args:
        data: the data directory.
        writer: of the backup.
        rest: time to rest after each step of copying, as a multiple of the time that it took.

    Raises:
        Corrupt: a store is damaged. Damaged models are left out.
        Incompatible: a store is of a newer Heed.
        StoreFull: the disk of the backup has too little room.
    """
    _check_room(data, writer.objects)
    directory = _Directory(writer, rest)
    found = {}
    for name, path in find_namespaces(data):
        content = directory.add_whole(name, path)
        if content is not None:
            found[name] = content
    return found


class _Directory:
    """Adds namespaces to a backup."""

    def __init__(self, writer: BackupWriter, rest: float) -> None:
        self._writer = writer
        self._rest = rest

    def add_whole(self, name: str, data: Path) -> NamespaceContent | None:
        """Add all files of one namespace; None if it is removed meanwhile.

        A later namespace may have its name by then, and their files must not be mixed.
        """
        before = dict(self._writer.files)
        while (token := store_token(data)) is not None:
            try:
                content = self._add(name, data)
            except (FileNotFoundError, NotFound):
                if store_token(data) == token:
                    raise
            else:
                if store_token(data) == token:
                    return content
            self._writer.files = dict(before)
        return None

    def _add(self, name: str, data: Path) -> NamespaceContent:
        place = namespace_folder(Path(), name)
        # Models first: one that is published meanwhile may be missing, but none is of the future.
        models, current = self._add_models(data / MODELS_FOLDER, place / MODELS_FOLDER)
        self._add_files(data, place)
        schema, digests = self._add_store(name, data / STORE_FILE, place / STORE_FILE)
        return NamespaceContent(schema, current, tuple(models), digests)

    def _add_store(
        self, name: str, path: Path, place: Path
    ) -> tuple[int, Mapping[str, TableDigest] | None]:
        progress = self._writer.progress
        copy = self._writer.objects.incoming / STORE_FILE
        with (
            durable_files.translate_disk_full(f"there is no room to copy {path}"),
            read_store_file(path) as store,
        ):
            schema = store.schema
            if schema > SCHEMA_VERSION:
                raise Incompatible(
                    f"{path} has schema version {schema}, and this Heed reads up to "
                    f"{SCHEMA_VERSION}. Back it up with the version of Heed that wrote it"
                )
            if (origin := run_job(store.connection, copying.unfinished())) is not None:
                raise copy_unfinished(str(path), origin)
            copied = partial(progress, f"{name}: copying the store")
            copy_pages(store.connection, copy, checksum_vfs(), rest=self._rest, progress=copied)
        # An older schema would be migrated by opening it; the backup keeps the store as it is.
        digests = None
        if schema == SCHEMA_VERSION:
            progress(f"{name}: computing the digest of the store", 0, 0)
            digests = asyncio.run(digest_file(copy))
        progress(f"{name}: checking and hashing the store", 0, 0)
        self._writer.add_store(place, copy, str(path))
        return schema, digests

    def _add_files(self, data: Path, place: Path) -> None:
        names = [Path(name) for name in (*BACKED_UP_FILES, NAMESPACE_ID_FILE)]
        jobs = sorted((data / JOBS_FOLDER).glob("*.json"))
        names += [path.relative_to(data) for path in jobs if is_name(path.stem)]
        for name in names:
            self._writer.add_file(place / name, data / name)

    def _add_models(self, folder: Path, place: Path) -> tuple[list[str], str | None]:
        """Add all intact versions; return their names, and the one in use."""
        for _ in range(_TRIES):
            found = self._add_versions(folder / "versions", place / "versions")
            if not (folder / "current").exists():
                return found, None
            current = unseal(read_file(folder, "current"), "current").get("version")
            if current in found:
                self._writer.add_file(place / "current", folder / "current")
                return found, current
        # The events are worth more than the model, which can be trained again.
        self._writer.leave_out(f"{current}, the model in use, is damaged: none will be in use")
        return found, None

    def _add_versions(self, folder: Path, place: Path) -> list[str]:
        added = []
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        versions = [directory for directory in found if is_name(directory.name)]
        for at, directory in enumerate(versions):
            self._writer.progress("adding the models", at, len(versions))
            try:
                files = self._add_version(directory)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except HeedError as error:
                if directory.exists():
                    self._writer.leave_out(error.detail)
                continue
            self._writer.files |= {
                str(place / directory.name / name): at for name, at in files.items()
            }
            added.append(directory.name)
        return added

    def _add_version(self, directory: Path) -> dict[str, tuple[int, str]]:
        manifest = read_manifest(directory)
        objects = self._writer.objects
        for name, (size, digest) in manifest.files.items():
            objects.link(directory / name, size, digest)
        return {**manifest.files, MANIFEST: objects.add(directory / MANIFEST)}


def _check_room(data: Path, objects: ObjectFolder) -> None:
    """Check that the stores fit: models are mostly linked, or in the previous backup."""
    need = 0
    for _, path in find_namespaces(data):
        for name in (STORE_FILE, f"{STORE_FILE}-wal", *BACKED_UP_FILES):
            need += (path / name).stat().st_size if (path / name).exists() else 0
    target = objects.incoming.parent
    if data.stat().st_dev != target.stat().st_dev:
        for _, path in find_namespaces(data):
            for directory in (path / MODELS_FOLDER / "versions").glob("*"):
                try:
                    files = read_manifest(directory).files
                except (HeedError, OSError):
                    continue
                need += sum(
                    size for size, sha256 in files.values() if not objects.has(sha256, size)
                )
    free = shutil.disk_usage(target).free
    if free < need:
        raise StoreFull(
            f"the backup needs {need / 1e6:,.0f} MB, and the disk of {target} has "
            f"{free / 1e6:,.0f} MB free"
        )
