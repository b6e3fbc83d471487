"""The event log of a SQLite store: appending, histories, changes since a version, and scans.

Statements inside one `with read_transaction(connection):` see one state of the database.

Each scan is one read transaction over a connection of its own. During a scan the write-ahead log
cannot be reset and grows with every write; it shrinks again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.records import NEGATIVE, Event
from service.stores.encoding import (
    EventIds,
    FreshEvent,
    blob_from,
    find_fresh,
    user_from,
    user_key,
    vectors_from,
)
from service.stores.jobs import Rows, Tally
from service.stores.quota import StoreUsage
from service.stores.records import imports
from service.stores.sqlite.transaction import NameCodes, Spelling, SQLiteTransaction
from service.stores.values import AppendResult, History, LogChanges, LogColumns, Shard, known_seq

Owners: TypeAlias = list[tuple[int, int, int, int | None]]
"""Stored events: user_no, timestamp, seq, and the import that each goes with."""


class Appending:
    """Appends events. Only the writer's thread does."""

    def __init__(self) -> None:
        self._event_ids = EventIds()

    def append(
        self,
        transaction: SQLiteTransaction,
        events: Sequence[Event],
        now: int,
        import_no: int | None,
    ) -> AppendResult:
        """Append events that arrived at `now`."""
        fresh, owners = self._without_duplicates(transaction, events, now)
        if owners or import_no is not None:
            transaction.run(imports.claim(import_no, owners))
        if not fresh:
            return AppendResult(0, len(events))
        executemany = transaction.connection.executemany
        tick = transaction.tick()
        items = transaction.item_numbers({event.item_id for event, _, _ in fresh})
        types = transaction.type_numbers({event.type for event, _, _ in fresh})
        users = _users(transaction, {event.user_id for event, _, _ in fresh})
        names = self._event_ids.take(len(fresh), now)
        rows: list[tuple[Any, ...]] = []
        vectors: list[tuple[Any, ...]] = []
        for event, timestamp, digest in fresh:
            user = users[event.user_id]
            user_no, seq = user
            user[1] += 1
            item_no, type_no = items[event.item_id], types[event.type]
            event_id = next(names) if event.event_id is None else event.event_id
            columns = (user_no, timestamp, seq, item_no, type_no, event.weight, event_id, digest)
            rows.append((*columns, import_no))
            if event.key is not None or event.value is not None:
                vectors.append((user_no, seq, blob_from(event.key), blob_from(event.value)))
        added = (
            (row[3], event.type in NEGATIVE) for row, (event, _, _) in zip(rows, fresh, strict=True)
        )
        tally = Tally()
        for item_no, is_negative in added:
            tally.add(item_no, is_negative)
        transaction.run(transaction.count(0, tally))
        rows.sort()  # rows that are adjacent in the table are written together
        executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if vectors:
            executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", vectors)
        executemany(
            "UPDATE users SET version = ?, next_seq = ? WHERE user_no = ?",
            ((tick, next_seq, user_no) for user_no, next_seq in users.values()),
        )
        return AppendResult(len(rows), len(events) - len(rows))

    def _without_duplicates(
        self, transaction: SQLiteTransaction, events: Sequence[Event], now: int
    ) -> tuple[list[FreshEvent], Owners]:
        """Return the new events with timestamps and digests, and those that are stored already.

        Raises `Conflict`.
        """
        known: dict[str, tuple[int, int]] = {}
        owners: Owners = []
        given = tuple({event.event_id for event in events if event.event_id is not None})
        if given:
            rows: list[tuple[Any, ...]] = transaction.connection.execute(
                "SELECT event_id, digest, timestamp, user_no, timestamp, seq, import_no FROM events"
                " WHERE event_id IN carray(?)",
                (apsw.carray(given),),
            ).fetchall()
            known = {row[0]: (row[1], row[2]) for row in rows}
            owners = [(row[3], row[4], row[5], row[6]) for row in rows]
        return find_fresh(events, now, known), owners


def _users(transaction: SQLiteTransaction, user_ids: set[str]) -> dict[str, list[int]]:
    """`[user_no, next_seq]` of each user; unknown ones are created."""
    connection = transaction.connection
    users = {
        user_id: [user_no, next_seq]
        for user_id, user_no, next_seq in connection.execute(
            "SELECT user_id, user_no, next_seq FROM users WHERE user_id IN carray(?)",
            (apsw.carray(tuple(user_ids)),),
        )
    }
    created = sorted(user_ids - users.keys())
    if created:
        tick = transaction.tick()
        first = connection.execute("SELECT coalesce(max(user_no), 0) + 1 FROM users").get
        users |= {user_id: [first + index, 1] for index, user_id in enumerate(created)}
        connection.executemany(
            "INSERT INTO users VALUES (?, ?, ?, ?, 1, NULL)",
            ((users[user_id][0], user_id, tick, tick) for user_id in created),
        )
        connection.execute("UPDATE state SET users = users + ?", (len(created),))
    return users


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


