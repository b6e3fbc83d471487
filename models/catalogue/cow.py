"""Large arrays and lists whose next version costs what changed, not a copy.

A catalogue of a million items is gigabytes of vectors, and every version of it that requests read
is frozen. Versions of a large array therefore share a file in memory. Small arrays, and all arrays
where the system has no such files, are copied by NumPy.

Rows in a file in memory: a version is the beginning of a private mapping. Appended rows are written
behind it, where no earlier version looks. Changed rows are written to a new mapping; the system
copies only the pages that are written to, as after a fork.

Processes that are to share the rows are forked once the files are sealed: nothing writes to them
from then on. The next version puts its rows into a file of its own process, which is mapped behind
the sealed one, so that rows that did not change stay shared.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

SUPPORTED = hasattr(os, "memfd_create")  # on Linux: files that no disk has to hold
_ROOM = 1.5  # capacity over rows: pages that are not written to take no memory
_CHANGED = 1 / 8  # share of changed rows from which a copy of all is simpler
_MAP_FIXED = 0x10  # of Linux' mmap(2), which Python's module does not name


def seal() -> None:
    """Seal the files of all arrays. Call it before a fork."""
    for file in list(_FILES):
        file.seal()


class _Change(NamedTuple):
    """Rows that mappings have, but not yet the file."""

    mapping: int  # number of the first mapping that has them
    at: NDArray[Any]
    rows: NDArray[Any]


class MappedRows:
    """The file of one line of versions; `base` is a sealed file that holds the first rows."""

    def __init__(self, array: NDArray[Any], base: MappedRows | None = None) -> None:
        self._lock = threading.Lock()
        self.sealed = False
        self._shape, self._dtype = array.shape[1:], array.dtype
        self._each = int(np.prod(self._shape, dtype=np.int64)) * array.dtype.itemsize
        self._number = os.memfd_create("heed-rows", os.MFD_CLOEXEC)
        self._base = base
        # Bytes at the beginning that are read from the base, and are holes in this file.
        self._shared = 0
        weakref.finalize(self, os.close, self._number)
        self._version = 0  # number of updates
        self._length = 0
        self._capacity = 0
        self._mappings = 0
        # Mappings that are still read, by number.
        self._read: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self._changes: list[_Change] = []
        self._room: NDArray[Any] = array[:0]
        _FILES.add(self)
        if base is None:
            self._append(array)
            return
        self._version = base._version  # noqa: SLF001
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
        """Write the changes that every mapping has, and nothing from then on."""
        with self._lock:
            self._settle()
            self.sealed = True

    def continued(self) -> MappedRows | None:
        """Return a file that follows this sealed one, or None where all rows must be copied."""
        if self._base is not None:
            return None
        with self._lock:
            return MappedRows(self._room[: self._length], self)

    def follows(self, version: int, more: int) -> bool:
        """Report whether the next version can follow this one with `more` changed rows.

        It cannot if this is not the latest, or if too many rows changed since an old version that
        is still read.
        """
        with self._lock:
            self._settle()
            changed = more + sum(len(change.at) for change in self._changes)
            return version == self._version and changed <= _CHANGED * self._length

    def updated(
        self, at: NDArray[Any], rows: NDArray[Any], more: NDArray[Any]
    ) -> tuple[NDArray[Any], int]:
        """Return the rows of the next version, and its number for `follows`."""
        with self._lock:
            if len(at):
                changed = np.array(rows, dtype=self._dtype, copy=True)
                self._changes.append(_Change(self._mappings + 1, np.array(at), changed))
                self._map(self._capacity)
            self._append(more)
            self._version += 1
            return self._room[: self._length], self._version

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
        if capacity > self._capacity:
            os.ftruncate(self._number, max(1, capacity * self._each))
            self._capacity = capacity
        size = max(1, self._capacity * self._each)
        mapping = mmap.mmap(self._number, size, access=mmap.ACCESS_COPY)
        self._room = np.ndarray((self._capacity, *self._shape), self._dtype, mapping)
        if self._base is not None and self._shared:
            number = self._base._number  # noqa: SLF001
            _map_over(self._room.ctypes.data, self._shared, number)
        self._mappings += 1
        self._read[self._mappings] = mapping
        for change in self._changes:
            self._room[change.at] = change.rows

    def _settle(self) -> None:
        oldest = min(self._read.keys(), default=self._mappings)
        stay: list[_Change] = []  # the base is not written to
        while self._changes and self._changes[0].mapping <= oldest:
            change = self._changes.pop(0)
            here = change.at * self._each >= self._shared
            for place, row in zip(change.at[here].tolist(), change.rows[here], strict=True):
                os.pwrite(self._number, row.tobytes(), place * self._each)
            if not here.all():
                stay.append(_Change(change.mapping, change.at[~here], change.rows[~here]))
        self._changes[:0] = stay


_FILES: weakref.WeakSet[MappedRows] = weakref.WeakSet()


def _map_over(address: int, size: int, number: int) -> None:
    """Map the beginning of a file privately over what is mapped at an address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if function(address, size, protection, flags, number, 0) != address:
        raise OSError(ctypes.get_errno(), "the rows of a sealed file could not be mapped")


