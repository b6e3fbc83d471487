"""Changes of the event log of a PostgreSQL store, for readers that follow it.

Transactions commit in another order than that of their ticks. A reader therefore goes no further
than the horizon, below which no transaction is in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncConnection, Connection

from service.stores.jobs import Rows
from service.stores.postgres.database.ticks.horizon import horizon_query, read_horizon
from service.stores.postgres.database.ticks.versions import LAST_VERSION, changed_between
from service.stores.postgres.events.column_codes import ColumnCodes
from service.stores.values import LogChanges, LogColumns

_PACKED = np.dtype(
    [
        ("user_no", ">i8"),
        ("seq", ">i4"),
        ("item_no", ">i4"),
        ("type_no", ">i4"),
        ("timestamp", ">i8"),
        ("weight", ">f8"),
    ]
)
# The index has ranges of versions, of which the first and the last may be read in part.
_CHANGED = f"""\
SELECT user_key, user_no, version, generation, next_seq FROM heed.users
 WHERE namespace_no = %(no)s AND {changed_between("%(after)s", "%(until)s")}
 ORDER BY version_range, version LIMIT %(limit)s"""
_GONE = """\
SELECT user_no FROM heed.gone_users WHERE namespace_no = %s AND change > %s AND change <= %s"""
_EVENTS = """\
SELECT int8send(user_no) || int4send(seq) || int4send(item_no) || int4send(type_no)
       || int8send(timestamp) || float8send(weight)
  FROM unnest(%s::bigint[], %s::bigint[], %s::integer[]) AS known (user_key, user_no, last)
  JOIN heed.events USING (user_key) WHERE namespace_no = %s AND seq > last"""
_LATEST = f"""\
SELECT greatest(
         coalesce(({LAST_VERSION}), 0),
         coalesce((SELECT max(change) FROM heed.gone_users WHERE namespace_no = %(no)s), 0),
         coalesce((SELECT catalogue FROM heed.namespaces WHERE namespace_no = %(no)s), 0))"""
_CLOCK = f"SELECT least(({_LATEST}), ({horizon_query(False)}))"
_USERS = 50_000  # changed users that are looked at in one call, at most; more than of one version


async def clock(connection: AsyncConnection, namespace_no: int, is_distributed: bool) -> int:
    """`Store.clock`."""
    query = _LATEST if is_distributed else _CLOCK
    row = await (await connection.execute(query.encode(), {"no": namespace_no})).fetchone()
    latest = 0 if row is None else int(row[0])
    # A statement of its own, since this one must run on the coordinator.
    return min(latest, await read_horizon(connection, True)) if is_distributed else latest


def log_changes(
    connection: Connection,
    namespace_no: int,
    after: int,
    known: NDArray[np.int64],
    limit: int | None,
    is_distributed: bool,
) -> LogChanges:
    """`Store.log_changes`, in a transaction that sees one state of the database.

    Of a distributed database it sees one state of each worker, none of which is older than the
    horizon: what has changed since on some of them comes with a later version.
    """
    horizon = _number(connection, horizon_query(is_distributed))
    rows = connection.execute(
        _CHANGED.encode(),
        {"no": namespace_no, "after": after, "until": horizon, "limit": _USERS + 1},
    ).fetchall()
    changed, version = _first(rows, after, horizon, known, limit)
    gone: Rows = connection.execute(_GONE.encode(), (namespace_no, after, version)).fetchall()
    rewritten = {user_no for (user_no,) in gone}
    rewritten |= {user_no for _, user_no, _, generation, _ in changed if generation > after}
    wanted = [
        (key, user_no, 0 if user_no in rewritten else _known(known, user_no))
        for key, user_no, _, _, _ in changed
    ]
    events, seqs = _columns(connection, namespace_no, wanted)
    void = [number for number in sorted(rewritten) if _known(known, number)]
    return LogChanges(version, np.array(void, np.int64), events, seqs)


def _first(
    rows: Rows, after: int, horizon: int, known: NDArray[np.int64], limit: int | None
) -> tuple[Rows, int]:
    """Return the users up to a version at which about `limit` events are new, and the version."""
    events = 0
    if len(rows) > _USERS:  # a version is read whole or not at all, and of the last one more follow
        horizon = max(row[2] for row in rows if row[2] < rows[-1][2])
        rows = [row for row in rows if row[2] <= horizon]
    for place, (_, user_no, version, generation, next_seq) in enumerate(rows):
        if limit is not None and events >= limit and place and version > rows[place - 1][2]:
            return rows[:place], rows[place - 1][2]
        events += next_seq - 1 - (0 if generation > after else _known(known, user_no))
    return rows, horizon


def _known(known: NDArray[np.int64], user_no: int) -> int:
    return int(known[user_no]) if user_no < len(known) else 0


def _columns(
    connection: Connection, namespace_no: int, wanted: Sequence[tuple[int, int, int]]
) -> tuple[LogColumns, NDArray[np.int64]]:
    """Return events with their users' numbers for codes, and the events' seqs."""
    rows: Rows = []
    if wanted:
        columns = [list(column) for column in zip(*wanted, strict=True)]
        cursor = connection.cursor(binary=True)
        rows = cursor.execute(_EVENTS.encode(), (*columns, namespace_no)).fetchall()
    packed: NDArray[Any] = np.frombuffer(b"".join(row for (row,) in rows), _PACKED)
    items = ColumnCodes(connection, namespace_no, "items")
    types = ColumnCodes(connection, namespace_no, "types")
    events = LogColumns(
        user_ids=[],
        item_ids=items.names,
        type_names=types.names,
        users=packed["user_no"].astype(np.int32),
        items=items.codes(packed["item_no"]),
        types=types.codes(packed["type_no"]),
        timestamps=packed["timestamp"].astype(np.int64),
        weights=packed["weight"].astype(np.float32),
    )
    return events, packed["seq"].astype(np.int64)


def _number(connection: Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    return 0 if row is None else int(row[0])
