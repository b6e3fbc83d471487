"""Histories of users in a PostgreSQL store: each is read in one statement.

The server packs the rows of a history into one value, which NumPy reads as columns: a row of its
own for each event would take the client longer than everything else.

What every request waits for is run this way: to choose how each value is converted, and to build
a cursor, takes psycopg about as long as the server takes to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncConnection, errors, generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from service.domain.records import Event
from service.stores.encoding import (
    cursor_of,
    position_of,
    user_from,
    vectors_from,
)
from service.stores.event_identity import user_key
from service.stores.jobs import Rows
from service.stores.postgres.names import InternedNames
from service.stores.values import EventVectors, History


class PreparedStatement:
    """Statement that every connection prepares when it first runs it.

    Args:
        name: of the statement in each session; no two statements share one.
        text: in SQL, with parameters `$1`, `$2` and so on, whose types it names.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name.encode()
        self._text = text.encode()
        self._prepared: WeakSet[AsyncConnection] = WeakSet()

    async def row(
        self, connection: AsyncConnection, *values: int | str
    ) -> tuple[bytes | None, ...] | None:
        """Run the statement and return its first row in binary format. Raises `psycopg.Error`."""
        texts = [str(value).encode() for value in values]
        try:
            result = await self._run(connection, texts)
        except errors.InvalidSqlStatementName:  # psycopg deallocates all when it rolls back
            self._prepared.discard(connection)
            result = await self._run(connection, texts)
        if not result.ntuples:
            return None
        return tuple(result.get_value(0, column) for column in range(result.nfields))

    async def _run(self, connection: AsyncConnection, texts: list[bytes]) -> PGresult:
        server = connection.pgconn
        if server.transaction_status != TransactionStatus.IDLE:
            # Where the statement was deallocated, its error would end the transaction.
            server.send_query_params(self._text, texts, result_format=1)
            return await self._result(connection)
        if connection not in self._prepared:
            server.send_prepare(self._name, self._text)
            await self._result(connection)
            self._prepared.add(connection)
        server.send_query_prepared(self._name, texts, result_format=1)
        return await self._result(connection)

    async def _result(self, connection: AsyncConnection) -> PGresult:
        results: list[PGresult] = await connection.wait(generators.execute(connection.pgconn))
        (result,) = results
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise errors.error_from_result(result)
        return result


_PACKED = np.dtype(
    [
        ("timestamp", ">i8"),
        ("seq", ">i4"),
        ("item_no", ">i4"),
        ("type_no", ">i4"),
        ("weight", ">f8"),
    ]
)
_CHANGED = PreparedStatement(
    "heed_changed_history",
    "SELECT * FROM heed.changed_history($1::integer, $2::bigint, $3::text, $4::bigint, $5::bigint,"
    " $6::integer)",
)
# At most so many events came after a seq. Searched from the newest on, they are mostly found at
# once; only an event with an older timestamp lies further back.
_AFTER = """\
SELECT version, generation, has_vectors, profile, packed
  FROM heed.users LEFT JOIN LATERAL (
    SELECT string_agg(int8send(timestamp) || int4send(seq) || int4send(item_no)
                      || int4send(type_no) || float8send(weight), ''::bytea) AS packed
      FROM (
        SELECT timestamp, seq, item_no, type_no, weight FROM heed.events
         WHERE namespace_no = %(no)s AND user_key = %(key)s AND seq > %(seq)s
         ORDER BY timestamp DESC, seq DESC LIMIT greatest(0, users.next_seq - 1 - %(seq)s)
      ) AS found
  ) AS rows ON true
 WHERE namespace_no = %(no)s AND user_key = %(key)s AND user_id = %(id)s"""
_VECTORS = """\
SELECT seq, key, value FROM heed.vectors
 WHERE namespace_no = %s AND user_key = %s AND seq > %s"""
_PAGE = """\
SELECT timestamp, seq, %(id)s::text, event_key, event_id, item_no, type_no, weight, key, value
  FROM heed.events LEFT JOIN heed.vectors USING (namespace_no, user_key, seq)
 WHERE namespace_no = %(no)s AND user_key = %(key)s AND (timestamp, seq) < (%(time)s, %(seq)s)
   AND EXISTS (SELECT FROM heed.users
                WHERE namespace_no = %(no)s AND user_key = %(key)s AND user_id = %(id)s)
 ORDER BY timestamp DESC, seq DESC LIMIT %(limit)s"""
_EVENT_IDS = """\
SELECT seq, event_key, event_id FROM heed.events
  JOIN heed.users USING (namespace_no, user_key)
 WHERE namespace_no = %s AND user_key = %s AND user_id = %s
   AND (timestamp, seq) IN (SELECT * FROM unnest(%s::bigint[], %s::integer[]))"""
_VERSION = """\
SELECT version FROM heed.users WHERE namespace_no = %s AND user_key = %s AND user_id = %s"""
_NOBODY: tuple[bytes | None, ...] = (bytes(8), bytes(8), b"\0", None, None)


