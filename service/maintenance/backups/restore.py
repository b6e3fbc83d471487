"""Restoration of a backup into an empty data directory."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from service.domain.errors import Corrupt, Incompatible, Invalid, NotFound, StoreFull
from service.maintenance.backups.backup_writer import BackupProgress
from service.maintenance.backups.directory_contents import digest_file
from service.maintenance.backups.manifest import (
    BackupManifest,
    NamespaceContent,
    read_backup_manifest,
)
from service.maintenance.backups.objects import ObjectFolder, copy_file, hash_file
from service.runtime import durable_files
from service.runtime.data_layout import (
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    STORE_FILE,
    UNFINISHED_RESTORE,
    namespace_folder,
)
from service.runtime.namespace_folders import ID_BYTES
from service.snapshots.versions.manifest import (
    MANIFEST,
    WRITE_ONCE,
    parse_manifest,
    read_file,
    unseal,
)
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.schema import SCHEMA_VERSION

# Finds what Heed never makes in a store.
_FOREIGN = (
    "SELECT name FROM sqlite_schema WHERE type NOT IN ('table', 'index')"
    # Not by CREATE VIRTUAL: a forged schema may have anything between the two words.
    " OR sql NOT LIKE 'CREATE TABLE %' AND sql NOT LIKE 'CREATE INDEX %'"
    " AND sql NOT LIKE 'CREATE UNIQUE INDEX %' LIMIT 1"
)
_ID = re.compile(rb"(?:[0-9a-f]{%d})?" % (2 * ID_BYTES))  # empty of an earlier Heed's
_IGNORED = {"lost+found"}  # of an empty directory that is the root of a file system


def verify(
    source: Path, *, progress: BackupProgress = lambda _stage, _done, _total: None
) -> BackupManifest:
    """Read a backup to the last byte, and return its manifest. Nothing is written.

    Raises:
        NotFound: as `read_backup_manifest`.
        Incompatible: as there; also for a store of a newer version of Heed.
        Corrupt: naming a file that is missing, damaged, or not what the manifest says.
    """
    manifest = read_backup_manifest(source)
    _check_schemas(source, manifest)
    objects, done = ObjectFolder(source), 0
    objects.check()
    paths = {digest: path for path, (_, digest) in manifest.files.items()}
    for size, digest in sorted(set(manifest.files.values())):
        try:
            found = hash_file(objects.path(digest))
        except FileNotFoundError:
            raise Corrupt(f"{source}: {paths[digest]} (objects/{digest}) is missing") from None
        if found != (size, digest):
            raise Corrupt(
                f"{source}: {paths[digest]} (objects/{digest}) is damaged: its SHA-256 is not "
                "that of the manifest"
            )
        done += size
        progress("verifying the backup", done, manifest.size)
    for name, content in manifest.namespaces.items():
        try:
            _check_content(manifest, objects, name, content)
        except (Corrupt, NotFound) as error:
            raise Corrupt(f"{source}: {name}: {error.detail}") from error
    return manifest


def restore(
    source: Path,
    data: Path,
    *,
    before_use: Callable[[Path, Path], None] | None = None,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> BackupManifest:
    """Restore the backup in the folder `source` into the empty directory `data`.

    Every byte is verified before the first is written, and again as it is copied; then the digests
    of the restored stores are compared with the manifest. Until all of this is done, `data` has a
    file by which Heed refuses to use it. A restore that fails leaves `data` empty.

    Args:
        source: the backup's folder, which stays as it is.
        data: a directory that is missing or empty.
        before_use: called with `data` and the directory of each namespace in it, when its content
            has been verified and before it may be used; deletes again what must not come back from
            a backup.
        progress: called as it proceeds.

    Raises:
        NotFound, Incompatible, Corrupt: as `verify`; Corrupt also for a store whose content is not
            that of the manifest.
        Invalid: `data` is not empty.
        StoreFull: the disk of `data` has too little room.
    """
    if data.exists() and (not data.is_dir() or _entries(data)):
        raise Invalid("", f"{data} must be empty or missing: a backup is never restored over data")
    manifest = verify(source, progress=progress)
    durable_files.make_directory(data)
    need = sum(size for size, _ in manifest.files.values())
    if (free := shutil.disk_usage(data).free) < need:
        raise StoreFull(
            f"the restore needs {need / 1e6:,.0f} MB, and the disk of {data} has "
            f"{free / 1e6:,.0f} MB free"
        )
    marker = data / UNFINISHED_RESTORE
    try:
        durable_files.replace(marker, b"This restore has not finished.\n")
        _copy(source, data, manifest, progress)
        for name, content in manifest.namespaces.items():
            progress(f"{name}: comparing the store with the manifest", 0, 0)
            folder = namespace_folder(data, name)
            # A migration may change ids; the bytes have been compared in any case.
            if content.schema == SCHEMA_VERSION:
                found = asyncio.run(digest_file(folder / STORE_FILE))
                # An earlier Heed has digested fewer tables.
                known = (content.digests or {}).items()
                if any(found.get(table) != digest for table, digest in known):
                    raise Corrupt(f"{source}: the content of {name} is not that of its manifest")
            if before_use is not None:
                before_use(data, folder)
    except BaseException:
        for path in _entries(data):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise
    marker.unlink()
    durable_files.sync_directory(data)
    return manifest


def _copy(source: Path, data: Path, manifest: BackupManifest, progress: BackupProgress) -> None:
    objects, done = ObjectFolder(source), 0
    total = sum(size for size, _ in manifest.files.values())
    folders = set()
    for place, expected in sorted(manifest.files.items()):
        path = data / place
        durable_files.make_directory(path.parent)
        folders.add(path.parent)
        # Versions of models are never written again.
        is_version = Path(place).parts[-4:-2] == (MODELS_FOLDER, "versions")
        mode = WRITE_ONCE if is_version else durable_files.PRIVATE_FILE
        if copy_file(objects.path(expected[1]), path, mode=mode) != expected:
            raise Corrupt(f"{source}: {place} changed while it was restored")
        done += expected[0]
        progress("restoring", done, total)
    for folder in folders:
        durable_files.sync_directory(folder)


def _check_schemas(source: Path, manifest: BackupManifest) -> None:
    for name, content in manifest.namespaces.items():
        if content.schema > SCHEMA_VERSION:
            raise Incompatible(
                f"{source}: the store of {name} has schema version {content.schema}, and this "
                f"Heed reads up to {SCHEMA_VERSION}. Restore it with Heed {manifest.heed} or newer"
            )


def _check_content(
    manifest: BackupManifest, objects: ObjectFolder, name: str, content: NamespaceContent
) -> None:
    """Check the files of a namespace against the content that the manifest states.

    Raises:
        Corrupt: they differ.
        Incompatible: its store is no file of Heed's, or a model of another version.
    """
    place = namespace_folder(Path(), name)

    def path(*parts: str) -> Path:
        file = str(place.joinpath(*parts))
        if file not in manifest.files:
            raise Corrupt(f"{file} is missing in its manifest")
        return objects.path(manifest.files[file][1])

    with read_store_file(path(STORE_FILE), immutable=True) as store:
        if store.schema != content.schema:
            raise Corrupt(f"its store has schema version {store.schema}, not {content.schema}")
        # Triggers and views would run, maybe without end, within reads and writes of Heed.
        found: str | None = store.connection.execute(_FOREIGN).get
        if found is not None:
            raise Corrupt(f"its store has {found[:80]!a}, which is no table or index of Heed's")
    if (file := str(place / NAMESPACE_ID_FILE)) in manifest.files:
        size, digest = manifest.files[file]
        if size > 2 * ID_BYTES or not _ID.fullmatch(objects.path(digest).read_bytes()):
            raise Corrupt(f"its {NAMESPACE_ID_FILE} holds no id that Heed makes")
    if content.model is not None:
        pointer = path(MODELS_FOLDER, "current")
        if unseal(read_file(pointer.parent, pointer.name), "current") != {"version": content.model}:
            raise Corrupt(f"its model in use is not {content.model}")
    for version in content.models:
        folder = place / MODELS_FOLDER / "versions" / version
        sealed = path(MODELS_FOLDER, "versions", version, MANIFEST)
        described = parse_manifest(read_file(sealed.parent, sealed.name), version).files
        stored = {
            Path(at).name: it for at, it in manifest.files.items() if Path(at).parent == folder
        }
        del stored[MANIFEST]
        if stored != described:
            raise Corrupt(f"the files of its model {version} are not those that it describes")


def _entries(data: Path) -> list[Path]:
    return [path for path in data.iterdir() if path.name not in _IGNORED]
