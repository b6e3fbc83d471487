"""Statements that are prepared by name and run without a cursor.

What every request waits for is run this way: to choose how each value is converted, and to build
a cursor, takes psycopg about as long as the server takes to answer.
"""

from __future__ import annotations

from weakref import WeakSet

from psycopg import AsyncConnection, errors, generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult


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
