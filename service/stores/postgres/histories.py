"""Histories of users in a PostgreSQL store: each is read in one statement.

The server packs the rows of a history into one value, which NumPy reads as columns: a row of its
own for each event would take the client longer than everything else.

Statements that every request waits for are run this way: to choose how each value is converted, and
to build a cursor, takes psycopg about as long as the server takes to answer.
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

from service.stores.encoding import (
    user_from,
    user_key,
    vectors_from,
)
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
            # The error of a deallocated statement would end the transaction.
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
_VECTORS = """\
SELECT seq, key, value FROM heed.vectors
 WHERE namespace_no = %s AND user_key = %s AND seq > %s"""
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

    async def history(self, connection: AsyncConnection, user_id: str) -> History:
        """`Store.history`."""
        row = await _CHANGED.row(connection, self._no, user_key(user_id), user_id, -1, -1, 0)
        return await self._build(connection, user_id, *(row or _NOBODY))

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
        row = row or _NOBODY
        return None if _integer(row[0]) == version else await self._build(connection, user_id, *row)

    async def _build(
        self,
        connection: AsyncConnection,
        user_id: str,
        version: bytes | None,
        generation: bytes | None,
        has_vectors: bytes | None,
        profile: bytes | None,
        packed: bytes | None,
    ) -> History:
        rows: NDArray[Any] = np.frombuffer(packed or b"", _PACKED)[::-1]
        seqs = rows["seq"].astype(np.uint32)
        vectors: Mapping[int, EventVectors] = {}
        if has_vectors == b"\1" and len(rows):
            vectors = await self._vectors(connection, user_key(user_id), seqs)
        return History(
            user_id=user_id,
            version=_integer(version),
            generation=_integer(generation),
            seqs=seqs,
            timestamps=rows["timestamp"].astype(np.int64),
            weights=rows["weight"].astype(np.float32),
            item_ids=await self._items.spell(connection, rows["item_no"].tolist()),
            types=await self._types.spell(connection, rows["type_no"].tolist()),
            vectors=vectors,
            user=None if profile is None else user_from(user_id, profile),
        )

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
