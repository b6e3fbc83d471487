"""Changes of the event log of a SQLite store, for readers that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import numpy as np
from numpy.typing import NDArray

from service.stores.sqlite.reads import read_transaction
from service.stores.sqlite.scan import NameCodes
from service.stores.values import LogChanges, LogColumns

Rows = list[tuple[Any, ...]]

_CHANGED = (
    "SELECT user_no, version, generation, next_seq FROM users WHERE version > ? ORDER BY version"
)
_GONE = "SELECT user_no FROM gone_users WHERE change > ? AND change <= ?"
_COLUMNS = "SELECT user_no, seq, item_no, type_no, timestamp, weight FROM events"
# Searched from the newest on, appended events are mostly found at once.
_APPENDED = f"{_COLUMNS} WHERE user_no = ? AND seq > ? ORDER BY timestamp DESC, seq DESC LIMIT ?"
_WHOLE = f"{_COLUMNS} WHERE user_no IN carray(?)"


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
            seq = 0 if user_no in rewritten else _known(known, user_no)
            if seq == 0:
                whole.append(user_no)
            elif next_seq - 1 > seq:
                rows += connection.execute(_APPENDED, (user_no, seq, next_seq - 1 - seq))
        numbers = np.array(whole, np.int64)
        rows += connection.execute(_WHOLE, (apsw.carray(numbers),)) if whole else []
        events, seqs = _columns(connection, rows)
    void = [number for number in sorted(rewritten) if _known(known, number)]
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
        events += next_seq - 1 - (0 if generation > after else _known(known, user_no))
    return connection.execute("SELECT clock FROM state").get, changed


def _known(known: NDArray[np.int64], user_no: int) -> int:
    return int(known[user_no]) if user_no < len(known) else 0


def _columns(
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
