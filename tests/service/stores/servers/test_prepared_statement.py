"""Statements that each connection to a real server prepares by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from service.stores.postgres.histories import PreparedStatement
from tests.support.postgres_server import PostgresDatabases

_SUM = "SELECT a + $2::integer, $3::text, NULL FROM generate_series(1, $1::integer) AS a"


def _over(url: str, question: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    async def main() -> None:
        async with await AsyncConnection.connect(url, autocommit=True) as connection:
            await question(connection)

    asyncio.run(main())


def test_the_first_row_is_in_binary_format(postgres: PostgresDatabases) -> None:
    """Integers are in network order, texts in UTF-8, NULL is None, and no row is None."""
    statement = PreparedStatement("sum", _SUM)

    async def question(connection: AsyncConnection) -> None:
        for _ in range(2):
            row = await statement.row(connection, 3, -2, "é'%s$1")
            assert row == ((-1).to_bytes(4, "big", signed=True), "é'%s$1".encode(), None)
            assert await statement.row(connection, 0, 1, "x") is None

    url = postgres.create_database()
    _over(url, question)
    _over(url, question)  # over another connection


def test_statements_that_were_deallocated_are_prepared_again(postgres: PostgresDatabases) -> None:
    """A session that has lost its statements answers as before, also within a transaction."""
    statement = PreparedStatement("sum", _SUM)

    async def question(connection: AsyncConnection) -> None:
        connection.prepare_threshold = None
        for command in ("SELECT 1", "DEALLOCATE ALL", "DEALLOCATE ALL", "BEGIN", "COMMIT"):
            await connection.execute(command.encode())
            row = await statement.row(connection, 1, 1, "x")
            assert row == ((2).to_bytes(4, "big"), b"x", None)
            await connection.execute("DEALLOCATE ALL")

    _over(postgres.create_database(), question)


def test_errors_are_those_of_psycopg_and_leave_the_connection_usable(
    postgres: PostgresDatabases,
) -> None:
    """Errors of preparing and of running have their class, and the next statement runs."""
    statement = PreparedStatement("quotient", "SELECT 6 / $1::integer")
    unknown = PreparedStatement("unknown", "SELECT * FROM nowhere")

    async def question(connection: AsyncConnection) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await unknown.row(connection)
        with pytest.raises(psycopg.errors.DivisionByZero):
            await statement.row(connection, 0)
        assert await statement.row(connection, 2) == ((3).to_bytes(4, "big"),)
        assert connection.info.transaction_status == TransactionStatus.IDLE

    _over(postgres.create_database(), question)


def test_a_cancelled_statement_leaves_the_connection_usable(postgres: PostgresDatabases) -> None:
    """Whoever stops waiting has the server stop as well."""
    statement = PreparedStatement("sleep", "SELECT pg_sleep($1::integer)::text")

    async def question(connection: AsyncConnection) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await statement.row(connection, 600)
        assert await statement.row(connection, 0) == (b"",)

    _over(postgres.create_database(), question)
