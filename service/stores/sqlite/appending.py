"""Appending of events to a SQLite store: a job of the writer's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import apsw

from service.domain.records import DISLIKE, Event
from service.stores.encoding import EventIds, vector_bytes
from service.stores.event_identity import FreshEvent, find_fresh
from service.stores.jobs import Tally
from service.stores.records import imports
from service.stores.sqlite.transaction import SQLiteTransaction
from service.stores.values import AppendResult

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
                vectors.append((user_no, seq, _blob(event.key), _blob(event.value)))
        added = (
            (row[3], event.type == DISLIKE) for row, (event, _, _) in zip(rows, fresh, strict=True)
        )
        tally = Tally()
        for item_no, is_dislike in added:
            tally.add(item_no, is_dislike)
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


def _blob(vector: Any) -> bytes | None:
    return None if vector is None else vector_bytes(vector)
