"""Queries of a SQLite store: synchronous, over a read-only connection.

Statements inside one `with read_transaction(connection):` see one state of the database.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.records import Event
from service.stores.encoding import (
    cursor_of,
    position_of,
    user_from,
    vectors_from,
)
from service.stores.quota import StoreUsage
from service.stores.values import History

Rows = list[tuple[Any, ...]]

# Tables of interned names, with the columns of their numbers and names.
INTERNED = {
    "users": ("user_no", "user_id"),
    "items": ("item_no", "item_id"),
    "types": ("type_no", "type"),
}
MAX_CACHED_NAMES = 1_000_000  # names per table; ~150 MB when full

SELECT_EVENTS = """\
SELECT timestamp, seq, user_id, event_id, item_no, type_no, weight, key, value
  FROM events JOIN users USING (user_no) LEFT JOIN vectors USING (user_no, seq)
"""
SELECT_ITEMS = "SELECT item_id, document, embedding FROM items"


class read_transaction:  # noqa: N801  # used like a keyword
    """A read transaction. Its end raises no second error if an error has already ended it."""

    __slots__ = ("_connection",)

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN")

    def __exit__(self, *_: object) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def find_names(connection: apsw.Connection, table: str, numbers: Collection[int]) -> dict[int, str]:
    """Read the names of interned numbers, in the order of the numbers."""
    number, name = INTERNED[table]
    find = f"SELECT {number}, {name} FROM {table} WHERE {number} IN carray(?) ORDER BY {number}"
    wanted = np.fromiter(numbers, np.int64, len(numbers))
    return dict(connection.execute(find, (apsw.carray(wanted),)))


def usage(connection: apsw.Connection) -> StoreUsage:
    """Read the contents of the store, with those of the transaction in progress."""
    events, items = connection.execute("SELECT events, items FROM state").get
    pages = connection.pragma("page_count") - connection.pragma("freelist_count")
    return StoreUsage(events, items, pages * connection.pragma("page_size"))


class Spelling:
    """Names of interned numbers, cached: their rows are never deleted."""

    def __init__(self, table: Literal["items", "types"]) -> None:
        self._table = table
        self._known: dict[int, str] = {}

    def names(self, connection: apsw.Connection, numbers: Sequence[int]) -> list[str]:
        """Return the name of each number; unknown ones are read in the connection's transaction."""
        known = self._known  # other threads may add to it or replace it, but never remove
        try:
            return list(map(known.__getitem__, numbers))
        except KeyError:
            if len(known) > MAX_CACHED_NAMES:
                known = self._known = {}
            known.update(find_names(connection, self._table, set(numbers) - known.keys()))
            return list(map(known.__getitem__, numbers))


