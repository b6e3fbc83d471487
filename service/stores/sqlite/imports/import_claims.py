"""Claims of imports on events that were stored before them in a SQLite store.

`events.import_no` is the import that an event goes with; NULL, if it was written without one. Of
the other imports that contain it, each has a claim, as a range of the user's seqs: an export that
is imported again takes one row a user instead of one an event. A range may include seqs without an
event, since no seq is given twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from service.stores.sqlite.writer import Transaction

Owners = list[tuple[Any, ...]]
"""Stored events: timestamp, user_no, seq, and the import_no that is there."""

_SEQ_BITS = 32  # of a user's number and a seq in one integer; histories read seqs as uint32


def add_claims(transaction: Transaction, import_no: int | None, stored: Owners) -> None:
    """Claim stored events for an import, or, without one, for good."""
    connection = transaction.connection
    if import_no is None:
        connection.executemany(
            "UPDATE events SET import_no = NULL WHERE timestamp = ? AND user_no = ? AND seq = ?",
            (place for *place, owner in stored if owner is not None),
        )
        return
    others = [
        user_no << _SEQ_BITS | seq
        for _, user_no, seq, owner in stored
        if owner is not None and owner != import_no
    ]
    if others:
        connection.executemany(
            "INSERT INTO claims VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET last_seq = max(last_seq, excluded.last_seq)",
            (
                (first >> _SEQ_BITS, import_no, first % (1 << _SEQ_BITS), last % (1 << _SEQ_BITS))
                for first, last in _runs(others)
            ),
        )


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the first and the last of each run of consecutive numbers, in their order."""
    ordered = np.sort(np.array(numbers, np.int64))
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts, lasts = ordered[np.append(0, breaks + 1)], ordered[np.append(breaks, -1)]
    return zip(firsts.tolist(), lasts.tolist(), strict=True)


def claimants(transaction: Transaction, user_no: int, seqs: Iterable[int]) -> dict[int, int]:
    """Return one import that claims the event, for each of a user's seqs that has any."""
    ranges: list[tuple[Any, ...]] = transaction.connection.execute(
        "SELECT first_seq, last_seq, import_no FROM claims WHERE user_no = ? ORDER BY first_seq",
        (user_no,),
    ).fetchall()
    found: dict[int, int] = {}
    place, last, import_no = 0, 0, 0
    for seq in sorted(seqs):
        # Of the ranges that begin up to here, the one that ends last has the seq if any has it.
        while place < len(ranges) and ranges[place][0] <= seq:
            if ranges[place][1] > last:
                _, last, import_no = ranges[place]
            place += 1
        if last >= seq:
            found[seq] = import_no
    return found


def drop_claims(transaction: Transaction, import_no: int) -> None:
    """Delete the claims of an import."""
    transaction.connection.execute("DELETE FROM claims WHERE import_no = ?", (import_no,))


def drop_claims_on(transaction: Transaction, user_no: int) -> None:
    """Delete the claims on a user's events."""
    transaction.connection.execute("DELETE FROM claims WHERE user_no = ?", (user_no,))


def move_claims(transaction: Transaction, target_no: int, shift: int, source_no: int) -> None:
    """Let claims follow events to another user, under seqs that are greater by `shift`."""
    transaction.connection.execute(
        "UPDATE claims SET user_no = ?1, first_seq = first_seq + ?2, last_seq = last_seq + ?2"
        " WHERE user_no = ?3",
        (target_no, shift, source_no),
    )
