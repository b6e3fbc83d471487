"""Reads of whole users and items of a SQLite store, with everything that is stored of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import apsw
import numpy as np

from service.stores.sqlite.reads import Spelling, read_transaction
from service.stores.values import (
    StoredClaim,
    StoredEvent,
    StoredItem,
    StoredReplacement,
    StoredUser,
    StoredVectors,
)

Rows = list[tuple[Any, ...]]

MAX_USERS = 5_000  # in one page, however few events they have

_NEXT_USERS = """\
SELECT user_no, user_id, next_seq FROM users WHERE user_id > ? ORDER BY user_id LIMIT ?"""
_PROFILES = "SELECT user_no, profile FROM users WHERE user_no IN carray(?) AND profile IS NOT NULL"
_EVENTS = """\
SELECT user_no, timestamp, seq, item_no, type_no, weight, event_id, digest, import_no
  FROM events WHERE user_no IN carray(?) ORDER BY user_no, timestamp, seq"""
_VECTORS = """\
SELECT user_no, seq, key, value FROM vectors WHERE user_no IN carray(?) ORDER BY user_no, seq"""
_CLAIMS = """\
SELECT user_no, import_no, first_seq, last_seq FROM claims WHERE user_no IN carray(?)
 ORDER BY user_no, import_no, first_seq"""
_REPLACED = """\
SELECT row_no, import_no, written, document, embedding FROM replaced
 WHERE kind = ? AND row_no IN carray(?) ORDER BY row_no, import_no"""
_ITEMS = "SELECT item_id, item_no, change, document, embedding FROM items"


class RecordReads:
    """Queries, named as the methods of `BulkAccess`. Each thread passes a connection of its own."""

    def __init__(self) -> None:
        self._items = Spelling("items")
        self._types = Spelling("types")

    def users(self, connection: apsw.Connection, after: str, events: int) -> list[StoredUser]:
        with read_transaction(connection):
            page: Rows = []
            found = 0  # at most
            for row in connection.execute(_NEXT_USERS, (after, MAX_USERS)):
                if page and found + row[2] - 1 > events:
                    break
                page.append(row)
                found += row[2] - 1
            return self._users(connection, page) if page else []

    def _users(self, connection: apsw.Connection, page: Rows) -> list[StoredUser]:
        wanted = carray(user_no for user_no, _, _ in page)
        profiles: dict[int, bytes] = dict(connection.execute(_PROFILES, (wanted,)))
        rows: Rows = connection.execute(_EVENTS, (wanted,)).fetchall()
        item_ids = self._items.names(connection, [row[3] for row in rows])
        types = self._types.names(connection, [row[4] for row in rows])
        events: dict[int, list[StoredEvent]] = {}
        for (user_no, time, seq, _, _, *rest), item_id, type_ in zip(
            rows, item_ids, types, strict=True
        ):
            events.setdefault(user_no, []).append(StoredEvent(time, seq, item_id, type_, *rest))
        vectors = _grouped(connection.execute(_VECTORS, (wanted,)))
        claims = _grouped(connection.execute(_CLAIMS, (wanted,)))
        replaced = _grouped(connection.execute(_REPLACED, ("user", wanted)))
        return [
            StoredUser(
                user_id,
                next_seq,
                profiles.get(user_no),
                events.get(user_no, []),
                [StoredVectors(*row) for row in vectors.get(user_no, ())],
                [StoredClaim(*row) for row in claims.get(user_no, ())],
                [StoredReplacement(*row) for row in replaced.get(user_no, ())],
            )
            for user_no, user_id, next_seq in page
        ]


def item_names(connection: apsw.Connection, after: int, limit: int) -> list[tuple[int, str]]:
    """`BulkAccess.item_names`."""
    found: list[Any] = connection.execute(
        "SELECT item_no, item_id FROM items WHERE item_no > ? ORDER BY item_no LIMIT ?",
        (after, limit),
    ).fetchall()
    return found


def noted_item_names(connection: apsw.Connection) -> list[str]:
    """`BulkAccess.noted_item_names`."""
    rows = connection.execute(
        "SELECT item_id FROM unused_names JOIN items ON item_no = number WHERE kind = 'items'"
    )
    return [item_id for (item_id,) in rows]


def items(connection: apsw.Connection, after: str, limit: int) -> list[StoredItem]:
    """`BulkAccess.items`."""
    with read_transaction(connection):
        rows: Rows = connection.execute(
            f"{_ITEMS} WHERE item_id > ? ORDER BY item_id LIMIT ?", (after, limit)
        ).fetchall()
        return _items(connection, rows)


def find_items(connection: apsw.Connection, item_ids: Sequence[str]) -> list[StoredItem]:
    """`BulkAccess.find_items`."""
    if not item_ids:
        return []
    with read_transaction(connection):
        rows: Rows = connection.execute(
            f"{_ITEMS} WHERE item_id IN carray(?)", (apsw.carray(tuple(item_ids)),)
        ).fetchall()
        return _items(connection, rows)


def carray(numbers: Iterable[int]) -> Any:
    """Return numbers, at least one, as a table-valued parameter."""
    return apsw.carray(np.fromiter(numbers, np.int64))


def _items(connection: apsw.Connection, rows: Rows) -> list[StoredItem]:
    if not rows:
        return []
    numbers = carray(item_no for _, item_no, *_ in rows)
    replaced = _grouped(connection.execute(_REPLACED, ("item", numbers)))
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


def _grouped(rows: Iterable[tuple[Any, ...]]) -> dict[int, Rows]:
    """Return rows without their first column, by its number; equal numbers come together."""
    return {
        number: [row[1:] for row in group] for number, group in groupby(rows, key=itemgetter(0))
    }
