"""`CowArray`: a large array of rows of which a later state costs what changed, not a copy.

A catalogue of a million items is gigabytes of vectors, and every view of it that requests read is
frozen. So a view is the beginning of a private mapping of a file in memory. Rows that are new are
written behind it, where no earlier view looks; rows that change are written to a mapping of their
own, of which the system copies no more than the pages that are written to, as after a fork.

Processes that are to share the rows are forked once the files are sealed: nobody writes to them
from then on. The next state puts what is new into a file of its process' own, which is mapped
behind the sealed one, so that what did not change stays shared.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

SMALL = 1 << 20  # bytes up to which a copy is simpler, and as fast
_ROOM = 1.5  # times the rows there are, for those to come: what is not written takes no memory
_CHANGED = 1 / 8  # share of the rows from which a copy of all is simpler
_MAP_FIXED = 0x10  # of Linux' mmap(2), which Python's module does not name


class CowArray(Generic[T]):
    """A frozen array of rows [n, ...]; `updated` gives the next one."""

    __slots__ = ("_file", "_state", "array")

    def __init__(self, array: NDArray[T]) -> None:
        """These rows, which nobody may write to from now on."""
        self.array = array
        self._file: _File | None = None
        self._state = 0

    def __len__(self) -> int:
        return len(self.array)

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are in a file in memory, and the next state no copy."""
        return self._file is not None

    def updated(self, at: NDArray[Any], rows: NDArray[T], more: NDArray[T]) -> CowArray[T]:
        """This array with other rows at some places, and more rows after it.

        Args:
            at: the places [c], distinct.
            rows: what stands there then, [c, ...].
            more: what follows, [m, ...].
        """
        if not len(at) and not len(more):
            return self
        if self.array.nbytes + more.nbytes <= SMALL:
            array = np.concatenate([self.array, more])
            array[at] = rows
            return CowArray(array)
        file = self._file
        if file is not None and file.sealed:
            file = file.continued()
        if file is None or not file.follows(self._state, len(at)):
            file = _File(self.array)
        array, state = file.updated(at, rows, more)
        pages = CowArray(array)
        pages._file, pages._state = file, state
        return pages


def seal() -> None:
    """Let no array that there is now write to its file again; to be done before a fork."""
    for file in list(_FILES):
        file.seal()


class _Change(NamedTuple):
    """Rows that are in a mapping, and not yet in the file."""

    mapping: int  # the first that has them
    at: NDArray[Any]
    rows: NDArray[Any]


