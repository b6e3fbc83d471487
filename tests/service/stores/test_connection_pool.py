"""Connections to PostgreSQL that are opened for calls which do not wait for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.pq import TransactionStatus

from service.stores.postgres.pool import ConnectionPool


async def test_a_connection_for_a_cancelled_call_is_of_the_next() -> None:
    is_open = asyncio.Event()
    connection: Any = SimpleNamespace(
        info=SimpleNamespace(transaction_status=TransactionStatus.IDLE), closed=False
    )

    async def connect() -> Any:
        await is_open.wait()
        return connection

    pool = ConnectionPool(connect, size=1, queue=1)
    call = asyncio.create_task(pool.take(5.0))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    is_open.set()
    await asyncio.sleep(0.01)
    assert await pool.take(5.0) == (connection, False)
