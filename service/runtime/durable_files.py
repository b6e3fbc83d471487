"""Files that survive kill -9 and power loss, and locks that are released with their holder.

The order is always the same: write, fsync the file, rename, fsync the directory. A mere rename is
atomic to readers but not durable, and without the first fsync it may survive a power loss while
the bytes it points to do not.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from service.domain.errors import StoreFull

# Histories are personal data: only their owner may open files and directories, whatever the umask.
PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents durably: they survive a power loss.

    Only their owner can enter new directories; existing ones keep their mode.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    path.mkdir(PRIVATE_DIRECTORY, exist_ok=True)  # raises FileExistsError for a file
    for directory in missing:
        sync_directory(directory.parent)


def write(path: Path, data: bytes | bytearray, *, mode: int = PRIVATE_FILE) -> None:
    """Write a file and fsync it. Its directory entry is durable only after `sync_directory`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        left = memoryview(data)
        while left:  # one call writes at most 2 GiB on Linux
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def create(path: Path, *, mode: int = PRIVATE_FILE) -> Iterator[BinaryIO]:
    """Yield a new file, which is fsynced at the end. Its entry is durable as that of `write`.

    Raises:
        FileExistsError: there is one already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make renames, creations and removals in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes, *, modified: int | None = None) -> None:
    """Replace the content of `path` atomically and durably: readers see the old or the new.

    One writer per path at a time. `modified` sets the modification time (nanoseconds).
    """
    temporary = path.with_name(path.name + ".tmp")
    write(temporary, data)
    if modified is not None:
        os.utime(temporary, ns=(modified, modified))
    os.replace(temporary, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, complete and durable, when the block ends.

    If the block raises, `path` stays as it was. One writer per path at a time.

    Raises:
        StoreFull: the disk is full.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with (
            translate_disk_full(f"there is no room to write {path}"),
            open(temporary, "wb", opener=partial(os.open, mode=PRIVATE_FILE)) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def try_lock(path: Path, *, directory: bool = False) -> int | None:
    """Lock the file `path` (created when missing) exclusively; None if the lock is taken.

    None as well on a disk that can only be read, where there is nothing to guard.

    With `directory`, it is a directory that exists. The returned descriptor is the lock: it is held
    until every copy is closed, explicitly or by the end of the processes that have it, so that a
    lock never outlives its holders. Threads of one process exclude each other as processes do.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if directory else os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.EROFS:
            return None
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


@contextlib.contextmanager
def locked(path: Path, timeout: float, *, directory: bool = False) -> Iterator[None]:
    """Hold the lock of `try_lock` on `path`, waiting for at most `timeout` seconds.

    Raises:
        TimeoutError: another process or thread kept the lock for all of that time.
    """
    deadline = time.monotonic() + timeout
    while (descriptor := try_lock(path, directory=directory)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} stayed locked for {timeout:g} s")
        time.sleep(0.01)
    try:
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def translate_disk_full(detail: str) -> Iterator[None]:
    """Raise `StoreFull` with `detail` in place of the OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreFull(detail) from error
        raise