class Reads:
    """Queries, named as the methods of `Store`.

    Thread-safe, as long as each thread passes a connection of its own.
    """

    def __init__(self) -> None:
        self._items = Spelling("items")
        self._types = Spelling("types")

    # ------------------------------------------------------------------ histories

    def version(self, connection: apsw.Connection, user_id: str) -> int:
        found = connection.execute("SELECT version FROM users WHERE user_id = ?", (user_id,)).get
        return found or 0

    def length(self, connection: apsw.Connection, user_id: str) -> int:
        """Return an upper bound of the number of events of a user."""
        found = connection.execute("SELECT next_seq FROM users WHERE user_id = ?", (user_id,)).get
        return (found or 1) - 1

    def history(self, connection: apsw.Connection, user_id: str, after: int) -> History:
        with read_transaction(connection):
            user_no, version, generation, next_seq, profile = connection.execute(
                "SELECT user_no, version, generation, next_seq, profile FROM users"
                " WHERE user_id = ?",
                (user_id,),
            ).fetchone() or (0, 0, 0, 1, None)
            # At most this many events came after. Searched from the newest on, they are mostly
            # found at once; only an event with an older timestamp lies further back.
            rows: Rows = connection.execute(
                "SELECT seq, timestamp, weight, item_no, type_no FROM events"
                " WHERE user_no = ? AND seq > ? ORDER BY timestamp DESC, seq DESC LIMIT ?",
                (user_no, after, max(0, next_seq - 1 - after)),
            ).fetchall()
            blobs: Rows = connection.execute(
                "SELECT seq, key, value FROM vectors WHERE user_no = ? AND seq > ?",
                (user_no, after),
            ).fetchall()
            rows.reverse()
            columns = zip(*rows, strict=True) if rows else ((),) * 5
            seqs, timestamps, weights, items, types = columns
            item_ids = self._items.names(connection, items)
            type_names = self._types.names(connection, types)
        positions = {seq: position for position, seq in enumerate(seqs)} if blobs else {}
        return History(
            user_id=user_id,
            version=version,
            generation=generation,
            seqs=np.fromiter(seqs, np.uint32, len(rows)),
            timestamps=np.fromiter(timestamps, np.int64, len(rows)),
            weights=np.fromiter(weights, np.float32, len(rows)),
            item_ids=item_ids,
            types=type_names,
            vectors={positions[seq]: vectors_from(key, value) for seq, key, value in blobs},
            user=None if profile is None else user_from(user_id, profile),
        )

    def page(
        self, connection: apsw.Connection, user_id: str, cursor: str | None, limit: int
    ) -> tuple[list[Event], str | None]:
        before = (2**63 - 1, 2**63 - 1) if cursor is None else position_of(cursor, int, int)
        with read_transaction(connection):
            rows: Rows = connection.execute(
                f"{SELECT_EVENTS} WHERE user_id = ? AND (timestamp, seq) < (?, ?)"
                " ORDER BY timestamp DESC, seq DESC LIMIT ?",
                (user_id, *before, limit + 1),
            ).fetchall()
            events = self.events(connection, rows[:limit])
        return events, cursor_of(*rows[limit - 1][:2]) if len(rows) > limit else None

    def events(self, connection: apsw.Connection, rows: Rows) -> list[Event]:
        """Build the events of rows that `SELECT_EVENTS` has selected."""
        items = self._items.names(connection, [row[4] for row in rows])
        types = self._types.names(connection, [row[5] for row in rows])
        return [
            Event(user_id, item_id, event_id, type_, weight, timestamp, *vectors_from(key, value))
            for (timestamp, _, user_id, event_id, _, _, weight, key, value), item_id, type_ in zip(
                rows, items, types, strict=True
            )
        ]

    def event_ids(
        self,
        connection: apsw.Connection,
        user_id: str,
        seqs: Sequence[int],
        timestamps: Sequence[int],
    ) -> list[str | None]:
        find = "SELECT seq, event_id FROM events WHERE user_no = ? AND timestamp = ? AND seq = ?"
        with read_transaction(connection):
            user_no = connection.execute(
                "SELECT user_no FROM users WHERE user_id = ?", (user_id,)
            ).get
            wanted = ((user_no, *key) for key in zip(timestamps, seqs, strict=True))
            rows: list[Any] = connection.executemany(find, wanted).fetchall()
        found: dict[int, str] = dict(rows)
        return [found.get(seq) for seq in seqs]

    def popularity(self, connection: apsw.Connection) -> tuple[list[str], NDArray[np.int64]]:
        rows = connection.execute(
            "SELECT item_id, events - dislikes FROM popularity JOIN items USING (item_no)"
            " WHERE events > 0 ORDER BY item_no"
        ).fetchall()
        counts = np.fromiter((n for _, n in rows), dtype=np.int64, count=len(rows))
        return [str(item_id) for item_id, _ in rows], counts

    def clock(self, connection: apsw.Connection) -> int:
        tick: int = connection.execute("SELECT clock FROM state").get
        return tick

    def counts(self, connection: apsw.Connection) -> dict[str, int]:
        users, items, events = connection.execute("SELECT users, items, events FROM state").get
        return {"users": users, "items": items, "events": events}