T = TypeVar("T", bound=np.generic)

SMALL = 1 << 20  # bytes up to which a copy is simpler, and as fast


class CowArray(Generic[T]):
    """A frozen array of rows [n, ...]; `updated` returns the next version.

    Nothing may write to `array` from now on. `mapped` is the file that holds it, if any.
    """

    __slots__ = ("_mapped", "_version", "array")

    def __init__(
        self, array: NDArray[T], mapped: MappedRows | None = None, version: int = 0
    ) -> None:
        self.array, self._mapped, self._version = array, mapped, version

    def __len__(self) -> int:
        return len(self.array)

    def extended(self, rows: NDArray[T]) -> CowArray[T]:
        return self.updated(np.zeros(0, np.int64), rows[:0], rows)

    def updated(
        self, at: NDArray[Any], rows: NDArray[T], more: NDArray[T] | None = None
    ) -> CowArray[T]:
        """Return this array with rows [c, ...] at distinct places [c], and more [m, ...] after."""
        more = self.array[:0] if more is None else more
        if not len(at) and not len(more):
            return self
        if not SUPPORTED or self.array.nbytes + more.nbytes <= SMALL:
            array = np.concatenate([self.array, more])
            array[at] = rows
            return CowArray(array)
        mapped = self._mapped
        if mapped is not None and mapped.sealed:
            mapped = mapped.continued()
        if mapped is None or not mapped.follows(self._version, len(at)):
            mapped = MappedRows(self.array)
        array, version = mapped.updated(at, rows, more)
        return CowArray(array, mapped, version)


V = TypeVar("V")

_SPARE = 1_000  # objects that no version may need any more, before the list is copied


class CowList(Generic[V]):
    """A frozen sequence; `updated` returns the next version.

    All versions of one line share a list that only grows, and each has an array of its own slots.
    """

    __slots__ = ("_lock", "_shared", "_slots")

    def __init__(self, objects: Iterable[V] = ()) -> None:
        self._shared = list(objects)
        self._lock = threading.Lock()
        self._slots = CowArray(np.arange(len(self._shared)))

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[V]:
        return iter(self.take(np.arange(len(self))))

    def __getitem__(self, at: int) -> V:
        return self._shared[int(self._slots.array[at])]

    def take(self, at: NDArray[np.int32] | NDArray[np.int64]) -> list[V]:
        """Return the objects at some places [n], which is faster than one by one."""
        shared = self._shared
        return [shared[slot] for slot in self._slots.array[at].tolist()]

    def extended(self, objects: Sequence[V]) -> CowList[V]:
        return self.updated(np.zeros(0, np.int64), (), objects)

    def updated(self, at: NDArray[Any], objects: Sequence[V], more: Sequence[V] = ()) -> CowList[V]:
        """Return this sequence with c objects at distinct places [c], and more after it."""
        if len(self._shared) > 2 * len(self) + _SPARE:
            # Objects of earlier versions alone are left to those.
            return CowList(self).updated(at, objects, more)
        new: CowList[V] = CowList()
        new._shared, new._lock = self._shared, self._lock
        with self._lock:
            first = len(self._shared)
            self._shared += [*objects, *more]
        slots = np.arange(first, first + len(objects) + len(more))
        new._slots = self._slots.updated(at, slots[: len(objects)], slots[len(objects) :])
        return new
