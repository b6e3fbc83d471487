"""Online backup of a data directory, consistent while a service writes to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from service.domain.names import DEFAULT_NAMESPACE
from service.maintenance.backups.manifest import BACKUP_FILE, BackupManifest, NamespaceContent
from service.maintenance.backups.objects import ObjectFolder, hash_file
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    LAST_BACKUP_FILE,
    MODELS_FOLDER,
    STORE_FILE,
    check_restored,
    namespace_folder,
)
from service.runtime.namespace_folders import namespace_names
from service.snapshots.versions.manifest import MANIFEST, read_file, read_manifest, unseal
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from service.stores.sqlite_files.inspection import read_store_file
from service.stores.sqlite_files.page_copy import REST, copy_pages
from service.stores.store_digest import TableDigest, digest_store

# Called with the stage, and the bytes done of all; (stage, 0, 0) where they are not known.
BackupProgress = Callable[[str, int, int], None]

_LOCK = "lock"
_TRIES = 3  # to copy the models while others are activated and pruned


def back_up(
    data: Path,
    target: Path,
    *,
    settings: Mapping[str, Any],
    rest: float = REST,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> BackupManifest:
    """Back up the data directory `data` into the folder `target`, also while it is served.

    Every event that was acknowledged before the call is in the backup. The store of each namespace
    is as it was at one moment. The manifest is replaced last: until then, `target` is no backup,
    or still the previous one. Objects that are in `target` already are not copied again, and those
    that only the previous backup had are removed at the end.

    Args:
        data: the data directory.
        target: a folder that is missing, empty, or a backup.
        settings: recorded in the manifest, for the service that is started on a restored copy.
        rest: time to rest after each step of copying, as a multiple of the time that it took.
        progress: called as it proceeds.

    Raises:
        NotFound: there is no store in `data`.
        Invalid: `target` is neither missing nor empty nor a backup, or lies in `data`.
        Corrupt: a store is damaged; nothing was backed up. Damaged models are left out.
        StoreFull: the disk of `target` has too little room.
        Unavailable: another process is backing up into `target`.
    """
    created = time.time_ns() // 1000
    check_restored(data)
    if not (data / STORE_FILE).exists():
        raise NotFound(f"there is no store to back up: {data / STORE_FILE} does not exist")
    _check_target(data, target)
    # Histories are personal: the folder is its owner's alone.
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with durable_files.locked(target / _LOCK, 0):
            _check_room(data, target)
            writer = _Writer(target, rest, progress)
            namespaces = {name: writer.add(name, path) for name, path in find_namespaces(data)}
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


class _Writer:
    """Adds the files of namespaces to a backup."""

    def __init__(self, target: Path, rest: float, progress: BackupProgress) -> None:
        self.objects = ObjectFolder(target)
        self.objects.prepare()
        self.files: dict[str, tuple[int, str]] = {}
        self.left_out: list[str] = []
        self._rest = rest
        self._progress = progress

    def add(self, name: str, data: Path) -> NamespaceContent:
        """Add all files of a namespace."""
        place = namespace_folder(Path(), name)
        # Models first: one that is published meanwhile may be missing, but none is of the future.
        models, current = self._add_models(data / MODELS_FOLDER, place / MODELS_FOLDER)
        self._add_files(data, place)
        schema, digests = self._add_store(name, data / STORE_FILE, place / STORE_FILE)
        return NamespaceContent(schema, current, tuple(models), digests)

    def _add_store(
        self, name: str, path: Path, place: Path
    ) -> tuple[int, Mapping[str, TableDigest] | None]:
        copy = self.objects.incoming / STORE_FILE
        copied = partial(self._progress, f"{name}: copying the store")
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
            copy_pages(store.connection, copy, checksum_vfs(), rest=self._rest, progress=copied)
        self._progress(f"{name}: checking the copy", 0, 0)
        with read_store_file(copy) as written:
            problem = written.connection.execute("PRAGMA quick_check(1)").get
            if problem != "ok":
                raise Corrupt(f"{path}: the copy is damaged: {problem}")
        # An older schema would be migrated by opening it; the backup keeps the store as it is.
        digests = None
        if schema == SCHEMA_VERSION:
            self._progress(f"{name}: computing the digest of the store", 0, 0)
            digests = asyncio.run(digest_file(copy))
        self._progress(f"{name}: hashing the store", 0, 0)
        size, digest = hash_file(copy)
        self.objects.take(copy, digest)
        self.files[str(place)] = size, digest
        return schema, digests

    def _add_files(self, data: Path, place: Path) -> None:
        names = [Path(name) for name in BACKED_UP_FILES]
        names += sorted(path.relative_to(data) for path in (data / JOBS_FOLDER).glob("*.json"))
        for name in names:
            try:
                self.files[str(place / name)] = self.objects.add(data / name)
            except FileNotFoundError:
                continue  # there is none, or no longer

    def _add_models(self, folder: Path, place: Path) -> tuple[list[str], str | None]:
        """Add all intact versions; return their names, and the one in use."""
        for _ in range(_TRIES):
            found = self._add_versions(folder / "versions", place / "versions")
            if not (folder / "current").exists():
                return found, None
            current = unseal(read_file(folder, "current"), "current").get("version")
            if current in found:
                self.files[str(place / "current")] = self.objects.add(folder / "current")
                return found, current
        # The events are worth more than the model, which can be trained again.
        self.left_out.append(f"{current}, the model in use, is damaged: none will be in use")
        return found, None

    def _add_versions(self, folder: Path, place: Path) -> list[str]:
        added, reasons = [], []
        versions = sorted(folder.iterdir()) if folder.is_dir() else []
        for at, directory in enumerate(versions):
            self._progress("adding the models", at, len(versions))
            try:
                files = self._add_version(directory)
            except FileNotFoundError:
                continue  # pruned meanwhile
            except HeedError as error:
                if directory.exists():
                    reasons.append(error.detail)
                continue
            self.files |= {str(place / directory.name / name): at for name, at in files.items()}
            added.append(directory.name)
        self.left_out += [reason for reason in reasons if reason not in self.left_out]
        return added

    def _add_version(self, directory: Path) -> dict[str, tuple[int, str]]:
        manifest = read_manifest(directory)
        for name, (size, digest) in manifest.files.items():
            self.objects.link(directory / name, size, digest)
        return {**manifest.files, MANIFEST: self.objects.add(directory / MANIFEST)}


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


def _check_room(data: Path, target: Path) -> None:
    """Check that the stores fit: models are mostly linked, or in the previous backup."""
    need = 0
    for _, path in find_namespaces(data):
        for name in (STORE_FILE, f"{STORE_FILE}-wal", *BACKED_UP_FILES):
            need += (path / name).stat().st_size if (path / name).exists() else 0
    if data.stat().st_dev != target.stat().st_dev:
        objects = ObjectFolder(target)
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
