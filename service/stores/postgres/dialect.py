"""Jobs on a connection to PostgreSQL, and arrays for their statements.

psycopg encodes a list value by value, which takes a process longer than all else that it does for
a batch of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import AsyncConnection, Connection
from psycopg.adapt import Dumper
from psycopg.pq import Format

from service.stores.jobs import Delete, Do, Find, Insert, Job, Rows, Run, Step, Update, columns_of
from service.stores.jobs import translate as translate_for

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


T = TypeVar("T")

_ROWS = 50_000  # of one statement
_PACKED = {"bigint": bigints, "integer": integers, "double precision": doubles, "uuid": uuids}
_TYPES = {
    "bigint": "bytes change created dislikes events expires forgotten noted revoked started"
    " timestamp user_key user_no users written",
    "integer": "first_seq import_no item_no last_seq next_seq number seq type_no version",
    "boolean": "has_vectors hidden is_whole undone",
    "bytea": "digest document embedding key profile salt value",
    "double precision": "weight",
    "uuid": "event_key",
    "text": "event_id fallback key_id kind name namespace namespace_id origin position rate scopes"
    " source user_id",
}
_TYPE_OF = {name: type_ for type_, names in _TYPES.items() for name in names.split()}
# Columns whose type is another one than that of their name in most tables.
_TYPE_IN = {"event_ids.digest": "bigint", "users.version": "bigint", "users.generation": "bigint"}

_NULL = "unknown"  # of a new column without any value
_TYPE_OF_VALUES = {
    bool: "boolean",
    bytes: "bytea",
    float: "double precision",
    int: "bigint",
    str: "text",
}

Statement = tuple[bytes, dict[str, Any]]


async def run_job(connection: AsyncConnection, namespace_no: int, job: Job[T]) -> T:
    """Run the statements of a job, and return its result. Raises `psycopg.Error`."""
    try:
        step = next(job)
        while True:
            rows: Rows = []
            for sql, values in _statements(step, namespace_no):
                cursor = await connection.execute(sql, values, binary=True)
                if _has_rows(step):
                    rows += await cursor.fetchall()
            step = job.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def run_job_blocking(connection: Connection, namespace_no: int, job: Job[T]) -> T:
    """Do as `run_job` does, on a thread."""
    try:
        step = next(job)
        while True:
            rows: Rows = []
            for sql, values in _statements(step, namespace_no):
                cursor = connection.cursor(binary=True).execute(sql, values)
                if _has_rows(step):
                    rows += cursor.fetchall()
            step = job.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def _has_rows(step: Step) -> bool:
    if isinstance(step, Run):
        return not isinstance(step, Do)
    return isinstance(step, Find | Delete) and bool(step.returning)


def _statements(step: Step, namespace_no: int) -> Iterator[Statement]:
    if isinstance(step, Run):
        yield _translate(step.sql), {**step.values, "no": namespace_no}
        return
    columns, rows, kept = columns_of(step, "postgres")
    if not rows:
        return
    by_column = zip(columns, zip(*rows, strict=True), strict=True)
    types = [_type_of(step.table, each, values) for each, values in by_column]
    if _NULL in types and isinstance(step, Insert):  # columns that are left out are NULL
        present = [at for at, type_ in enumerate(types) if type_ != _NULL]
        columns, types = [columns[at] for at in present], [types[at] for at in present]
        rows = [tuple(row[at] for at in present) for row in rows]
    arrays = ", ".join(f"%(c{at})b::{type_}[]" for at, type_ in enumerate(types))
    names = ", ".join(columns)
    name = _text(step.table)
    table = f"heed.{name}"
    if isinstance(step, Insert):
        sql = f"INSERT INTO {table} (namespace_no, {names})"
        sql += f" SELECT %(no)s, * FROM unnest({arrays}) AS new ({names})"
        if step.update:
            key = ", ".join(_text(step.key).split())
            sql += f" ON CONFLICT (namespace_no, {key}) DO UPDATE SET {_text(step.update)}"
        sql += "" if step.key else " ON CONFLICT DO NOTHING"
    else:
        count = kept(step.keys) if isinstance(step, Update) else len(columns)
        keys, changed = columns[:count], columns[count:]
        new = f"unnest({arrays}) AS new ({names})"
        here = " AND ".join(f"{name}.{key} = new.{key}" for key in keys)
        here = f"WHERE {name}.namespace_no = %(no)s AND {here}"
        if isinstance(step, Update):
            values = ", ".join(f"{each} = new.{each}" for each in changed)
            sql = f"UPDATE {table} SET {values} FROM {new} {here}"
        elif isinstance(step, Find):
            returned = _text(step.returning)
            sql = f"SELECT {returned} FROM {table} JOIN {new} USING ({names})"
            sql += " WHERE namespace_no = %(no)s"
        else:
            sql = f"DELETE FROM {table} USING {new} {here}"
            sql += f" RETURNING {_text(step.returning)}" if step.returning else ""
    for start in range(0, len(rows), _ROWS):
        parts = zip(types, zip(*rows[start : start + _ROWS], strict=True), strict=True)
        arrays_of = {f"c{at}": _column(type_, part) for at, (type_, part) in enumerate(parts)}
        yield sql.encode(), {**arrays_of, "no": namespace_no}


def _type_of(table: str, column: str, values: Sequence[Any]) -> str:
    """Return the type of a column; a new one has that of its values."""
    if found := _TYPE_IN.get(f"{table}.{column}") or _TYPE_OF.get(column):
        return found
    types = {type(value) for value in values if value is not None}
    return _TYPE_OF_VALUES[types.pop()] if types else _NULL


def _column(type_: str, values: Sequence[Any]) -> Any:
    pack: Any = _PACKED.get(type_)
    return list(values) if pack is None or None in values else pack(values)


@cache
def _text(sql: str) -> str:
    return translate_for(sql, "postgres")


@cache
def _translate(sql: str) -> bytes:
    return _text(sql).encode()
