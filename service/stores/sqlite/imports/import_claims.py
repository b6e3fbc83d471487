"""Claims of imports on events that were stored before them in a SQLite store.

`events.import_no` is the import that an event goes with; NULL, if it was written without one. Of
the other imports that contain it, each has a claim, as a range of the user's seqs: an export that
is imported again takes one row a user instead of one an event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from service.stores.claim_ranges import claim_ranges, find_claimants
from service.stores.sqlite.writer import SQLiteTransaction

Owners = list[tuple[Any, ...]]
"""Stored events: timestamp, user_no, seq, and the import_no that is there."""


def add_claims(transaction: SQLiteTransaction, import_no: int | None, stored: Owners) -> None:
    """Claim stored events for an import, or, without one, for good."""
    connection = transaction.connection
    if import_no is None:
        connection.executemany(
            "UPDATE events SET import_no = NULL WHERE timestamp = ? AND user_no = ? AND seq = ?",
            (place for *place, owner in stored if owner is not None),
        )
        return
    others = (
        (user_no, seq)
        for _, user_no, seq, owner in stored
        if owner is not None and owner != import_no
    )
    connection.executemany(
        "INSERT INTO claims VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET last_seq = max(last_seq, excluded.last_seq)",
        ((user_no, import_no, first, last) for user_no, first, last in claim_ranges(others)),
    )


def claimants(transaction: SQLiteTransaction, user_no: int, seqs: Iterable[int]) -> dict[int, int]:
    """Return one import that claims the event, for each of a user's seqs that has any."""
    ranges: list[tuple[Any, ...]] = transaction.connection.execute(
        "SELECT first_seq, last_seq, import_no FROM claims WHERE user_no = ? ORDER BY first_seq",
        (user_no,),
    ).fetchall()
    return find_claimants([(first, last, no) for first, last, no in ranges], seqs)


def drop_claims(transaction: SQLiteTransaction, import_no: int) -> None:
    """Delete the claims of an import."""
    transaction.connection.execute("DELETE FROM claims WHERE import_no = ?", (import_no,))


def drop_claims_on(transaction: SQLiteTransaction, user_no: int) -> None:
    """Delete the claims on a user's events."""
    transaction.connection.execute("DELETE FROM claims WHERE user_no = ?", (user_no,))


def move_claims(transaction: SQLiteTransaction, target_no: int, shift: int, source_no: int) -> None:
    """Let claims follow events to another user, under seqs that are greater by `shift`."""
    transaction.connection.execute(
        "UPDATE claims SET user_no = ?1, first_seq = first_seq + ?2, last_seq = last_seq + ?2"
        " WHERE user_no = ?3",
        (target_no, shift, source_no),
    )