class Histories:
    """Reads the histories and profiles of one namespace."""

    def __init__(self, namespace_no: int, items: InternedNames, types: InternedNames) -> None:
        self._no = namespace_no
        self._items = items
        self._types = types

    async def version(self, connection: AsyncConnection, user_id: str) -> int:
        """`Store.version`."""
        row = await self._row(connection, _VERSION, user_key(user_id), user_id)
        return 0 if row is None else int(row[0])

    async def history(self, connection: AsyncConnection, user_id: str, after: int) -> History:
        """`Store.history`."""
        key = user_key(user_id)
        values = {"no": self._no, "key": key, "id": user_id, "seq": min(after, 2**31 - 1)}
        cursor = await connection.execute(_AFTER.encode(), values, binary=True)
        row = await cursor.fetchone() or (0, 0, False, None, None)
        return await self._build(connection, user_id, *row)

    async def changed(
        self,
        connection: AsyncConnection,
        user_id: str,
        version: int,
        generation: int,
        seq: int,
    ) -> History | None:
        """`Store.changed_history`."""
        key = user_key(user_id)
        row = await _CHANGED.row(connection, self._no, key, user_id, version, generation, seq)
        found_version, found_generation, has_vectors, profile, packed = row or _NOBODY
        if (number := _integer(found_version)) == version:
            return None
        return await self._build(
            connection,
            user_id,
            number,
            _integer(found_generation),
            has_vectors == b"\1",
            profile,
            packed,
        )

    async def _build(
        self,
        connection: AsyncConnection,
        user_id: str,
        version: int,
        generation: int,
        has_vectors: bool,
        profile: bytes | None,
        packed: bytes | None,
    ) -> History:
        rows: NDArray[Any] = np.frombuffer(packed or b"", _PACKED)[::-1]
        seqs = rows["seq"].astype(np.uint32)
        vectors: Mapping[int, EventVectors] = {}
        if has_vectors and len(rows):
            vectors = await self._vectors(connection, user_key(user_id), seqs)
        return History(
            user_id=user_id,
            version=version,
            generation=generation,
            seqs=seqs,
            timestamps=rows["timestamp"].astype(np.int64),
            weights=rows["weight"].astype(np.float32),
            item_ids=await self._items.spell(connection, rows["item_no"].tolist()),
            types=await self._types.spell(connection, rows["type_no"].tolist()),
            vectors=vectors,
            user=None if profile is None else user_from(user_id, profile),
        )

    async def page(
        self, connection: AsyncConnection, user_id: str, cursor: str | None, limit: int
    ) -> tuple[list[Event], str | None]:
        """`Store.page`."""
        time, seq = (2**63 - 1, 2**31 - 1) if cursor is None else position_of(cursor, int, int)
        values = {
            "no": self._no,
            "key": user_key(user_id),
            "id": user_id,
            "time": time,
            "seq": max(min(seq, 2**31 - 1), -(2**31)),
            "limit": limit + 1,
        }
        rows = await (await connection.execute(_PAGE.encode(), values, binary=True)).fetchall()
        events = await self.events(connection, rows[:limit])
        return events, cursor_of(*rows[limit - 1][:2]) if len(rows) > limit else None

    async def events(self, connection: AsyncConnection, rows: Rows) -> list[Event]:
        """Build the events of rows as `_PAGE` selects them."""
        items = await self._items.spell(connection, [row[5] for row in rows])
        types = await self._types.spell(connection, [row[6] for row in rows])
        return build_events(rows, items, types)

    async def event_ids(
        self,
        connection: AsyncConnection,
        user_id: str,
        seqs: Sequence[int],
        timestamps: Sequence[int],
    ) -> list[str | None]:
        """`Store.event_ids`."""
        rows = await self._rows(
            connection, _EVENT_IDS, user_key(user_id), user_id, list(timestamps), list(seqs)
        )
        found = {seq: event_id or str(key) for seq, key, event_id in rows}
        return [found.get(seq) for seq in seqs]

    async def _vectors(
        self, connection: AsyncConnection, key: Any, seqs: NDArray[np.uint32]
    ) -> Mapping[int, EventVectors]:
        rows = await self._rows(connection, _VECTORS, key, int(seqs.min()) - 1)
        positions = {seq: position for position, seq in enumerate(seqs.tolist())}
        # The vectors are read after the events: of newer events there is nothing to tell.
        return {
            positions[seq]: vectors_from(own, value) for seq, own, value in rows if seq in positions
        }

    async def _rows(self, connection: AsyncConnection, query: str, *values: Any) -> Rows:
        cursor = await connection.execute(query.encode(), (self._no, *values), binary=True)
        return await cursor.fetchall()

    async def _row(
        self, connection: AsyncConnection, query: str, *values: Any
    ) -> tuple[Any, ...] | None:
        rows = await self._rows(connection, query, *values)
        return rows[0] if rows else None


def _integer(value: bytes | None) -> int:
    return int.from_bytes(value or b"", signed=True)


def build_events(rows: Rows, items: Sequence[str], types: Sequence[str]) -> list[Event]:
    """Build events of rows: timestamp, seq, user_id, ids, numbers, weight, key and value."""
    return [
        Event(
            user_id,
            item_id,
            event_id or str(id_key),
            type_,
            weight,
            timestamp,
            *vectors_from(key, value),
        )
        for (timestamp, _, user_id, id_key, event_id, _, _, weight, key, value), item_id, type_ in (
            zip(rows, items, types, strict=True)
        )
    ]
