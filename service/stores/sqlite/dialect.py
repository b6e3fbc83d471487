"""Jobs on a connection to SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import apsw
import numpy as np

from service.stores.jobs import Change, Do, Find, Insert, Job, Rows, Run, Update, columns_of
from service.stores.jobs import translate as translate_for

T = TypeVar("T")
_NOTHING = apsw.carray((b"",))  # an empty array is none, and no column has an empty blob


def run_job(connection: apsw.Connection, job: Job[T]) -> T:
    """Run the statements of a job, and return its result. Raises `apsw.Error`."""
    try:
        step = next(job)
        while True:
            rows = _rows(connection, step) if isinstance(step, Run) else _change(connection, step)
            step = job.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def array(values: Sequence[Any]) -> Any:
    """Return values of one type as an array for `carray`."""
    if not len(values):
        return _NOTHING
    is_number = isinstance(values[0], int)
    return apsw.carray(np.array(values, np.int64) if is_number else tuple(values))


def _rows(connection: apsw.Connection, step: Run) -> Rows:
    values = step.values
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = array(value)
    cursor = connection.execute(_translate(step.sql), values)
    return [] if isinstance(step, Do) else cursor.fetchall()


def _change(connection: apsw.Connection, step: Change) -> Rows:
    columns, rows, kept = columns_of(step, "sqlite")
    table = _translate(step.table)
    if isinstance(step, Insert):
        places = ", ".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
        sql += f" ON CONFLICT DO UPDATE SET {_translate(step.update)}" if step.update else ""
        sql += "" if step.key else " ON CONFLICT DO NOTHING"
    elif isinstance(step, Update):
        count = kept(step.keys)
        keys, changed = columns[:count], columns[count:]
        rows = [(*row[count:], *row[:count]) for row in rows]
        sql = f"UPDATE {table} SET {_equal(changed, ', ')} WHERE {_equal(keys, ' AND ')}"
    elif isinstance(step, Find):
        returned = _translate(step.returning)
        sql = f"SELECT {returned} FROM {table} WHERE {_equal(columns, ' AND ')}"
    else:
        sql = f"DELETE FROM {table} WHERE {_equal(columns, ' AND ')}"
        sql += f" RETURNING {_translate(step.returning)}" if step.returning else ""
    return connection.executemany(sql, rows).fetchall() if rows else []


def _equal(columns: Sequence[str], separator: str) -> str:
    return separator.join(f"{name} = ?" for name in columns)


@cache
def _translate(sql: str) -> str:
    return translate_for(sql, "sqlite")
