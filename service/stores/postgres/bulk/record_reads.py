"""Reads of whole users and items of a PostgreSQL store, with everything that is stored of them.

They run on a thread, in a transaction that sees one state of the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from psycopg import Connection

from service.stores.jobs import Rows
from service.stores.postgres.events.column_codes import ColumnCodes
from service.stores.values import (
    StoredClaim,
    StoredEvent,
    StoredItem,
    StoredReplacement,
    StoredUser,
    StoredVectors,
)

MAX_USERS = 5_000  # in one page, however few events they have

_NEXT_USERS = """\
SELECT user_key, user_id, next_seq FROM heed.users WHERE namespace_no = %s AND user_id > %s
 ORDER BY user_id LIMIT %s"""
_OF_USERS = "WHERE namespace_no = %s AND user_key = ANY(%s::bigint[])"
_PROFILES = f"SELECT user_key, profile FROM heed.users {_OF_USERS} AND profile IS NOT NULL"
# First the events, since a distributed database has their ids elsewhere.
_EVENTS = f"""\
WITH found AS MATERIALIZED (SELECT * FROM heed.events {_OF_USERS})
SELECT found.user_key, found.timestamp, found.seq, item_no, type_no, weight,
       coalesce(event_id, event_key::text), digest, import_no
  FROM found JOIN heed.event_ids USING (namespace_no, event_key)
 ORDER BY found.user_key, found.timestamp, found.seq"""
_VECTORS = f"SELECT user_key, seq, key, value FROM heed.vectors {_OF_USERS} ORDER BY user_key, seq"
_CLAIMS = f"""\
SELECT user_key, import_no, first_seq, last_seq FROM heed.claims {_OF_USERS}
 ORDER BY user_key, import_no, first_seq"""
_REPLACED_PROFILES = f"""\
SELECT user_key, import_no, written, document, NULL FROM heed.replaced_profiles {_OF_USERS}
 ORDER BY user_key, import_no"""
_REPLACED_ITEMS = """\
SELECT item_no, import_no, written, document, embedding FROM heed.replaced_items
 WHERE namespace_no = %s AND item_no = ANY(%s::integer[]) ORDER BY item_no, import_no"""
_ITEMS = """\
SELECT item_id, item_no, change, document, embedding FROM heed.items WHERE namespace_no = %s AND"""


def users(connection: Connection, namespace_no: int, after: str, events: int) -> list[StoredUser]:
    """`BulkAccess.users`."""
    page: Rows = []
    found = 0  # at most
    for row in _rows(connection, _NEXT_USERS, namespace_no, after, MAX_USERS):
        if page and found + row[2] - 1 > events:
            break
        page.append(row)
        found += row[2] - 1
    keys = [key for key, _, _ in page]

    def rows(query: str) -> Rows:
        return _rows(connection, query, namespace_no, keys) if keys else []

    profiles: dict[int, bytes] = dict(rows(_PROFILES))
    found_events = rows(_EVENTS)
    item_ids = _names(connection, namespace_no, "items", [row[3] for row in found_events])
    types = _names(connection, namespace_no, "types", [row[4] for row in found_events])
    by_user: dict[int, list[StoredEvent]] = {}
    for (key, time, seq, _, _, *rest), item_id, type_ in zip(
        found_events, item_ids, types, strict=True
    ):
        by_user.setdefault(key, []).append(StoredEvent(time, seq, item_id, type_, *rest))
    vectors, claims = _grouped(rows(_VECTORS)), _grouped(rows(_CLAIMS))
    replaced = _grouped(rows(_REPLACED_PROFILES))
    return [
        StoredUser(
            user_id,
            next_seq,
            profiles.get(key),
            by_user.get(key, []),
            [StoredVectors(*row) for row in vectors.get(key, ())],
            [StoredClaim(*row) for row in claims.get(key, ())],
            [StoredReplacement(*row) for row in replaced.get(key, ())],
        )
        for key, user_id, next_seq in page
    ]


def item_names(
    connection: Connection, namespace_no: int, after: int, limit: int
) -> list[tuple[int, str]]:
    """`BulkAccess.item_names`."""
    query = """\
SELECT item_no, item_id FROM heed.items WHERE namespace_no = %s AND item_no > %s
 ORDER BY item_no LIMIT %s"""
    return [(number, name) for number, name in _rows(connection, query, namespace_no, after, limit)]


def noted_item_names(connection: Connection, namespace_no: int) -> list[str]:
    """`BulkAccess.noted_item_names`."""
    query = """\
SELECT item_id FROM heed.unused_names JOIN heed.items USING (namespace_no)
 WHERE namespace_no = %s AND kind = 'items' AND item_no = number"""
    return [item_id for (item_id,) in _rows(connection, query, namespace_no)]


def items(connection: Connection, namespace_no: int, after: str, limit: int) -> list[StoredItem]:
    """`BulkAccess.items`."""
    query = f"{_ITEMS} item_id > %s ORDER BY item_id LIMIT %s"
    return _items(connection, namespace_no, _rows(connection, query, namespace_no, after, limit))


def find_items(
    connection: Connection, namespace_no: int, item_ids: Sequence[str]
) -> list[StoredItem]:
    """`BulkAccess.find_items`."""
    rows = _rows(connection, f"{_ITEMS} item_id = ANY(%s)", namespace_no, list(item_ids))
    return _items(connection, namespace_no, rows)


def _items(connection: Connection, namespace_no: int, rows: Rows) -> list[StoredItem]:
    numbers = [item_no for _, item_no, *_ in rows]
    replaced = _grouped(_rows(connection, _REPLACED_ITEMS, namespace_no, numbers))
    return [
        StoredItem(
            item_id,
            change is not None,
            document,
            embedding,
            [StoredReplacement(*row) for row in replaced.get(item_no, ())],
            (change or 0, item_no),
        )
        for item_id, item_no, change, document, embedding in rows
    ]


def _names(
    connection: Connection, namespace_no: int, table: Literal["items", "types"], numbers: list[int]
) -> list[str]:
    codes = ColumnCodes(connection, namespace_no, table)
    return [codes.names[code] for code in codes.codes(np.array(numbers, np.int64)).tolist()]


def _rows(connection: Connection, query: str, namespace_no: int, *values: Any) -> Rows:
    cursor = connection.cursor(binary=True)
    return cursor.execute(query.encode(), (namespace_no, *values)).fetchall()


def _grouped(rows: Iterable[tuple[Any, ...]]) -> dict[int, Rows]:
    """Return rows without their first column, by its number; equal numbers come together."""
    return {
        number: [row[1:] for row in group] for number, group in groupby(rows, key=itemgetter(0))
    }
