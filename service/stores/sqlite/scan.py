"""Scans of a whole SQLite store, for training and export.

Each scan is one read transaction over a connection of its own. During a scan the write-ahead log
cannot be reset and grows with every write; it shrinks again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.records import Event
from service.stores.event_identity import user_key
from service.stores.sqlite.reads import (
    SELECT_EVENTS,
    Reads,
    find_names,
)
from service.stores.values import LogColumns, Shard

_COLUMNS = "SELECT user_no, item_no, type_no, timestamp, weight FROM events"
_ALL = f"{_COLUMNS} ORDER BY user_no, timestamp, seq"
_OF_USER = f"{_COLUMNS} WHERE user_no = ? ORDER BY timestamp, seq"


class NameCodes:
    """Dense codes of interned numbers: indexes into `names`, which grows with new numbers."""

    def __init__(self, table: str) -> None:
        self.names: list[str] = []
        self._table = table
        self._codes: dict[int, int] = {}

    def of(self, connection: apsw.Connection, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return the code of each number [n]."""
        if new := set(numbers).difference(self._codes):
            found = find_names(connection, self._table, new)
            self._codes |= zip(found, count(len(self.names)), strict=False)
            self.names += found.values()
        return np.fromiter(map(self._codes.__getitem__, numbers), np.int32, len(numbers))


def scan(connection: apsw.Connection, rows: int, shard: Shard | None) -> Iterator[LogColumns]:
    """`Store.scan`."""
    users, items, types = NameCodes("users"), NameCodes("items"), NameCodes("types")
    if shard is None:
        cursor = connection.execute(_ALL)
    else:
        # A range of the primary key for each user: nothing is sorted, and no other event is read.
        wanted = _users_of(connection, shard)
        cursor = connection.executemany(_OF_USER, ((number,) for number in wanted.tolist()))
    while chunk := list(islice(cursor, rows)):
        user_no, item_no, type_no, timestamps, weights = zip(*chunk, strict=True)
        yield LogColumns(
            user_ids=users.names,
            item_ids=items.names,
            type_names=types.names,
            users=users.of(connection, user_no),
            items=items.of(connection, item_no),
            types=types.of(connection, type_no),
            timestamps=np.fromiter(timestamps, np.int64, len(chunk)),
            weights=np.fromiter(weights, np.float32, len(chunk)),
        )


def _users_of(connection: apsw.Connection, shard: Shard) -> NDArray[np.int64]:
    """Return the numbers of the users of a shard, in ascending order."""
    users = connection.execute("SELECT user_no, user_id FROM users ORDER BY user_no")
    return np.fromiter(
        (number for number, id_ in users if user_key(id_) % shard.count == shard.index), np.int64
    )


def scan_events(connection: apsw.Connection, reads: Reads) -> Iterator[Event]:
    """`Store.scan_events`."""
    cursor = connection.execute(f"{SELECT_EVENTS} ORDER BY user_no, timestamp, seq")
    while chunk := list(islice(cursor, 10_000)):
        yield from reads.events(connection, chunk)
