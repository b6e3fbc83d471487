"""Scans of a whole SQLite store, for training and export.

Each scan is one read transaction over a connection of its own, which it closes. During a scan the
write-ahead log cannot be reset and grows with every write; it shrinks again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.records import Event, Item, User
from service.stores.base import LogColumns
from service.stores.encoding import item_from, user_from
from service.stores.sqlite_reads import Reads, read_transaction

Connect = Callable[[], apsw.Connection]


class _Codes:
    """Dense codes of interned numbers, in the order of appearance."""

    def __init__(self, table: str, number: str, name: str) -> None:
        self.names: list[str] = []
        self._find = f"SELECT {number}, {name} FROM {table} WHERE {number} IN carray(?)"  # noqa: S608
        self._codes = np.full(1024, -1, np.int32)  # by number

    def of(self, connection: apsw.Connection, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the code of each number [n]; names of new numbers are appended to `names`."""
        top = int(numbers.max()) + 1
        if top > len(self._codes):
            grown = np.full(2 * top, -1, np.int32)
            grown[: len(self._codes)] = self._codes
            self._codes = grown
        new = np.unique(numbers[self._codes[numbers] < 0])
        if new.size:
            found = dict(connection.execute(self._find, (apsw.carray(new),)))
            self._codes[new] = np.arange(len(self.names), len(self.names) + new.size)
            self.names.extend(found[number] for number in new.tolist())
        codes: NDArray[np.int32] = self._codes[numbers]
        return codes


def scan(connect: Connect, rows: int) -> Iterator[LogColumns]:
    """`Store.scan`."""
    users = _Codes("users", "user_no", "user_id")
    items = _Codes("items", "item_no", "item_id")
    types = _Codes("types", "type_no", "type")
    with closing(connect()) as connection, read_transaction(connection):
        cursor = connection.execute(
            "SELECT user_no, item_no, type_no, timestamp, weight FROM events"
            " ORDER BY user_no, timestamp, seq"
        )
        while chunk := list(islice(cursor, rows)):
            columns = list(zip(*chunk, strict=True))
            user_no, item_no, type_no, timestamps = (
                np.fromiter(column, np.int64, len(chunk)) for column in columns[:4]
            )
            yield LogColumns(
                user_ids=users.names,
                item_ids=items.names,
                type_names=types.names,
                users=users.of(connection, user_no),
                items=items.of(connection, item_no),
                types=types.of(connection, type_no),
                timestamps=timestamps,
                weights=np.fromiter(columns[4], np.float32, len(chunk)),
            )


def scan_events(connect: Connect, reads: Reads, rows: int = 10_000) -> Iterator[Event]:
    """`Store.scan_events`, reading `rows` at a time."""
    with closing(connect()) as connection, read_transaction(connection):
        cursor = connection.execute(
            "SELECT timestamp, seq, user_id, event_id, item_no, type_no, weight, key, value"
            " FROM events JOIN users USING (user_no) LEFT JOIN vectors USING (user_no, seq)"
            " ORDER BY user_no, timestamp, seq"
        )
        while chunk := list(islice(cursor, rows)):
            yield from reads.events(connection, chunk)


def scan_items(connect: Connect) -> Iterator[Item]:
    """`Store.scan_items`."""
    with closing(connect()) as connection:
        for row in connection.execute(
            "SELECT item_id, document, embedding FROM items"
            " WHERE document IS NOT NULL ORDER BY item_id"
        ):
            yield item_from(*row)


def scan_users(connect: Connect) -> Iterator[User]:
    """`Store.scan_users`."""
    with closing(connect()) as connection:
        for row in connection.execute(
            "SELECT user_id, profile FROM users WHERE profile IS NOT NULL ORDER BY user_id"
        ):
            yield user_from(*row)


def scan_user_ids(connect: Connect) -> Iterator[str]:
    """`Store.scan_user_ids`."""
    with closing(connect()) as connection:
        for (user_id,) in connection.execute("SELECT user_id FROM users ORDER BY user_id"):
            yield user_id
