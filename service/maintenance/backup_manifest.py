"""Files of a backup: objects, and the sealed manifest that says what they are.

A backup is a folder: `objects/`, where each file is named by the SHA-256 of its content, and
`backup.json`, which is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from service.domain.errors import Corrupt, Incompatible, NotFound
from service.domain.names import DEFAULT_NAMESPACE, NAME_PATTERN, NAME_RULE, is_name
from service.domain.timestamps import MAX_TIMESTAMP
from service.runtime import durable_files
from service.runtime.data_layout import (
    BACKED_UP_FILES,
    JOBS_FOLDER,
    MODELS_FOLDER,
    NAMESPACE_ID_FILE,
    NAMESPACES_FOLDER,
    STORE_FILE,
)
from service.snapshots.version_files import FILE_NAME, read_file, seal, unseal
from service.stores.store_digest import TableDigest

FileEntry = dict[str, tuple[int, str]]  # size and SHA-256 by name

_CHUNK = 1 << 20  # bytes read at once


class ObjectFolder:
    """The objects of the backup in `folder`; `incoming/` beside them holds incomplete files."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "objects"
        self.incoming = folder / "incoming"

    def prepare(self) -> None:
        """Create the folders, and remove leftovers of an interrupted backup. Raises `Corrupt`."""
        self.check()
        shutil.rmtree(self.incoming, ignore_errors=True)
        durable_files.make_directory(self._objects)
        durable_files.make_directory(self.incoming)

    def check(self) -> None:
        """Refuse folders that lead elsewhere. Raises `Corrupt`."""
        for folder in (self._objects, self.incoming):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                raise Corrupt(f"{folder} must be a folder, and no link: Heed makes no such backup")

    def path(self, digest: str) -> Path:
        return self._objects / digest

    def has(self, digest: str, size: int) -> bool:
        """Report whether an object of this size is there. Its content is not read."""
        try:
            status = self.path(digest).lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size

    def add(self, file: Path) -> tuple[int, str]:
        """Copy a file durably; return its size and SHA-256.

        The copy is of one moment if the file is replaced by renaming, as all files of a data
        directory are, rather than overwritten.
        """
        with _open(file) as read:
            return self.add_chunks(_chunks(read))

    def add_chunks(self, chunks: Iterable[bytes]) -> tuple[int, str]:
        """Write a file of these bytes durably; return its size and SHA-256."""
        new = self.incoming / "file"
        new.unlink(missing_ok=True)
        size, digest = _write(new, chunks)
        self.take(new, digest)
        return size, digest

    def link(self, file: Path, size: int, digest: str) -> None:
        """Store a file that is never overwritten and whose SHA-256 is known: linked, or copied.

        Raises:
            Corrupt: the file's content is not of this size and SHA-256.
        """
        if self.has(digest, size):
            return
        new = self.incoming / "file"
        try:
            os.link(file, new, follow_symlinks=False)
            found = hash_file(new)
        except OSError:  # another file system, or one without links
            new.unlink(missing_ok=True)
            found = copy_file(file, new)
        if found != (size, digest):
            new.unlink(missing_ok=True)
            raise Corrupt(f"{file.parent.name}/{file.name}: it is not what was published")
        self.take(new, digest)

    def take(self, file: Path, digest: str) -> None:
        """Move a file of `incoming`, which is on disk, among the objects."""
        os.replace(file, self.path(digest))

    def sync(self) -> None:
        durable_files.sync_directory(self._objects)

    def keep_only(self, digests: Collection[str]) -> None:
        for path in list(self._objects.iterdir()):
            if path.name not in digests:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.incoming.rmdir()


def copy_file(
    source: Path, target: Path, *, mode: int = durable_files.PRIVATE_FILE
) -> tuple[int, str]:
    """Copy a file to a new one and fsync it; return the size and the SHA-256 of what was copied."""
    with _open(source) as read:
        return _write(target, _chunks(read), mode=mode)


