"""`CowArray`: a large array of rows whose next version costs what changed, not a copy.

A catalogue of a million items is gigabytes of vectors, and every version of it that requests read
is frozen. Versions of a large array therefore share a file in memory (`mapped_rows`). Small arrays,
and all arrays where the system has no such files, are copied by NumPy.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.catalogue import mapped_rows
from models.catalogue.mapped_rows import MappedRows

T = TypeVar("T", bound=np.generic)

SMALL = 1 << 20  # bytes up to which a copy is simpler, and as fast


class CowArray(Generic[T]):
    """A frozen array of rows [n, ...]; `updated` returns the next version.

    Args:
        array: the rows, which nothing may write to from now on.
        mapped: the file that holds them, if any.
        version: their version in that file.
    """

    __slots__ = ("_mapped", "_version", "array")

    def __init__(
        self, array: NDArray[T], mapped: MappedRows | None = None, version: int = 0
    ) -> None:
        self.array, self._mapped, self._version = array, mapped, version

    def __len__(self) -> int:
        return len(self.array)

    def extended(self, rows: NDArray[T]) -> CowArray[T]:
        """Return this array with more rows [m, ...] after it."""
        return self.updated(np.zeros(0, np.int64), rows[:0], rows)

    def updated(
        self, at: NDArray[Any], rows: NDArray[T], more: NDArray[T] | None = None
    ) -> CowArray[T]:
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
