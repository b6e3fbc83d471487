"""Files of derived data, found by what they were made of: a damaged one is as good as none.

Readers can make the content again, and losing it costs time only. A file is named by a
digest of everything that its content depends on, so that a stale one is never found, and begins
with a checksum of its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 32


class CacheFiles:
    """Checksummed files in one folder; those that were used last are kept.

    Processes may share the folder, which the first `write` creates: a file is replaced as a whole.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most

    def read(self, key: str) -> NDArray[np.uint8] | None:
        """Return the bytes written under a key; None without any, or if they are damaged."""
        path = self._folder / key
        try:
            with path.open("rb") as file:
                checksum = file.read(_CHECKSUM_BYTES)
                # Read and not mapped: a file truncated meanwhile would be a SIGBUS.
                data = np.fromfile(file, np.uint8)
            if checksum == hashlib.sha256(data.data).digest():
                os.utime(path)  # by which the ones used last are known
                return data
            _log.warning("%s is damaged, and is made again", path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s cannot be read, and is made again: %s", path, error)
        return None

    def write(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes under a key, and remove the files that were used longest ago.

        If that is not possible, the log says so, and the bytes are made again another time.
        """
        try:
            self.put(key, [hashlib.sha256(data.data).digest(), data.data])
        except OSError as error:
            _log.warning("%s was not written: %s", self._folder / key, error)

    def building(self, key: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Enter before the bytes of a key are made: others who would make them wait, if any can."""
        return nullcontext()

    def put(self, key: str, content: Iterable[bytes | memoryview]) -> None:
        """Keep a whole file under a key, checksum included, and remove the oldest ones.

        Raises what `content` raises, and OSError.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # Not synchronised: what a power loss leaves of it fails its checksum.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self._folder) as temporary:
            new = Path(temporary, key)
            with new.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)  # as the store, whose items it may hold
                for part in content:
                    file.write(part)
            new.replace(self._folder / key)
        self._remove_old()

    def content(self, key: str, size: int) -> Iterator[bytes]:
        """Yield the whole file of a key, checksum included, in parts of a size. Raises OSError."""
        with (self._folder / key).open("rb") as file:
            while part := file.read(size):
                yield part

    def _remove_old(self) -> None:
        used = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                if path.is_file():
                    used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used, reverse=True)[self._most :]:
            path.unlink(missing_ok=True)
