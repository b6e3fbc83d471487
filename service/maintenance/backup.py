"""Online backup of a data directory or a database, consistent while a service writes to it.

A database's backup has the form of a data directory's: the records of each namespace are copied
into the file of a SQLite store. So it can be restored into a directory as well as into a database.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import service
from service.domain.errors import (
    Corrupt,
    HeedError,
    Incompatible,
    Invalid,
    NotFound,
    StoreFull,
    Unavailable,
)
from service.domain.names import DEFAULT_NAMESPACE, is_name
from service.jobs.job_records import KEPT
from service.maintenance.backup_manifest import (
    BACKUP_FILE,
    BackupManifest,
    BackupProgress,
    FileEntry,
    NamespaceContent,
    ObjectFolder,
    hash_file,
)
from service.maintenance.copying import copy_store
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    LAST_BACKUP_FILE,
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    STORE_FILE,
    check_restored,
    namespace_folder,
    namespace_names,
    store_token,
)
from service.snapshots.shared_registry import KIND
from service.snapshots.version_files import (
    MANIFEST,
    check_chunks,
    parse_manifest,
    read_file,
    read_manifest,
    seal,
    unseal,
)
from service.stores.opening import is_shared
from service.stores.postgres.frozen_database import frozen_database
from service.stores.postgres.namespaces import namespace_ids
from service.stores.postgres.namespaces import namespace_names as database_names
from service.stores.postgres.notices import SharedDatabase
from service.stores.postgres.shared_files import FileSet, SharedFiles
from service.stores.postgres.store import PostgresStore
from service.stores.records import copying
from service.stores.sqlite.copies import REST, copy_pages
from service.stores.sqlite.database_file import checksum_vfs, read_store_file
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from service.stores.sqlite.transaction import run_job
from service.stores.store_digest import TableDigest, digest_store
from service.stores.values import copy_unfinished

_LOCK = "lock"
_TRIES = 3  # to copy the models while others are activated and pruned
_BESIDE = ("-wal", "-shm", "-mark")  # the file of a SQLite store

Digests = Mapping[str, TableDigest]


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
        data: the data directory, with the namespaces, their models and jobs unless `store` is the
            URL of a database, which has them then.
        target: a folder that is missing, empty, or a backup.
        settings: recorded in the manifest, for the service that is started on a restored copy.
        store: `Settings.store`.
        rest: time to rest after each step of copying a file, as a multiple of the time it took.

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
    # Histories are personal: only the owner may read the folder.
    durable_files.make_directory(target)
    try:
        with durable_files.locked(target / _LOCK, 0):
            backup = _Backup(target, progress)
            if is_shared(store):
                with frozen_database(store) as database:
                    backup.add(DatabaseParts(database, data))
            else:
                _check_room(data, backup.objects)
                backup.add(DirectoryParts(data, rest))
            manifest = BackupManifest(
                created,
                service.__version__,
                backup.files,
                backup.namespaces,
                settings,
                tuple(backup.left_out),
            )
            backup.objects.sync()
            manifest.write(target)
            backup.objects.keep_only({digest for _, digest in manifest.files.values()})
    except TimeoutError as error:
        raise Unavailable(f"another process is backing up into {target}") from error
    # A directory that is read-only keeps no record of the backup.
    record = {"target": str(target.resolve()), "created": created}
    with contextlib.suppress(OSError):
        durable_files.replace(data / LAST_BACKUP_FILE, json.dumps(record).encode() + b"\n")
    return manifest


class DirectoryParts:
    """The parts of a data directory, read while a service writes to it."""

    def __init__(self, data: Path, rest: float) -> None:
        self._data = data
        self._rest = rest

    def namespaces(self) -> Generator[str]:
        return (name for name, _ in find_namespaces(self._data))

    def token(self, name: str) -> object:
        """Return what identifies the namespace of this name now; None without one."""
        return store_token(namespace_folder(self._data, name))

    def versions(self, name: str) -> list[tuple[str, Callable[[ObjectFolder], FileEntry]]]:
        """Return the names of the versions of models, with what adds the files of each."""
        folder = self._folder(name) / MODELS_FOLDER / "versions"
        directories = sorted(folder.iterdir()) if folder.is_dir() else []
        return [
            (directory.name, partial(_add_directory, directory))
            for directory in directories
            if is_name(directory.name)
        ]

    def current(self, name: str) -> str | None:
        folder = self._folder(name) / MODELS_FOLDER
        if not (folder / "current").exists():
            return None
        return str(unseal(read_file(folder, "current"), "current").get("version"))

    def files(self, name: str) -> Iterator[tuple[str, Path | bytes]]:
        """Yield places in the directory of a namespace, and files or their content."""
        folder = self._folder(name)
        jobs = sorted((folder / JOBS_FOLDER).glob("*.json"))
        yield from ((file, folder / file) for file in (*BACKED_UP_FILES, NAMESPACE_ID_FILE))
        yield from ((f"{JOBS_FOLDER}/{path.name}", path) for path in jobs if is_name(path.stem))

    def copy_store(
        self, name: str, copy: Path, progress: BackupProgress
    ) -> tuple[int, Digests | None]:
        """Copy the store of a namespace to a file; return its schema and its digests."""
        path = self._folder(name) / STORE_FILE
        with read_store_file(path) as store:
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
        # Opening an older schema would migrate it; the backup keeps the store as it is.
        if schema != SCHEMA_VERSION:
            return schema, None
        progress(f"{name}: computing the digest of the store", 0, 0)
        return schema, asyncio.run(digest_file(copy))

    def _folder(self, name: str) -> Path:
        return namespace_folder(self._data, name)


class DatabaseParts:
    """The parts of a PostgreSQL database, frozen at one moment; methods as of `DirectoryParts`.

    `data` is the data directory of this machine, for what search was fitted to.
    """

    def __init__(self, database: SharedDatabase, data: Path) -> None:
        self._database = database
        self._data = data
        with database.connections.plain() as connection:
            self._names, self._ids = database_names(connection), namespace_ids(connection)
        self._stores: dict[str, PostgresStore] = {}

    def namespaces(self) -> Generator[str]:
        for name in self._names:
            self._stores[name] = PostgresStore(self._database, namespace=name, create=False)
            try:
                yield name
            finally:
                asyncio.run(self._stores.pop(name).close())

    def token(self, name: str) -> object:
        return name  # nothing changes meanwhile

    def versions(self, name: str) -> list[tuple[str, Callable[[ObjectFolder], FileEntry]]]:
        files = self._models(name)
        return [(stored.name, partial(_add_shared, files, stored)) for stored in files.sets()]

    def current(self, name: str) -> str | None:
        return self._models(name).last_activation().name

    def files(self, name: str) -> Iterator[tuple[str, Path | bytes]]:
        for row in self._stores[name].shared.jobs.latest(KEPT):
            yield f"{JOBS_FOLDER}/{row.job_id}.json", row.document
        folder = namespace_folder(self._data, name)
        yield from ((file, folder / file) for file in BACKED_UP_FILES)
        if own_id := self._ids[name]:  # its keys have it
            yield NAMESPACE_ID_FILE, own_id.encode()

    def copy_store(self, name: str, copy: Path, progress: BackupProgress) -> tuple[int, Digests]:
        async def run() -> Digests:
            target = SQLiteStore(copy, is_target=True)
            try:
                copied = await copy_store(
                    self._stores[name],
                    target,
                    f"the namespace {name} of a backup",
                    progress=lambda stage, done, of: progress(f"{name}: {stage}", done, of),
                )
            finally:
                await target.close()
            if copied.differing:
                raise Corrupt(
                    f"the copy of the namespace {name} differs from the database in "
                    f"{', '.join(copied.differing)}: run heed check"
                )
            return {table.name: table.source for table in copied.tables}

        return SCHEMA_VERSION, asyncio.run(run())

    def _models(self, name: str) -> SharedFiles:
        return self._stores[name].shared.files(KIND)


class _Backup:
    """Adds parts to the backup in `target`, each under the place that it has in a data directory.

    `left_out` are sentences about what is damaged and not in the backup.
    """

    def __init__(self, target: Path, progress: BackupProgress) -> None:
        self.objects = ObjectFolder(target)
        self.objects.prepare()
        self.files: dict[str, tuple[int, str]] = {}
        self.namespaces: dict[str, NamespaceContent] = {}
        self.left_out: list[str] = []
        self._progress = progress

    def add(self, parts: DirectoryParts | DatabaseParts) -> None:
        with closing(parts.namespaces()) as names:
            for name in names:
                self._add_whole(parts, name)

    def _add_whole(self, parts: DirectoryParts | DatabaseParts, name: str) -> None:
        """Add all parts of one namespace, unless it is removed meanwhile.

        A later namespace may have its name by then, and their files must not be mixed.
        """
        before = dict(self.files)
        while (token := parts.token(name)) is not None:
            try:
                content = self._add_namespace(parts, name)
            except (FileNotFoundError, NotFound):
                if parts.token(name) == token:
                    raise
            else:
                if parts.token(name) == token:
                    self.namespaces[name] = content
                    return
            self.files = dict(before)

    def _add_namespace(self, parts: DirectoryParts | DatabaseParts, name: str) -> NamespaceContent:
        place = namespace_folder(Path(), name)
        # Models first: one that is published meanwhile may be missing, but none is of the future.
        models, current = self._add_models(parts, name, place / MODELS_FOLDER)
        for file, content in parts.files(name):
            with contextlib.suppress(FileNotFoundError):
                self.files[str(place / file)] = (
                    self.objects.add_chunks([content])
                    if isinstance(content, bytes)
                    else self.objects.add(content)
                )
        copy = self.objects.incoming / STORE_FILE
        with durable_files.translate_disk_full(f"there is no room to copy the store of {name}"):
            schema, digests = parts.copy_store(name, copy, self._progress)
        self._progress(f"{name}: checking and hashing the store", 0, 0)
        with read_store_file(copy) as written:
            problem = written.connection.execute("PRAGMA quick_check(1)").get
            if problem != "ok":
                raise Corrupt(f"the copy of the store of {name} is damaged: {problem}")
        entry = hash_file(copy)
        self.objects.take(copy, entry[1])
        self.files[str(place / STORE_FILE)] = entry
        for part in _BESIDE:
            Path(f"{copy}{part}").unlink(missing_ok=True)
        return NamespaceContent(schema, current, tuple(models), digests)

    def _add_models(
        self, parts: DirectoryParts | DatabaseParts, name: str, place: Path
    ) -> tuple[list[str], str | None]:
        """Add all intact versions; return their names, and the one in use."""
        for _ in range(_TRIES):
            models, failed = [], []
            versions = parts.versions(name)
            for at, (version, add) in enumerate(versions):
                self._progress(f"{name}: adding the models", at, len(versions))
                try:
                    entries = add(self.objects)
                except FileNotFoundError:
                    continue  # pruned meanwhile
                except HeedError as error:
                    failed.append(error.detail)
                    continue
                self.files |= {
                    str(place / "versions" / version / file): entry
                    for file, entry in entries.items()
                }
                models.append(version)
            current = parts.current(name)
            if current in (None, *models):
                break
        # The events are worth more than a model, which can be trained again.
        if current not in (None, *models):
            failed.append(f"{current}, the model in use, is damaged: none will be in use")
            current = None
        self.left_out += [reason for reason in failed if reason not in self.left_out]
        if current is not None:
            pointer = self.objects.add_chunks([seal({"version": current})])
            self.files[str(place / "current")] = pointer
        return models, current


def find_namespaces(data: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the directory of each namespace that has a store, `default` first."""
    yield DEFAULT_NAMESPACE, data
    for name in namespace_names(data):
        path = namespace_folder(data, name)
        if (path / STORE_FILE).exists():
            yield name, path


