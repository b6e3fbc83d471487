"""The event log of a PostgreSQL store: its changes since a version, and scans of all of it.

Transactions commit in another order than that of their ticks. A reader therefore goes no further
than the horizon, below which no transaction is in progress.

Each scan is one read-only transaction over a connection of its own. While it goes on, the server
cannot remove the rows that are deleted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncConnection, Connection

from service.stores.jobs import Rows, translate
from service.stores.postgres.ticks import LAST_VERSION, changed_between, horizon_query, read_horizon
from service.stores.values import LogChanges, LogColumns, Shard, known_seq

_FIND: dict[Literal["users", "items", "types"], str] = {
    "users": "SELECT user_key, user_id FROM heed.users WHERE namespace_no = %s"
    " AND user_key = ANY(%s::bigint[])",
    "items": "SELECT item_no, item_id FROM heed.items WHERE namespace_no = %s"
    " AND item_no = ANY(%s::integer[])",
    "types": "SELECT type_no, type FROM heed.types WHERE namespace_no = %s"
    " AND type_no = ANY(%s::integer[])",
}


class ColumnCodes:
    """Codes of numbers: indexes into `names`, which grows with new numbers.

    Names are read in the transaction of the connection.
    """

    def __init__(
        self, connection: Connection, namespace_no: int, table: Literal["users", "items", "types"]
    ) -> None:
        self.names: list[str] = []
        self._connection = connection
        self._namespace_no = namespace_no
        self._find = _FIND[table].encode()
        self._codes: dict[int, int] = {}

    def codes(self, numbers: NDArray[Any]) -> NDArray[np.int32]:
        """Return the code of each number [n]."""
        distinct, inverse = np.unique(numbers, return_inverse=True)
        keys: list[int] = distinct.tolist()
        new = [key for key in keys if key not in self._codes]
        if new:
            found: dict[int, str] = dict(
                self._connection.execute(self._find, (self._namespace_no, new)).fetchall()
            )
            for key in new:
                self._codes[key] = len(self.names)
                self.names.append(found[key])
        codes = np.fromiter(map(self._codes.__getitem__, keys), np.int32, len(keys))
        return codes[inverse]


_PACKED_CHANGES = np.dtype(
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
_CHANGED_EVENTS = """\
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

    In a distributed database it sees one state of each worker, none of which is older than the
    horizon: later changes of some of them come with a later version.
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
        (key, user_no, 0 if user_no in rewritten else known_seq(known, user_no))
        for key, user_no, _, _, _ in changed
    ]
    events, seqs = _log_columns(connection, namespace_no, wanted)
    void = [number for number in sorted(rewritten) if known_seq(known, number)]
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
        events += next_seq - 1 - (0 if generation > after else known_seq(known, user_no))
    return rows, horizon


def _log_columns(
    connection: Connection, namespace_no: int, wanted: Sequence[tuple[int, int, int]]
) -> tuple[LogColumns, NDArray[np.int64]]:
    """Return events with their users' numbers for codes, and the events' seqs."""
    rows: Rows = []
    if wanted:
        columns = [list(column) for column in zip(*wanted, strict=True)]
        cursor = connection.cursor(binary=True)
        rows = cursor.execute(_CHANGED_EVENTS.encode(), (*columns, namespace_no)).fetchall()
    packed: NDArray[Any] = np.frombuffer(b"".join(row for (row,) in rows), _PACKED_CHANGES)
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


_CHUNK = 10_000  # rows that are read from a cursor at once
_PACKED = np.dtype(
    [
        ("user_key", ">i8"),
        ("item_no", ">i4"),
        ("type_no", ">i4"),
        ("timestamp", ">i8"),
        ("weight", ">f8"),
    ]
)
_COLUMNS = """\
SELECT int8send(user_key) || int4send(item_no) || int4send(type_no) || int8send(timestamp)
       || float8send(weight)
  FROM heed.events WHERE namespace_no = %s AND user_key %% %s = %s
 ORDER BY user_key, timestamp, seq"""


def scan(
    connection: Connection, namespace_no: int, rows: int, shard: Shard | None
) -> Iterator[LogColumns]:
    """`Store.scan`."""
    index, count = (0, 1) if shard is None else (shard.index, shard.count)
    users = ColumnCodes(connection, namespace_no, "users")
    items = ColumnCodes(connection, namespace_no, "items")
    types = ColumnCodes(connection, namespace_no, "types")
    with connection.cursor("scan", binary=True) as cursor:
        cursor.execute(_COLUMNS.encode(), (namespace_no, count, index))
        while chunk := cursor.fetchmany(rows):
            packed: NDArray[np.void] = np.frombuffer(b"".join(row for (row,) in chunk), _PACKED)
            yield LogColumns(
                user_ids=users.names,
                item_ids=items.names,
                type_names=types.names,
                users=users.codes(packed["user_key"]),
                items=items.codes(packed["item_no"]),
                types=types.codes(packed["type_no"]),
                timestamps=packed["timestamp"].astype(np.int64),
                weights=packed["weight"].astype(np.float32),
            )


def scan_rows(connection: Connection, namespace_no: int, sql: str) -> Iterator[tuple[Any, ...]]:
    """Iterate over the rows of a statement of a job, which has no values."""
    with connection.cursor("rows", binary=True) as cursor:
        cursor.execute(translate(sql, "postgres").encode(), {"no": namespace_no})
        while chunk := cursor.fetchmany(_CHUNK):
            yield from chunk
