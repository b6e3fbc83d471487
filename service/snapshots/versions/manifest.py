"""The sealed description of a version directory, and the check of every byte against it.

`manifest.json` names every file with its size and SHA-256, and is sealed: it carries the SHA-256
of itself, and only one spelling of it is accepted. So a change of any byte in a version directory
is found, be it in a file, in a metric or in the white space of the manifest.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.domain.errors import Corrupt, Incompatible, Invalid
from service.domain.timestamps import to_rfc3339

FORMAT = 1
MANIFEST = "manifest.json"
WRITE_ONCE = 0o400  # mode of the files of a version
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)

_SEALED_LIMIT = 16 << 20  # bytes; a sealed file past this is none, and stays unread
# What the kernel says when the bytes or the entry are bad, rather than the process out of luck.
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

    Raises:
        Corrupt: any byte differs from what `seal` wrote; the message names `name`.
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
    """Refuse what no version directory may hold. Raises Invalid."""
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
    """Encode `manifest.json`.

    Raises:
        Invalid: the metadata are not JSON, or too large.
    """
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

    The contents of the files are not read: see `read_files`.

    Raises:
        Corrupt: naming the file that is damaged, missing, of another size, or one too many.
        Incompatible: another version of this program wrote it.
    """
    manifest = parse_manifest(read_file(directory, MANIFEST), directory.name)
    _check_entries(directory, manifest.files)
    return manifest


def parse_manifest(data: bytes | bytearray, version: str) -> Manifest:
    """Decode and verify the manifest of a version.

    Raises:
        Corrupt: it is damaged, or another version's.
        Incompatible: another version of this program wrote it.
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

    Raises:
        Corrupt: naming the file whose bytes are not those that were published.
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
