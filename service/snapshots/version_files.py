"""Files of a model version: sealed by a manifest, staged until they are whole, sent in chunks.

`manifest.json` names every file with its size and SHA-256, and is sealed: it carries the SHA-256 of
itself, and only one spelling of it is accepted. So a change of any byte in a version directory is
found, be it in a file, in a metric or in the white space of the manifest.

A directory of the staging area is locked by the process that writes it, so whatever is not locked
was left by one that was killed, however long ago, and may be removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from service.domain.errors import Busy, Corrupt, Incompatible, Invalid
from service.domain.timestamps import to_rfc3339
from service.runtime import durable_files
from service.stores.postgres.shared_files import CHUNK_BYTES, FileChunk

FORMAT = 1
MANIFEST = "manifest.json"
WRITE_ONCE = 0o400  # mode of the files of a version
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)

_TIMEOUT = 10.0  # seconds to wait for another process to finish changing a registry
_SEALED_LIMIT = 16 << 20  # bytes; a sealed file past this is none, and stays unread
# Errors of the kernel when the bytes or the entry are bad, rather than the process out of luck.
_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.EIO,
    errno.EUCLEAN,
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sealed description of one version. `files` maps a name to (bytes, SHA-256 in hex)."""

    version: str
    created: int  # microseconds UTC
    files: Mapping[str, tuple[int, str]]
    metadata: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


def seal(body: Mapping[str, Any]) -> bytes:
    """Encode as JSON with the SHA-256 of the rest in the field `sha256`.

    Raises:
        TypeError, ValueError: `body` has something that JSON has not, such as NaN.
    """
    body = json.loads(_spell(body))  # tuples become lists, keys strings: what a reader will see
    digest = hashlib.sha256(_spell(body)).hexdigest()
    return _spell({**body, "sha256": digest})


def unseal(data: bytes | bytearray, name: str) -> dict[str, Any]:
    """Decode and verify what `seal` encoded.

    Raises `Corrupt`: any byte differs from what `seal` wrote; the message names `name`.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        del body["sha256"]
        intact = seal(body) == data
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise Corrupt(f"{name}: its checksum does not match its content")
    return body


def check_files(files: Collection[str]) -> None:
    """Raise `Invalid` for what no version directory may hold."""
    if not files:
        raise Invalid("/files", "a version has at least one file")
    for name in files:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise Invalid(
                "/files",
                f"a file name is 1 to 128 of A-Z, a-z, 0-9, '.', '_' and '-', the first a letter "
                f"or digit, and not {MANIFEST}; not {name[:80]!r}",
            )


def compose(manifest: Manifest) -> bytes:
    """Encode `manifest.json`. Raises `Invalid`: the metadata are not JSON, or too large."""
    body = {
        "format": FORMAT,
        "version": manifest.version,
        "created": manifest.created,
        "count": len(manifest.files),
        "files": {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in manifest.files.items()
        },
    }
    try:
        data = seal({**body, "metadata": dict(manifest.metadata)})
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid("/metadata", f"must be JSON: {error}") from error
    if len(data) > _SEALED_LIMIT:
        raise Invalid("/metadata", f"may have at most {_SEALED_LIMIT} bytes as JSON")
    return data


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a version directory, and check the names and sizes of its files.

    The contents of the files are not read: see `read_files`. Raises as `parse_manifest`, and
    `Corrupt` for a file that is missing, of another size, or one too many.
    """
    manifest = parse_manifest(read_file(directory, MANIFEST), directory.name)
    _check_entries(directory, manifest.files)
    return manifest


def parse_manifest(data: bytes | bytearray, version: str) -> Manifest:
    """Decode and verify the manifest of a version.

    Raises `Corrupt` for a damaged one or another version's, and `Incompatible` if another version
    of this program wrote it.
    """
    name = f"{version}/{MANIFEST}"
    body = unseal(data, name)
    if body.get("format") != FORMAT:
        raise Incompatible(f"{name}: its format is {body.get('format')!r}, and {FORMAT} is known")
    try:
        files = {
            key: (int(file["size"]), str(file["sha256"])) for key, file in body["files"].items()
        }
        check_files(files)
        manifest = Manifest(body["version"], int(body["created"]), files, dict(body["metadata"]))
        to_rfc3339(manifest.created)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Corrupt(f"{name}: it is sealed, but it is not a manifest") from None
    if manifest.version != version:
        raise Corrupt(f"{name}: it describes the version {manifest.version!r}")
    return manifest


