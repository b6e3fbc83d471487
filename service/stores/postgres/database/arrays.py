"""Arrays for statements, encoded column by column.

psycopg encodes a list value by value, which takes a process longer than all else that it does for
a batch of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.adapt import Dumper
from psycopg.pq import Format

_HEADER = np.dtype([(name, ">i4") for name in ("dimensions", "nulls", "type", "size", "first")])
_BIGINT, _INTEGER, _DOUBLE, _UUID = 20, 23, 701, 2950  # of pg_type


class PackedArray:
    """An array of one dimension without NULL, in the binary format of PostgreSQL.

    A statement casts it to its type: `%s::bigint[]`.
    """

    __slots__ = ("data",)

    def __init__(self, cells: NDArray[Any], type_oid: int) -> None:
        """Pack values, big-endian [n], of a type that PostgreSQL encodes alike."""
        rows = np.empty(len(cells), [("size", ">i4"), ("value", cells.dtype)])
        rows["size"] = cells.dtype.itemsize
        rows["value"] = cells
        header = np.array((1, 0, type_oid, len(cells), 1), _HEADER)
        self.data = header.tobytes() + rows.tobytes()


def bigints(values: Sequence[int] | NDArray[np.int64]) -> PackedArray:
    """Encode a `bigint[]`."""
    return PackedArray(np.asarray(values, ">i8"), _BIGINT)


def integers(values: Sequence[int] | NDArray[np.int64]) -> PackedArray:
    """Encode an `integer[]`."""
    return PackedArray(np.asarray(values, ">i4"), _INTEGER)


def doubles(values: Sequence[float]) -> PackedArray:
    """Encode a `double precision[]`."""
    return PackedArray(np.asarray(values, ">f8"), _DOUBLE)


def uuids(values: Iterable[bytes] | NDArray[np.void]) -> PackedArray:
    """Encode a `uuid[]` of values of 16 bytes."""
    if not isinstance(values, np.ndarray):
        values = np.frombuffer(b"".join(values), "V16")
    return PackedArray(values, _UUID)


class _PackedDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: PackedArray) -> bytes:
        return obj.data


psycopg.adapters.register_dumper(PackedArray, _PackedDumper)