class _File:
    """The rows of one line of views, of which each follows the one before.

    Args:
        array: the rows so far.
        base: a file that holds these rows, and that nobody writes to any more.
    """

    def __init__(self, array: NDArray[Any], base: _File | None = None) -> None:
        self._lock = threading.Lock()
        self.sealed = False
        self._shape, self._dtype = array.shape[1:], array.dtype
        self._each = int(np.prod(self._shape, dtype=np.int64)) * array.dtype.itemsize
        self._number = _in_memory()
        self._base = base
        # Bytes at the beginning that are read from the base. They are holes in this file.
        self._shared = 0
        weakref.finalize(self, os.close, self._number)
        self._state = 0  # how often it was updated
        self._length = 0
        self._capacity = 0
        self._mappings = 0
        self._read: list[tuple[int, weakref.ref[mmap.mmap]]] = []  # mappings that are still read
        self._changes: list[_Change] = []
        self._room: NDArray[Any] = array[:0]
        _FILES.add(self)
        if base is None:
            self._append(array)
            return
        self._state = base._state  # noqa: SLF001
        self._shared = len(array) * self._each // mmap.PAGESIZE * mmap.PAGESIZE
        self._length = self._shared // self._each  # the row that the end of a page cuts follows
        if self._length:
            self._map(int(_ROOM * len(array)) + 1)
        self._append(array[self._length :])
        pending = base._changes  # noqa: SLF001
        self._changes = [change._replace(mapping=self._mappings + 1) for change in pending]
        if self._changes:
            self._map(self._capacity)

    def seal(self) -> None:
        """Write what changed as far as that can be, and nothing any more from now on."""
        with self._lock:
            self._settle()
            self.sealed = True

    def continued(self) -> _File | None:
        """A file that follows this sealed one, or None where all must be copied."""
        if self._base is not None or not hasattr(os, "memfd_create"):
            return None
        with self._lock:
            return _File(self._room[: self._length], self)

    def follows(self, state: int, more: int) -> bool:
        """Whether a view is the latest, so that the next may follow it here.

        Not so where views of long ago are kept, and what changed since became much.
        """
        with self._lock:
            self._settle()
            changed = more + sum(len(change.at) for change in self._changes)
            return state == self._state and changed <= _CHANGED * self._length

    def updated(
        self, at: NDArray[Any], rows: NDArray[Any], more: NDArray[Any]
    ) -> tuple[NDArray[Any], int]:
        """The rows of the next view, and what `follows` knows it by."""
        with self._lock:
            if len(at):
                changed = np.array(rows, dtype=self._dtype, copy=True)
                self._changes.append(_Change(self._mappings + 1, np.array(at), changed))
                self._map(self._capacity)
            self._append(more)
            self._state += 1
            return self._room[: self._length], self._state

    def _append(self, rows: NDArray[Any]) -> None:
        end = self._length + len(rows)
        if end > self._capacity:
            self._map(int(_ROOM * end) + 1)
        if not len(rows):
            return
        block: Any = np.ascontiguousarray(rows, dtype=self._dtype)
        left = memoryview(block).cast("B")
        place = self._length * self._each
        while len(left):
            written = os.pwrite(self._number, left, place)
            left, place = left[written:], place + written
        # The mapping shows what is written to the file, but for pages that it has of its own: of
        # those behind the last row, that can only be the one which the row is on.
        rest = -self._length * self._each % mmap.PAGESIZE
        few = min(len(rows), -(-rest // self._each))
        self._room[self._length : self._length + few] = rows[:few]
        self._length = end

    def _map(self, capacity: int) -> None:
        """A mapping with every change in it."""
        if capacity > self._capacity:
            os.ftruncate(self._number, max(1, capacity * self._each))
            self._capacity = capacity
        size = max(1, self._capacity * self._each)
        mapping = mmap.mmap(self._number, size, access=mmap.ACCESS_COPY)
        count = self._capacity * int(np.prod(self._shape, dtype=np.int64))
        room = np.frombuffer(mapping, dtype=self._dtype, count=count)
        self._room = room.reshape(self._capacity, *self._shape)
        if self._base is not None and self._shared:
            number = self._base._number  # noqa: SLF001
            _laid_over(self._room.ctypes.data, self._shared, number)
        self._mappings += 1
        self._read.append((self._mappings, weakref.ref(mapping)))
        for change in self._changes:
            self._room[change.at] = change.rows

    def _settle(self) -> None:
        self._read = [(number, mapping) for number, mapping in self._read if mapping() is not None]
        oldest = min((number for number, _ in self._read), default=self._mappings)
        stay: list[_Change] = []  # the base is not written to
        while self._changes and self._changes[0].mapping <= oldest:
            change = self._changes.pop(0)
            own = change.at * self._each >= self._shared
            for place, row in zip(change.at[own].tolist(), change.rows[own], strict=True):
                os.pwrite(self._number, row.tobytes(), place * self._each)
            if not own.all():
                stay.append(_Change(change.mapping, change.at[~own], change.rows[~own]))
        self._changes[:0] = stay


_FILES: weakref.WeakSet[_File] = weakref.WeakSet()


def _laid_over(address: int, size: int, number: int) -> None:
    """Map the beginning of a file over what is mapped there, privately."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    rights, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if function(address, size, rights, how, number, 0) != address:
        raise OSError(ctypes.get_errno(), "the rows of a sealed file could not be mapped")


def _in_memory() -> int:
    """A file that no disk has to hold, where the system knows such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("heed-pages", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="heed-pages-") as file:
        return os.dup(file.fileno())
