"""Bulk writes of whole users into a SQLite store that is the target of a copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import apsw

from service.domain.records import NEGATIVE
from service.stores.protocols.bulk_access import StoredUser, latest_holders
from service.stores.sqlite.forgetting import delete_user
from service.stores.sqlite.registers.popularity import count_events
from service.stores.sqlite.writer import Transaction
from service.stores.sqlite.writes import Names


class SQLiteUserWrites:
    """Changes of users. Only the writer's thread runs them."""

    def __init__(self, items: Names, types: Names) -> None:
        self._items = items
        self._types = types

    def put_users(
        self,
        transaction: Transaction,
        users: Sequence[StoredUser],
        absent: Sequence[str],
    ) -> None:
        """`BulkAccess.put_users`."""
        _drop(transaction, _find(transaction, [*absent, *(user.user_id for user in users)]))
        if not users:
            return
        events = [event for user in users for event in user.events]
        items = self._items.numbers(transaction, {event.item_id for event in events})
        types = self._types.numbers(transaction, {event.type for event in events})
        try:
            with transaction.connection:  # a savepoint
                self._insert(transaction, users, items, types)
        except apsw.ConstraintError:
            ids = tuple(event.event_id for event in events)
            _drop(transaction, _holders(transaction, ids))
            users = latest_holders(users)
            events = [event for user in users for event in user.events]
            self._insert(transaction, users, items, types)
        count_events(
            transaction, ((items[event.item_id], event.type in NEGATIVE) for event in events), 1
        )
        transaction.connection.execute(
            "UPDATE state SET users = users + ?, events = events + ?", (len(users), len(events))
        )

    def _insert(
        self,
        transaction: Transaction,
        users: Sequence[StoredUser],
        items: dict[str, int],
        types: dict[str, int],
    ) -> None:
        connection, tick = transaction.connection, transaction.tick()
        first: int = connection.execute("SELECT coalesce(max(user_no), 0) + 1 FROM users").get
        numbered = list(enumerate(users, first))
        executemany = connection.executemany
        executemany(
            "INSERT INTO users VALUES (?, ?, ?, ?, ?, ?)",
            (
                (user_no, user.user_id, tick, tick, user.next_seq, user.profile)
                for user_no, user in numbered
            ),
        )
        executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (user_no, time, seq, items[item_id], types[type_], *rest)
                for user_no, user in numbered
                for time, seq, item_id, type_, *rest in user.events
            ),
        )
        executemany(
            "INSERT INTO vectors VALUES (?, ?, ?, ?)",
            ((user_no, *row) for user_no, user in numbered for row in user.vectors),
        )
        executemany(
            "INSERT INTO claims VALUES (?, ?, ?, ?)",
            ((user_no, *row) for user_no, user in numbered for row in user.claims),
        )
        executemany(
            "INSERT INTO replaced VALUES ('user', ?, ?, ?, ?, ?)",
            ((user_no, *row) for user_no, user in numbered for row in user.replaced),
        )


def _find(transaction: Transaction, user_ids: Collection[str]) -> list[int]:
    """Return the numbers of those of the users who are stored."""
    if not user_ids:
        return []
    rows = transaction.connection.execute(
        "SELECT user_no FROM users WHERE user_id IN carray(?)", (apsw.carray(tuple(user_ids)),)
    )
    return [user_no for (user_no,) in rows]


def _holders(transaction: Transaction, event_ids: tuple[str, ...]) -> list[int]:
    """Return the numbers of the users who have any of the events."""
    if not event_ids:
        return []
    rows = transaction.connection.execute(
        "SELECT DISTINCT user_no FROM events WHERE event_id IN carray(?)",
        (apsw.carray(event_ids),),
    )
    return [user_no for (user_no,) in rows]


def _drop(transaction: Transaction, user_nos: Iterable[int]) -> None:
    for user_no in user_nos:
        delete_user(transaction, user_no)
