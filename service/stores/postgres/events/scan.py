"""Scans of a whole namespace of a PostgreSQL store, for training and export.

Each scan is one read-only transaction over a connection of its own. While it goes on, the server
cannot remove the rows that are deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import Connection

from service.domain.records import Event
from service.stores.jobs import translate
from service.stores.postgres.events.column_codes import ColumnCodes
from service.stores.postgres.events.histories import build_events
from service.stores.values import LogColumns, Shard

_CHUNK = 10_000  # rows that are read from a cursor at once
_PACKED = np.dtype(
    [
        ("user_key", ">i8"),
        ("item_no", ">i4"),
        ("type_no", ">i4"),
        ("timestamp", ">i8"),
        ("weight", ">f8"),
    ]
)
_COLUMNS = """\
SELECT int8send(user_key) || int4send(item_no) || int4send(type_no) || int8send(timestamp)
       || float8send(weight)
  FROM heed.events WHERE namespace_no = %s AND user_key %% %s = %s
 ORDER BY user_key, timestamp, seq"""
_EVENTS = """\
SELECT timestamp, seq, user_id, event_key, event_id, item_no, type_no, weight, key, value
  FROM heed.events JOIN heed.users USING (namespace_no, user_key)
  LEFT JOIN heed.vectors USING (namespace_no, user_key, seq)
 WHERE namespace_no = %s ORDER BY user_key, timestamp, seq"""


def scan(
    connection: Connection, namespace_no: int, rows: int, shard: Shard | None
) -> Iterator[LogColumns]:
    """`Store.scan`."""
    index, count = (0, 1) if shard is None else (shard.index, shard.count)
    users = ColumnCodes(connection, namespace_no, "users")
    items = ColumnCodes(connection, namespace_no, "items")
    types = ColumnCodes(connection, namespace_no, "types")
    with connection.cursor("scan", binary=True) as cursor:
        cursor.execute(_COLUMNS.encode(), (namespace_no, count, index))
        while chunk := cursor.fetchmany(rows):
            packed: NDArray[np.void] = np.frombuffer(b"".join(row for (row,) in chunk), _PACKED)
            yield LogColumns(
                user_ids=users.names,
                item_ids=items.names,
                type_names=types.names,
                users=users.codes(packed["user_key"]),
                items=items.codes(packed["item_no"]),
                types=types.codes(packed["type_no"]),
                timestamps=packed["timestamp"].astype(np.int64),
                weights=packed["weight"].astype(np.float32),
            )


def scan_events(connection: Connection, namespace_no: int) -> Iterator[Event]:
    """`Store.scan_events`."""
    items = ColumnCodes(connection, namespace_no, "items")
    types = ColumnCodes(connection, namespace_no, "types")
    with connection.cursor("events", binary=True) as cursor:
        cursor.execute(_EVENTS.encode(), (namespace_no,))
        while chunk := cursor.fetchmany(_CHUNK):
            item_codes = items.codes(np.array([row[5] for row in chunk]))
            type_codes = types.codes(np.array([row[6] for row in chunk]))
            yield from build_events(
                chunk,
                [items.names[code] for code in item_codes],
                [types.names[code] for code in type_codes],
            )


def scan_rows(connection: Connection, namespace_no: int, sql: str) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows of a statement of a job, which has no values."""
    with connection.cursor("rows", binary=True) as cursor:
        cursor.execute(translate(sql, "postgres").encode(), {"no": namespace_no})
        while chunk := cursor.fetchmany(_CHUNK):
            yield from chunk
