"""Arrays that one of several forked processes makes, and all of them map."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes
_UNPUBLISHED = 0


class SharedArrays:
    """Named arrays in a file in memory, published once; create it before the processes are forked.

    A process claims the file before it makes the arrays. The claim ends with the process, so that
    another one can make them where the first was killed.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("heed-shared", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        # Bytes of the published arrays, behind which their description stands.
        self._size = memoryview(mmap.mmap(-1, 8)).cast("q")

    @property
    def is_published(self) -> bool:
        """True once `arrays` can be called."""
        return self._size[0] != _UNPUBLISHED

    def claim(self) -> bool:
        """Try to become the process that makes the arrays; `release` ends the claim.

        False while another process has claimed them, and once they are published.
        """
        try:
            # A POSIX lock, which belongs to the process: forked ones share the open file.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        if self.is_published:
            self.release()
            return False
        return True

    def release(self) -> None:
        """End the claim of this process."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def publish(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Publish the arrays, under the claim. Raises OSError where memory is missing."""
        os.ftruncate(self._file, 0)  # of a process that was killed
        described, end = {}, _ALIGNMENT
        for name, array in arrays.items():
            described[name] = (array.dtype.str, array.shape, end)
            self._write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._write(memoryview(orjson.dumps(described)), end)
        self._size[0] = end

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the published arrays, which cannot be written to and take no memory of their own.

        Raises RuntimeError before they are published.
        """
        if not self.is_published:
            raise RuntimeError("not published")
        end = self._size[0]
        described = orjson.loads(os.pread(self._file, os.fstat(self._file).st_size - end, end))
        mapping = mmap.mmap(self._file, end, access=mmap.ACCESS_READ)
        return {
            name: np.ndarray(shape, np.dtype(kind), mapping, offset)
            for name, (kind, shape, offset) in described.items()
        }

    def _write(self, data: memoryview, place: int) -> None:
        while len(data):
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written
