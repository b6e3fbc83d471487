"""Columns that share their past: arrays and lists of which a later one is a longer copy."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.catalogue import mapped_rows
from models.catalogue.mapped_rows import MappedRows

T = TypeVar("T")
N = TypeVar("N", bound=np.generic)

SMALL = 1 << 20  # bytes up to which a copy is simpler, and as fast


class CowArray(Generic[N]):
    """A frozen array of rows [n, ...]; `updated` returns the next version.

    Args:
        array: the rows, which nothing may write to from now on.
        mapped: the file that holds them, if any.
        version: their version in that file.
    """

    __slots__ = ("_mapped", "_version", "array")

    def __init__(
        self, array: NDArray[N], mapped: MappedRows | None = None, version: int = 0
    ) -> None:
        self.array, self._mapped, self._version = array, mapped, version

    def __len__(self) -> int:
        return len(self.array)

    def extended(self, rows: NDArray[N]) -> CowArray[N]:
        """Return this array with more rows [m, ...] after it."""
        return self.updated(np.zeros(0, np.int64), rows[:0], rows)

    def updated(
        self, at: NDArray[Any], rows: NDArray[N], more: NDArray[N] | None = None
    ) -> CowArray[N]:
        """Return this array with rows [c, ...] at distinct places [c], and more [m, ...] after."""
        more = self.array[:0] if more is None else more
        if not len(at) and not len(more):
            return self
        if not mapped_rows.SUPPORTED or self.array.nbytes + more.nbytes <= SMALL:
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


_SPARE = 1_000  # objects that no version may need any more, before the list is copied


class CowList(Generic[T]):
    """A frozen sequence; `updated` returns the next version.

    All versions of one line share a list that only grows, and each has an array of its own slots.
    """

    __slots__ = ("_lock", "_shared", "_slots")

    def __init__(self, objects: Iterable[T] = ()) -> None:
        self._shared = list(objects)
        self._lock = threading.Lock()
        self._slots = CowArray(np.arange(len(self._shared)))

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[T]:
        return iter(self.take(np.arange(len(self))))

    def __getitem__(self, at: int) -> T:
        return self._shared[int(self._slots.array[at])]

    def take(self, at: NDArray[np.int32] | NDArray[np.int64]) -> list[T]:
        """Return the objects at some places [n], which is faster than one by one."""
        shared = self._shared
        return [shared[slot] for slot in self._slots.array[at].tolist()]

    def extended(self, objects: Sequence[T]) -> CowList[T]:
        """Return this sequence with more objects after it."""
        return self.updated(np.zeros(0, np.int64), (), objects)

    def updated(self, at: NDArray[Any], objects: Sequence[T], more: Sequence[T] = ()) -> CowList[T]:
        """Return this sequence with c objects at distinct places [c], and more after it."""
        if len(self._shared) > 2 * len(self) + _SPARE:
            # Objects of earlier versions alone are left to those.
            return CowList(self).updated(at, objects, more)
        new: CowList[T] = CowList()
        new._shared, new._lock = self._shared, self._lock
        with self._lock:
            first = len(self._shared)
            self._shared += [*objects, *more]
        slots = np.arange(first, first + len(objects) + len(more))
        new._slots = self._slots.updated(at, slots[: len(objects)], slots[len(objects) :])
        return new