async def digest_file(path: Path) -> Digests:
    store = SQLiteStore(path)
    try:
        return await digest_store(store)
    finally:
        await store.close()


def _add_directory(directory: Path, objects: ObjectFolder) -> FileEntry:
    try:
        manifest = read_manifest(directory)
        for name, (size, digest) in manifest.files.items():
            objects.link(directory / name, size, digest)
    except HeedError:
        if not directory.exists():
            raise FileNotFoundError(directory) from None
        raise
    return {**manifest.files, MANIFEST: objects.add(directory / MANIFEST)}


def _add_shared(files: SharedFiles, stored: FileSet, objects: ObjectFolder) -> FileEntry:
    manifest = parse_manifest(stored.description, stored.name)
    # Objects of an earlier backup are not read again.
    if not all(objects.has(digest, size) for size, digest in manifest.files.values()):
        with closing(files.read(stored.name)) as chunks:
            for _, parts in groupby(check_chunks(manifest, chunks), key=itemgetter(0)):
                objects.add_chunks(data for _, data in parts)
    return {**manifest.files, MANIFEST: objects.add_chunks([stored.description])}


def _check_target(data: Path, target: Path) -> None:
    inside, outside = target.resolve(), data.resolve()
    if inside == outside or outside in inside.parents or inside in outside.parents:
        raise Invalid("", f"{target} must lie outside of the data directory, {data}")
    if not target.exists():
        return
    must = f"{target} must be a folder that is missing, empty, or a backup"
    if not target.is_dir():
        raise Invalid("", must)
    entries = {path.name for path in target.iterdir()}
    if others := entries - {BACKUP_FILE, BACKUP_FILE + ".tmp", "objects", "incoming", _LOCK}:
        raise Invalid("", f"{must}; it contains {min(others)}")


def _check_room(data: Path, objects: ObjectFolder) -> None:
    """Check that the stores fit: models are mostly linked, or in the previous backup."""
    need = 0
    target = objects.incoming.parent
    for _, path in find_namespaces(data):
        for name in (STORE_FILE, f"{STORE_FILE}-wal", *BACKED_UP_FILES):
            need += (path / name).stat().st_size if (path / name).exists() else 0
        if data.stat().st_dev == target.stat().st_dev:
            continue
        for directory in (path / MODELS_FOLDER / "versions").glob("*"):
            with contextlib.suppress(HeedError, OSError):
                files = read_manifest(directory).files.values()
                need += sum(size for size, digest in files if not objects.has(digest, size))
    free = shutil.disk_usage(target).free
    if free < need:
        raise StoreFull(
            f"the backup needs {need / 1e6:,.0f} MB, and the disk of {target} has "
            f"{free / 1e6:,.0f} MB free"
        )
