"""Files of a backup, named by the SHA-256 of their content, so that each is stored once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from service.domain.errors import Corrupt
from service.runtime import durable_files

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
        """Return the path of an object."""
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
        new = self.incoming / "file"
        size, digest = copy_file(file, new)
        self.take(new, digest)
        return size, digest

    def add_chunks(self, chunks: Iterable[bytes]) -> tuple[int, str]:
        """Write a file of these bytes durably; return its size and SHA-256."""
        new = self.incoming / "file"
        new.unlink(missing_ok=True)
        hashed, size = hashlib.sha256(), 0
        with (
            durable_files.translate_disk_full(f"there is no room to write {new}"),
            durable_files.create(new) as file,
        ):
            for chunk in chunks:
                file.write(chunk)
                hashed.update(chunk)
                size += len(chunk)
        self.take(new, hashed.hexdigest())
        return size, hashed.hexdigest()

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
        """Make the names of all objects durable."""
        durable_files.sync_directory(self._objects)

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove all other objects."""
        for path in list(self._objects.iterdir()):
            if path.name not in digests:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.incoming.rmdir()


def copy_file(
    source: Path, target: Path, *, mode: int = durable_files.PRIVATE_FILE
) -> tuple[int, str]:
    """Copy a file to a new one and fsync it; return the size and the SHA-256 of what was copied."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        _open(source) as read,
        durable_files.translate_disk_full(f"there is no room to write {target}"),
        os.fdopen(os.open(target, flags, mode), "wb") as file,
    ):
        hashed, size = hashlib.sha256(), 0
        for chunk in _chunks(read):
            file.write(chunk)
            hashed.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, hashed.hexdigest()


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    hashed, size = hashlib.sha256(), 0
    with _open(path) as file:
        for chunk in _chunks(file):
            hashed.update(chunk)
            size += len(chunk)
    return size, hashed.hexdigest()


def _open(path: Path) -> BinaryIO:
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


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
