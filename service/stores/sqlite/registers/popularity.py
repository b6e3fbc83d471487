"""Numbers of events of each item, kept with the log, so that no start has to count it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from service.stores.encoding import IS_NEGATIVE
from service.stores.sqlite.writer import Transaction

_COUNTED = f"SELECT item_no, {IS_NEGATIVE} FROM events JOIN types USING (type_no)"  # noqa: S608


def count_events(
    transaction: Transaction, events: Iterable[tuple[int, bool]], sign: Literal[1, -1]
) -> None:
    """Add events to the popularity of their items, or take them from it.

    Not by a trigger, which takes longer than all else that an insertion does.

    Args:
        events: the number of the item of each, and whether it is negative.
        sign: 1 for new events, -1 for events to be deleted.
    """
    counts: dict[int, list[int]] = {}
    for item_no, is_negative in events:
        count = counts.setdefault(item_no, [0, 0])
        count[0] += sign
        count[1] += sign * is_negative
    transaction.connection.executemany(
        "INSERT INTO popularity VALUES (?, ?, ?) ON CONFLICT (item_no) DO UPDATE"
        " SET events = events + excluded.events, dislikes = dislikes + excluded.dislikes",
        ((item_no, *count) for item_no, count in sorted(counts.items())),
    )


def discount_events(transaction: Transaction, places: Sequence[tuple[int, int, int]]) -> None:
    """Take stored events, by their primary keys, from the popularity of their items."""
    rows: list[Any] = transaction.connection.executemany(
        f"{_COUNTED} WHERE user_no = ? AND timestamp = ? AND seq = ?", places
    ).fetchall()
    count_events(transaction, rows, -1)


def discount_user(transaction: Transaction, user_no: int) -> None:
    """Take all events of a user from the popularity of their items."""
    rows: list[Any] = transaction.connection.execute(
        f"{_COUNTED} WHERE user_no = ?", (user_no,)
    ).fetchall()
    count_events(transaction, rows, -1)