def _write(
    target: Path, chunks: Iterable[bytes], *, mode: int = durable_files.PRIVATE_FILE
) -> tuple[int, str]:
    hashed, size = hashlib.sha256(), 0
    with (
        durable_files.translate_disk_full(f"there is no room to write {target}"),
        durable_files.create(target, mode=mode) as file,
    ):
        for chunk in chunks:
            file.write(chunk)
            hashed.update(chunk)
            size += len(chunk)
    return size, hashed.hexdigest()


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    with _open(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _open(path: Path) -> BufferedReader:
    """Open a regular file: a link may lead elsewhere, and a device has no end."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO, errno.EISDIR}:
            raise Corrupt(f"{path} must be a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Corrupt(f"{path} must be a regular file")
    return file


def _chunks(file: BufferedReader) -> Iterable[bytes]:
    return iter(partial(file.read, _CHUNK), b"")


# Called with the stage, and the bytes done of all; (stage, 0, 0) if they are not known.
BackupProgress = Callable[[str, int, int], None]

BACKUP_FILE = "backup.json"
FORMAT = 1

_TEXT_LIMIT = 1_000  # characters of what is printed
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PLACE = re.compile(
    rf"(?:{NAMESPACES_FOLDER}/(?P<namespace>{NAME_PATTERN.pattern})/)?"
    rf"(?:{'|'.join(map(re.escape, (STORE_FILE, NAMESPACE_ID_FILE, *BACKED_UP_FILES)))}"
    rf"|{JOBS_FOLDER}/{NAME_PATTERN.pattern}\.json"
    rf"|(?P<pointer>{MODELS_FOLDER}/current)"
    rf"|{MODELS_FOLDER}/versions/(?P<version>{NAME_PATTERN.pattern})/{FILE_NAME.pattern})",
    re.ASCII,
)


def _check_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text[:80]!a} is no name: {NAME_RULE}")
    return text


def _check_text(text: str) -> str:
    """Refuse what a terminal would interpret."""
    if not text.isprintable() or len(text) > _TEXT_LIMIT:
        raise ValueError(f"must be at most {_TEXT_LIMIT} printable characters")
    return text


def _check_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    if "encoder" in settings:
        if not isinstance(settings["encoder"], str):
            raise ValueError("encoder must be a text")
        _check_text(settings["encoder"])
    return settings


def _file(entry: Any) -> tuple[int, str]:
    match entry:
        case {"size": int(size), "sha256": str(digest)} if size >= 0 and _SHA256.fullmatch(digest):
            return size, digest
    raise ValueError("must have a size in bytes and a SHA-256 in hex")


_Name = Annotated[str, AfterValidator(_check_name)]
_File = Annotated[
    tuple[int, str],
    PlainValidator(_file),
    PlainSerializer(lambda entry: {"size": entry[0], "sha256": entry[1]}),
]
_Digest = Annotated[TableDigest, PlainSerializer(TableDigest._asdict)]


@dataclass(frozen=True, slots=True)
class NamespaceContent:
    """Content of the store of one namespace."""

    schema: Annotated[int, Field(ge=1)]  # version of the store's schema
    model: _Name | None  # the version in use
    models: tuple[_Name, ...]
    # By table; None where the schema was older than the Heed that made the backup.
    digests: Mapping[_Name, _Digest] | None


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """Description of a backup. `files` maps paths in the data directory to (bytes, SHA-256)."""

    # Microseconds UTC; the content is as of a later moment.
    created: Annotated[int, Field(ge=0, le=MAX_TIMESTAMP)]
    heed: Annotated[str, AfterValidator(_check_text)]  # version of the Heed that made it
    files: Mapping[str, _File]
    namespaces: Mapping[_Name, NamespaceContent]
    # Settings with which the data were made: `encoder`, `embedding_dim`, …
    settings: Annotated[Mapping[str, Any], AfterValidator(_check_settings)]
    left_out: tuple[str, ...] = ()  # model versions that were damaged already, with the reason

    @property
    def size(self) -> int:
        """Bytes of all distinct files."""
        return sum({digest: size for size, digest in self.files.values()}.values())

    def write(self, folder: Path) -> None:
        """Replace the manifest in the backup's folder atomically and durably."""
        body = {"format": FORMAT, **_MANIFEST.dump_python(self)}
        durable_files.replace(folder / BACKUP_FILE, seal(body))


def read_backup_manifest(folder: Path) -> BackupManifest:
    """Read the manifest of the backup in a folder, and check every field of it.

    The seal detects damage, not forgery: names and places are checked here, once for all
    callers. The backup's files are not looked at.

    Raises:
        NotFound: the folder is missing, or has no complete backup.
        Corrupt: the manifest is damaged or forged.
        Incompatible: another version of Heed wrote it in a format that this one cannot read.
    """
    path = folder / BACKUP_FILE
    if not path.exists():
        raise NotFound(
            f"{folder} holds no complete backup: there is no {BACKUP_FILE}, which is written last"
        )
    data = read_file(folder, BACKUP_FILE)
    body = unseal(data, str(path))
    if body.get("format") != FORMAT:
        raise Incompatible(
            f"{path} has format {_shown(body.get('format'))}, and this Heed reads {FORMAT}. "
            f"Restore it with the version of Heed that wrote it: {_shown(body.get('heed'))}"
        )
    try:
        manifest = _MANIFEST.validate_json(bytes(data), strict=True)
        _check_places(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "/".join(str(part) for part in first["loc"])
        raise Corrupt(_refusal(path, f"{_shown(place)}: {first['msg']}")) from None
    except ValueError as error:
        raise Corrupt(_refusal(path, str(error))) from None
    return manifest


_MANIFEST = TypeAdapter(BackupManifest)


def _check_places(manifest: BackupManifest) -> None:
    """Check that the files match the namespaces. Raises ValueError."""
    if DEFAULT_NAMESPACE not in manifest.namespaces:
        raise ValueError(f"namespaces: {DEFAULT_NAMESPACE} is missing")
    stores, pointers = set(), set()
    versions: dict[str, set[str]] = {name: set() for name in manifest.namespaces}
    for place in manifest.files:
        match = _PLACE.fullmatch(place)
        name = match and (match["namespace"] or DEFAULT_NAMESPACE)
        if not match or match["namespace"] == DEFAULT_NAMESPACE or name not in versions:
            raise ValueError(f"files: {_shown(place)} is not a place of a file of its namespaces")
        if place.endswith(STORE_FILE):
            stores.add(name)
        if match["pointer"]:
            pointers.add(name)
        if match["version"]:
            versions[name].add(match["version"])
    for name, content in manifest.namespaces.items():
        if name not in stores:
            raise ValueError(f"files: the store of the namespace {name} is missing")
        if versions[name] != {*content.models}:
            raise ValueError(f"files: the models of the namespace {name} are not those it names")
        is_known = content.model in (None, *content.models)
        if not is_known or (content.model is not None) != (name in pointers):
            raise ValueError(f"namespaces/{name}: the model in use is none of its models")


def _shown(value: object) -> str:
    return ascii(value)[:120]


def _refusal(path: Path, problem: str) -> str:
    return f"{path} is sealed, but it is no manifest that Heed writes: {problem}. Use another one"
