"""Changes of a SQLite store: each runs as one job on the writer's thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import apsw

from service.domain.records import NEGATIVE, Event, User
from service.stores.base import AppendResult
from service.stores.encoding import (
    EventIds,
    user_document,
    user_from,
    vector_bytes,
)
from service.stores.event_identity import FreshEvent, find_fresh
from service.stores.sqlite.forgetting import drop_user, note_names
from service.stores.sqlite.imports.import_claims import (
    Owners,
    add_claims,
    move_claims,
)
from service.stores.sqlite.imports.replaced_records import keep_replaced
from service.stores.sqlite.reads import INTERNED, MAX_CACHED_NAMES
from service.stores.sqlite.registers.popularity import count_events, discount_events
from service.stores.sqlite.writer import Transaction


class Names:
    """Numbers of interned names, cached until names are deleted."""

    def __init__(self, table: Literal["items", "types"]) -> None:
        number, name = INTERNED[table]
        self._find = f"SELECT {name}, {number} FROM {table} WHERE {name} IN carray(?)"  # noqa: S608
        last = f"last_{table.removesuffix('s')}"
        self._next = (
            f"SELECT max(coalesce((SELECT max({number}) FROM {table}), 0), {last}) + 1 FROM state"  # noqa: S608
        )
        self._add = f"INSERT INTO {table} ({number}, {name}) VALUES (?, ?)"  # noqa: S608
        self._known: dict[str, int] = {}
        self._tick = 0  # of the last deletion of names

    def numbers(self, transaction: Transaction, names: Iterable[str]) -> dict[str, int]:
        """Return the number of each name; new names are inserted."""
        if transaction.names != self._tick:
            self._known, self._tick = {}, transaction.names
        known = self._known
        wanted = set(names)
        found = {name: known[name] for name in wanted if name in known}
        if len(found) == len(wanted):
            return found
        learned = self.add(transaction, sorted(wanted - found.keys()))
        transaction.after_commit(lambda: self._remember(learned))
        return found | learned

    def add(self, transaction: Transaction, names: Sequence[str]) -> dict[str, int]:
        """Insert the new ones of names, at least one, in this order; return the numbers of all."""
        connection = transaction.connection
        found = dict(connection.execute(self._find, (apsw.carray(tuple(names)),)))
        first = connection.execute(self._next).get
        new = dict.fromkeys(name for name in names if name not in found)
        added = {name: first + index for index, name in enumerate(new)}
        connection.executemany(self._add, ((number, name) for name, number in added.items()))
        return found | added

    def _remember(self, learned: dict[str, int]) -> None:
        if len(self._known) + len(learned) > MAX_CACHED_NAMES:
            self._known = {}
        self._known |= learned


class Writes:
    """Changes, named as the methods of `Store`. Only the writer's thread runs them."""

    def __init__(self, items: Names) -> None:
        self._items = items
        self._types = Names("types")
        self._event_ids = EventIds()

    # ------------------------------------------------------------------ events

    def append(
        self, transaction: Transaction, events: Sequence[Event], now: int, import_no: int | None
    ) -> AppendResult:
        """Append events that arrived at `now`."""
        fresh, owners = self._without_duplicates(transaction, events, now)
        add_claims(transaction, import_no, owners)
        if not fresh:
            return AppendResult(0, len(events))
        execute, executemany = transaction.connection.execute, transaction.connection.executemany
        tick = transaction.tick()
        items = self._items.numbers(transaction, {event.item_id for event, _, _ in fresh})
        types = self._types.numbers(transaction, {event.type for event, _, _ in fresh})
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
            (row[3], event.type in NEGATIVE) for row, (event, _, _) in zip(rows, fresh, strict=True)
        )
        count_events(transaction, added, 1)
        rows.sort()  # rows that are adjacent in the table are written together
        executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if vectors:
            executemany("INSERT INTO vectors VALUES (?, ?, ?, ?)", vectors)
        executemany(
            "UPDATE users SET version = ?, next_seq = ? WHERE user_no = ?",
            ((tick, next_seq, user_no) for user_no, next_seq in users.values()),
        )
        execute("UPDATE state SET events = events + ?", (len(rows),))
        return AppendResult(len(rows), len(events) - len(rows))

    def _without_duplicates(
        self, transaction: Transaction, events: Sequence[Event], now: int
    ) -> tuple[list[FreshEvent], Owners]:
        """Return the new events with timestamps and digests, and those that are stored already.

        Raises `Conflict`.
        """
        known: dict[str, tuple[int, int]] = {}
        owners: Owners = []
        given = tuple({event.event_id for event in events if event.event_id is not None})
        if given:
            rows: list[tuple[Any, ...]] = transaction.connection.execute(
                "SELECT event_id, digest, timestamp, user_no, seq, import_no FROM events"
                " WHERE event_id IN carray(?)",
                (apsw.carray(given),),
            ).fetchall()
            known = {row[0]: (row[1], row[2]) for row in rows}
            owners = [row[2:] for row in rows]
        return find_fresh(events, now, known), owners

    def delete_event(self, transaction: Transaction, user_id: str, event_id: str) -> bool:
        execute = transaction.connection.execute
        row = execute(
            "SELECT user_no, timestamp, seq FROM events JOIN users USING (user_no)"
            " WHERE event_id = ? AND user_id = ?",
            (event_id, user_id),
        ).fetchone()
        if row is None:
            return False
        place = "user_no = ? AND timestamp = ? AND seq = ?"
        note_names(transaction, place, row)
        discount_events(transaction, [row])
        execute(f"DELETE FROM events WHERE {place}", row)  # noqa: S608
        user_no, _, seq = row
        transaction.scrub()
        execute("DELETE FROM vectors WHERE user_no = ? AND seq = ?", (user_no, seq))
        rewrite_history(transaction, user_no)
        execute("UPDATE state SET events = events - 1")
        return True

    # ------------------------------------------------------------------ users

    def merge(self, transaction: Transaction, user_id: str, source: str) -> int:
        source_no = _user_no(transaction, source)
        if source_no is None:
            return 0
        connection = transaction.connection
        execute = connection.execute
        target_no, next_seq = _users(transaction, {user_id})[user_id]
        # Seqs start at 1: the source's follow the target's, gaps and all.
        move = (target_no, next_seq - 1, source_no)
        execute("UPDATE events SET user_no = ?, seq = seq + ? WHERE user_no = ?", move)
        moved: int = connection.changes()
        execute("UPDATE vectors SET user_no = ?, seq = seq + ? WHERE user_no = ?", move)
        move_claims(transaction, *move)
        ours, theirs = (
            execute("SELECT profile FROM users WHERE user_no = ?", (user_no,)).get
            for user_no in (target_no, source_no)
        )
        if theirs is not None:
            first, second = user_from(user_id, ours), user_from(source, theirs)
            interests = dict.fromkeys(first.interests + second.interests)
            merged = User(user_id, {**second.attributes, **first.attributes}, tuple(interests))
            profile = user_document(merged)
            execute("UPDATE users SET profile = ? WHERE user_no = ?", (profile, target_no))
        execute(
            "UPDATE users SET next_seq = next_seq - 1 + (SELECT next_seq FROM users"
            " WHERE user_no = ?) WHERE user_no = ?",
            (source_no, target_no),
        )
        rewrite_history(transaction, target_no)
        drop_user(transaction, source_no)
        return moved

    def put_user(
        self, transaction: Transaction, user_id: str, profile: bytes, import_no: int | None
    ) -> None:
        user_no, _ = _users(transaction, {user_id})[user_id]
        if import_no is not None:
            find = "SELECT profile FROM users WHERE user_no = ?"
            old = transaction.connection.execute(find, (user_no,)).get
            if old != profile:
                keep_replaced(
                    transaction, import_no, "user", [(user_no, (old, None), (profile, None))]
                )
        transaction.connection.execute(
            "UPDATE users SET version = ?, profile = ? WHERE user_no = ?",
            (transaction.tick(), profile, user_no),
        )


def _users(transaction: Transaction, user_ids: set[str]) -> dict[str, list[int]]:
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


def _user_no(transaction: Transaction, user_id: str) -> int | None:
    found: int | None = transaction.connection.execute(
        "SELECT user_no FROM users WHERE user_id = ?", (user_id,)
    ).get
    return found


def rewrite_history(transaction: Transaction, user_no: int) -> None:
    """Record a change of the user's events that is not an append."""
    tick = transaction.tick()
    transaction.connection.execute(
        "UPDATE users SET version = ?, generation = ? WHERE user_no = ?", (tick, tick, user_no)
    )


def _blob(vector: Any) -> bytes | None:
    return None if vector is None else vector_bytes(vector)
