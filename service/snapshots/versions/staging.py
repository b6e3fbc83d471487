"""A directory for files that are incomplete, or about to be deleted.

A directory here is locked by the process that writes it, so whatever is not locked was left by one
that was killed, however long ago, and may be removed.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from service.domain.errors import Busy
from service.runtime import durable_files


class Staging:
    """The directory `root/staging`, and the lock `root/lock` under which `root` changes.

    A full disk is StoreFull, in whatever is done inside `new` and `locked`.

    Args:
        timeout: seconds to wait for the lock.
    """

    def __init__(self, root: Path, timeout: float) -> None:
        self._path = root / "staging"
        self._lock = root / "lock"
        self._timeout = timeout
        durable_files.make_directory(self._path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of `root`. Raises Busy when another kept it for `timeout`."""
        with (
            contextlib.ExitStack() as stack,
            durable_files.translate_disk_full("the disk of the model registry is full"),
        ):
            try:
                stack.enter_context(durable_files.locked(self._lock, self._timeout))
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