def usage(connection: apsw.Connection) -> StoreUsage:
    """Read the contents of the store, with those of the transaction in progress."""
    events, items = connection.execute("SELECT events, items FROM state").get
    pages = connection.pragma("page_count") - connection.pragma("freelist_count")
    return StoreUsage(events, items, pages * connection.pragma("page_size"))


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

    def history(
        self, connection: apsw.Connection, user_id: str, known: int = -1, seq: int = 0
    ) -> History:
        """Return a user's events; those after `seq` if the user's generation is `known`."""
        with read_transaction(connection):
            user_no, version, generation, next_seq, profile = connection.execute(
                "SELECT user_no, version, generation, next_seq, profile FROM users"
                " WHERE user_id = ?",
                (user_id,),
            ).fetchone() or (0, 0, 0, 1, None)
            after = seq if generation == known else 0
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

    # Each request reads the next two, so they are no jobs.

    def catalogue_version(self, connection: apsw.Connection) -> int:
        tick: int = connection.execute("SELECT catalogue FROM state").get
        return tick

    def keys_version(self, connection: apsw.Connection) -> int:
        tick: int = connection.execute("SELECT coalesce(max(change), 0) FROM keys").get
        return tick

    def counts(self, connection: apsw.Connection) -> dict[str, int]:
        users, items, events = connection.execute("SELECT users, items, events FROM state").get
        return {"users": users, "items": items, "events": events}


_CHANGED = (
    "SELECT user_no, version, generation, next_seq FROM users WHERE version > ? ORDER BY version"
)
_GONE = "SELECT user_no FROM gone_users WHERE change > ? AND change <= ?"
_LOG_COLUMNS = "SELECT user_no, seq, item_no, type_no, timestamp, weight FROM events"
# Searched from the newest on, appended events are mostly found at once.
_APPENDED = (
    f"{_LOG_COLUMNS} WHERE user_no = ? AND seq > ? ORDER BY timestamp DESC, seq DESC LIMIT ?"
)
_WHOLE = f"{_LOG_COLUMNS} WHERE user_no IN carray(?)"


def log_changes(
    connection: apsw.Connection, after: int, known: NDArray[np.int64], limit: int
) -> LogChanges:
    """`Store.log_changes`."""
    with read_transaction(connection):
        version, changed = _changed_users(connection, after, known, limit)
        gone: set[int] = {number for (number,) in connection.execute(_GONE, (after, version))}
        rewritten = gone | {user_no for user_no, _, generation, _ in changed if generation > after}
        whole = []
        rows: Rows = []
        for user_no, _, _, next_seq in changed:
            seq = 0 if user_no in rewritten else known_seq(known, user_no)
            if seq == 0:
                whole.append(user_no)
            elif next_seq - 1 > seq:
                rows += connection.execute(_APPENDED, (user_no, seq, next_seq - 1 - seq))
        numbers = np.array(whole, np.int64)
        rows += connection.execute(_WHOLE, (apsw.carray(numbers),)) if whole else []
        events, seqs = _log_columns(connection, rows)
    void = [number for number in sorted(rewritten) if known_seq(known, number)]
    return LogChanges(version, np.array(void, np.int64), events, seqs)


def _changed_users(
    connection: apsw.Connection, after: int, known: NDArray[np.int64], limit: int
) -> tuple[int, Rows]:
    """Return the users that changed, up to a version at which about `limit` events are new."""
    changed: Rows = []
    events = 0
    for row in connection.execute(_CHANGED, (after,)):
        user_no, version, generation, next_seq = row
        if events >= limit and version > changed[-1][1]:  # a version is read whole or not at all
            return changed[-1][1], changed
        changed.append(row)
        events += next_seq - 1 - (0 if generation > after else known_seq(known, user_no))
    return connection.execute("SELECT clock FROM state").get, changed


def _log_columns(
    connection: apsw.Connection, rows: Sequence[tuple[Any, ...]]
) -> tuple[LogColumns, NDArray[np.int64]]:
    """Return events with their users' numbers for codes, and the events' seqs."""
    items, types = NameCodes("items"), NameCodes("types")
    columns = zip(*rows, strict=True) if rows else ((),) * 6
    user_nos, seqs, item_nos, type_nos, timestamps, weights = columns
    events = LogColumns(
        user_ids=[],
        item_ids=items.names,
        type_names=types.names,
        users=np.fromiter(user_nos, np.int32, len(rows)),
        items=items.of(connection, item_nos),
        types=types.of(connection, type_nos),
        timestamps=np.fromiter(timestamps, np.int64, len(rows)),
        weights=np.fromiter(weights, np.float32, len(rows)),
    )
    return events, np.fromiter(seqs, np.int64, len(rows))


_COLUMNS = "SELECT user_no, item_no, type_no, timestamp, weight FROM events"
_ALL = f"{_COLUMNS} ORDER BY user_no, timestamp, seq"
_OF_USER = f"{_COLUMNS} WHERE user_no = ? ORDER BY timestamp, seq"


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
