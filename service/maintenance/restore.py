"""Restoration of a backup into an empty data directory or database, and drills of it."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from service.domain.errors import Conflict, Corrupt, Incompatible, Invalid, NotFound, StoreFull
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.settings import PREFIX, Settings
from service.domain.timestamps import to_rfc3339
from service.jobs.job_records import KEPT, parse_job
from service.maintenance.backup import digest_file
from service.maintenance.backup_manifest import (
    BackupManifest,
    BackupProgress,
    NamespaceContent,
    ObjectFolder,
    copy_file,
    hash_file,
    read_backup_manifest,
)
from service.maintenance.copying import copy_store
from service.questions.asked import RecommendIn
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    ID_BYTES,
    JOBS_FOLDER,
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    STORE_FILE,
    UNFINISHED_RESTORE,
    namespace_folder,
    namespace_id,
)
from service.snapshots.registry import Registry
from service.snapshots.shared_registry import KIND
from service.snapshots.text_embeddings import is_folder
from service.snapshots.version_files import (
    MANIFEST,
    WRITE_ONCE,
    parse_manifest,
    read_file,
    read_manifest,
    send_files,
    unseal,
)
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
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.database_file import read_store_file
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore

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
    for name, content in manifest.namespaces.items():
        if content.schema > SCHEMA_VERSION:
            raise Incompatible(
                f"{source}: the store of {name} has schema version {content.schema}, and this "
                f"Heed reads up to {SCHEMA_VERSION}. Restore it with Heed {manifest.heed} or newer"
            )
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
        try:  # a store that is no file of Heed's, or a model of another version, is Incompatible
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
        source: the backup's folder, which is only read.
        data: a directory that is missing or empty.
        before_use: called with `data` and the directory of each verified namespace in it, to delete
            again what must not come back from a backup.

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


def _check_content(
    manifest: BackupManifest, objects: ObjectFolder, name: str, content: NamespaceContent
) -> None:
    """Check the files of a namespace against the content that the manifest states."""
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
        source: the backup's folder, which is only read.
        url: of the database: new, or without any record, model or further namespace.
        data: the data directory of this machine, to which come what search was fitted to and the
            stored embeddings, unless they are there.
        work: where a temporary directory takes the size of the backup.
        before_use: as of `restore`, for the temporary directory.

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
            copied = await copy_store(
                source,
                target,
                f"the namespace {name} of the {backup}",
                progress=lambda stage, done, of: progress(f"{name}: {stage}", done, of),
            )
            if copied.differing:
                differing = ", ".join(copied.differing)
                raise Corrupt(
                    f"{name}: the database differs from the backup in {differing}: restore into "
                    "another database"
                )
        finally:
            await source.close()

    try:
        asyncio.run(run())
        _restore_models(name, folder / MODELS_FOLDER, target.shared.files(KIND), progress)
        jobs = target.shared.jobs
        for path in sorted((folder / JOBS_FOLDER).glob("*.json")):
            document = path.read_bytes()
            jobs.add(path.stem, document, KEPT)
            # One that ran when the backup was made is marked as interrupted by the next training.
            jobs.write(path.stem, document, has_ended=parse_job(path.stem, document).is_final)
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


def _restore_files(manifest: BackupManifest, folder: Path, url: str, data: Path) -> None:
    """Copy the files that only this machine has, and that can be made again."""
    directory = open_directory(data, url)
    try:
        for name in manifest.namespaces:
            source, target = namespace_folder(folder, name), directory.find(name)
            durable_files.make_directory(target)
            for file in BACKED_UP_FILES:
                if (source / file).exists() and not (target / file).exists():
                    copy_file(source / file, target / file)
    finally:
        directory.close()


class DrillResult(NamedTuple):
    """A drill that succeeded. `answers` has the number of recommended items by namespace."""

    manifest: BackupManifest
    answers: dict[str, int]
    seconds: float


def drill(
    source: Path,
    settings: Settings,
    *,
    work: Path | None = None,
    progress: BackupProgress = lambda _stage, _done, _total: None,
) -> DrillResult:
    """Restore a backup into a temporary directory, recommend from each namespace, and remove it.

    It has the settings of the service, but the text encoder of the manifest.

    Raises:
        NotFound, Incompatible, Corrupt, StoreFull: as `restore`; Corrupt also if the service does
            not serve the model that the manifest names.
        Invalid: the manifest names a folder for the text encoder, and the settings another.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="heed-drill-", dir=work) as temporary:
        data = Path(temporary, "data")
        manifest = restore(source, data, progress=progress)
        encoder = manifest.settings.get("encoder", settings.encoder)
        if is_folder(encoder) and encoder != settings.encoder:  # a forged one may name any
            raise Invalid(
                "",
                f"the backup was served with the text encoder in the folder {encoder}: set "
                f"{PREFIX}ENCODER to it, if it is yours, and run the drill again",
            )
        answers = {}
        for name, content in manifest.namespaces.items():
            progress(f"{name}: answering a question", 0, 0)
            folder = namespace_folder(data, name)
            used = Settings.read(
                {**settings.model_dump(), "data": folder, "store": "", "encoder": encoder}
            )
            answers[name], model = asyncio.run(_recommend(used))
            if content.model not in (None, model):
                raise Corrupt(f"{source}: {name} serves the model {model}, not {content.model}")
    return DrillResult(manifest, answers, time.monotonic() - started)


async def _recommend(settings: Settings) -> tuple[int, str]:
    """Recommend for one user of the store, or for nobody; return the number of items, the model."""
    # A restore needs neither models nor torch.
    from service.engine.engine import open_engine
    from service.engine.recommend import recommend_items

    engine = await open_engine(settings)
    try:
        question = RecommendIn(user_id=await engine.typical_user(), limit=10)
        answer = await engine.ask(recommend_items, question)
    finally:
        await engine.close()
    return len(answer["items"]), answer["model_version"]