def read_files(directory: Path, manifest: Manifest) -> Iterator[tuple[str, bytearray]]:
    """Yield each file's name and verified bytes, which the caller may view and keep.

    Raises `Corrupt`: naming the file whose bytes are not those that were published.
    """
    for name, (size, digest) in manifest.files.items():
        data = read_file(directory, name, size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise Corrupt(f"{directory.name}/{name}: its SHA-256 does not match the manifest")
        yield name, data


def read_file(directory: Path, name: str, size: int | None = None) -> bytearray:
    """Read a regular file of `size` bytes, or of any size that a sealed file may have.

    Raises:
        Corrupt: it is missing, not regular, of another size, or the disk cannot read it.
        OSError: this process failed, not the file: no permission, no descriptors left.
    """
    # O_NOFOLLOW: a link must not lead outside. O_NONBLOCK: a planted FIFO must not hang the reader.
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _check_status(directory, name, status, size)
            if size is None and status.st_size > _SEALED_LIMIT:
                raise Corrupt(f"{directory.name}/{name}: {status.st_size} bytes are too many")
            data = bytearray(status.st_size)
            del data[file.readinto(data) :]  # it has become shorter meanwhile
            return data
    except OSError as error:
        if error.errno in _DAMAGE:
            raise Corrupt(f"{directory.name}/{name}: {error.strerror}") from error
        raise


def signature(directory: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Return a value that differs after any change of an entry of `directory`."""
    with os.scandir(directory) as entries:
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(
        sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
    )


def _check_entries(directory: Path, files: Mapping[str, tuple[int, str]]) -> None:
    with os.scandir(directory) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    found.pop(MANIFEST, None)
    for name, (size, _) in files.items():
        status = found.pop(name, None)
        if status is None:
            raise Corrupt(f"{directory.name}/{name}: the file is missing")
        _check_status(directory, name, status, size)
    for name in sorted(found):
        raise Corrupt(f"{directory.name}/{ascii(name)[1:-1]}: the file is not in the manifest")


def _check_status(directory: Path, name: str, status: os.stat_result, size: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Corrupt(f"{directory.name}/{name}: it is not a regular file")
    if size is not None and status.st_size != size:
        raise Corrupt(f"{directory.name}/{name}: {status.st_size} bytes, and {size} were published")


def _spell(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


class Staging:
    """The directory `root/staging`, and the lock `root/lock` under which `root` changes.

    A full disk is StoreFull, in whatever is done inside `new` and `locked`.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "staging"
        self._lock = root / "lock"
        durable_files.make_directory(self._path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of `root`. Raises Busy when another kept it for `_TIMEOUT`."""
        with (
            contextlib.ExitStack() as stack,
            durable_files.translate_disk_full("the disk of the model registry is full"),
        ):
            try:
                stack.enter_context(durable_files.locked(self._lock, _TIMEOUT))
            except TimeoutError as error:
                raise Busy("another process is changing the model registry") from error
            yield

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """Create an empty directory to fill and rename; it is deleted where it was not renamed."""
        path = self._path / uuid.uuid4().hex
        with contextlib.ExitStack() as stack:
            with self.locked():  # no cleaner may see it before it is locked
                path.mkdir(durable_files.PRIVATE_DIRECTORY)
                stack.enter_context(durable_files.locked(path, 0, directory=True))
            stack.callback(shutil.rmtree, path, ignore_errors=True)  # still locked
            with durable_files.translate_disk_full("the disk of the model registry is full"):
                yield path

    def discard(self, path: Path) -> None:
        """Take a directory away atomically; `clean` frees its space. Call it under the lock."""
        os.rename(path, self._path / uuid.uuid4().hex)
        durable_files.sync_directory(path.parent)

    def clean(self) -> None:
        """Delete what no process is writing; skipped while another process has the lock."""
        with contextlib.suppress(TimeoutError), durable_files.locked(self._lock, 0):
            for path in list(self._path.iterdir()):
                # Gone, or no directory: the one was removed by its owner, the other is not ours.
                with (
                    contextlib.suppress(FileNotFoundError, NotADirectoryError, TimeoutError),
                    durable_files.locked(path, 0, directory=True),
                ):
                    shutil.rmtree(path, ignore_errors=True)


def send_files(directory: Path, manifest: Manifest) -> Iterator[FileChunk]:
    """Yield the files of a version directory in chunks, verified by the end of each file.

    Raises `Corrupt`: naming the file that is missing, or not what was published.
    """
    for name, (_, digest) in manifest.files.items():
        path = f"{manifest.version}/{name}"
        hasher = hashlib.sha256()
        try:
            descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise Corrupt(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            is_first = True
            while (data := file.read(CHUNK_BYTES)) or is_first:  # an empty file is one chunk
                hasher.update(data)
                is_first = False
                yield name, data
        if hasher.hexdigest() != digest:
            raise Corrupt(f"{path}: its SHA-256 does not match the manifest")


def receive_files(directory: Path, manifest: Manifest, chunks: Iterable[FileChunk]) -> None:
    """Write the files of a version from chunks, durable but for their directory entries.

    Raises `Corrupt`: naming the file whose bytes are not those of the manifest.
    """
    for name, parts in groupby(check_chunks(manifest, chunks), key=itemgetter(0)):
        with durable_files.create(directory / name, mode=WRITE_ONCE) as file:
            for _, data in parts:
                file.write(data)


def check_chunks(manifest: Manifest, chunks: Iterable[FileChunk]) -> Iterator[FileChunk]:
    """Yield the chunks of a version's files; a file is verified by the end of its last one.

    Raises `Corrupt`: naming the file whose bytes are not those of the manifest.
    """
    missing = dict(manifest.files)
    for name, parts in groupby(chunks, key=itemgetter(0)):
        if name not in missing:
            raise Corrupt(f"{manifest.version}/{name[:80]!r}: the file is not in the manifest")
        left, digest = missing.pop(name)
        hasher = hashlib.sha256()
        for _, data in parts:
            left -= len(data)
            if left < 0:
                break
            hasher.update(data)
            yield name, data
        if left or hasher.hexdigest() != digest:
            raise Corrupt(
                f"{manifest.version}/{name}: what was fetched does not match the manifest"
            )
    for name in missing:
        raise Corrupt(f"{manifest.version}/{name}: it was not fetched, for it is missing")
