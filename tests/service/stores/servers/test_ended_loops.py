"""Commands over a PostgreSQL store: each asks on an event loop of its own, which then ends."""

from __future__ import annotations

import subprocess
import sys

from tests.support.heed_process import PATIENCE, ROOT

COMMANDS = """
import asyncio
from service.domain.errors import Unavailable
from service.stores.postgres.store import PostgresStore
from tests.support.postgres_server import PostgresServer

with PostgresServer() as server:
    store = PostgresStore(server.create_database())
    for _ in range(50):
        assert asyncio.run(store.counts())["items"] == 0
    server.freeze()
    try:
        asyncio.run(store.counts())
    except Unavailable as error:
        print(error)
"""


def test_loops_end_while_connections_are_made() -> None:
    """A loop ends although its pool is connecting, also to a server that hangs."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.startswith("PostgreSQL does not answer")
