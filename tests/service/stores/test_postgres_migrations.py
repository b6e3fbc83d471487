"""Migrations of a PostgreSQL database that has rows."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import psycopg
import pytest

from service.domain.errors import Incompatible
from service.domain.records import Event
from service.stores.encoding import user_key
from service.stores.postgres import schema as migrations
from service.stores.postgres.schema import applied_version, migrate
from service.stores.postgres.store import PostgresStore
from service.stores.postgres.ticks import RANGE_BITS
from tests.support.postgres_server import PostgresDatabases

RANGE = 1 << RANGE_BITS
_USER = """\
INSERT INTO heed.users (user_key, user_no, version, generation, namespace_no, next_seq, has_vectors,
                        user_id)
VALUES (%s, %s, %s, %s, %s, 1, false, %s)"""


def test_users_of_schema_5_have_their_versions(
    postgres: PostgresDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their versions stay, in whatever ranges they are, and what changes later is found as such."""
    url = postgres.create_database()
    known = migrations._migrations()
    versions = {"u1": 5, "u2": RANGE - 1, "u3": RANGE, "u4": 3 * RANGE + 1}
    with psycopg.connect(url, autocommit=True) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "_migrations", lambda: {n: known[n] for n in range(1, 6)})
            assert migrate(connection) == 5
            no = _namespace_of_schema_5(connection)
        for number, (user, version) in enumerate(versions.items(), 1):
            values = (user_key(user), number, version, version, no, user)
            connection.execute(_USER, values)
        connection.execute(f"SELECT setval('heed.user_numbers_{no}', 4)".encode())
        assert migrate(connection) == max(known)
        ranges = connection.execute("SELECT version, version_range FROM heed.users").fetchall()
    assert dict(ranges) == {version: version >> RANGE_BITS for version in versions.values()}
    asyncio.run(_follow(url, versions))


def _namespace_of_schema_5(connection: psycopg.Connection) -> int:
    connection.execute("INSERT INTO heed.namespaces VALUES (1, 'default', 0)")
    connection.execute("CREATE SEQUENCE heed.user_numbers_1")
    return 1


async def _follow(url: str, versions: dict[str, int]) -> None:
    store = PostgresStore(url)
    try:
        assert {user: await store.version(user) for user in versions} == versions
        assert await store.clock() == versions["u4"]
        assert await store.append([Event("u1", "i"), Event("u9", "i")]) == (2, 0)
        assert await store.clock() == await store.version("u1") > versions["u4"]
        changes = await store.log_changes(versions["u4"], np.zeros(0, np.int64))
        assert sorted(changes.events.users) == [1, 5]
    finally:
        await store.close()


def test_a_migration_is_killed_at_each_statement(postgres: PostgresDatabases) -> None:
    """A killed client leaves the earlier schema or the new one, and the next client goes on."""
    latest = max(migrations._migrations())
    url = postgres.create_database()
    statements, seen = 0, set()
    while True:
        statements += 1
        child = os.fork()
        if not child:
            try:
                _migrate_and_die(url, statements)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        with psycopg.connect(url, autocommit=True) as connection:
            seen.add(applied_version(connection))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert statements > 2 * latest
    assert seen == {0, latest}
    asyncio.run(PostgresStore(url).close())


def _migrate_and_die(url: str, statement: int) -> None:
    execute, left = psycopg.Connection.execute, [statement]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(*args, **options)

    psycopg.Connection.execute = counted  # type: ignore[method-assign]
    with psycopg.connect(url, autocommit=True) as connection:
        migrate(connection)
    os._exit(0)


def test_an_older_heed_refuses_a_newer_database(postgres: PostgresDatabases) -> None:
    """It says both versions and what to run, and changes nothing."""
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        latest = migrate(connection)
        connection.execute("INSERT INTO heed.migrations VALUES (%s)", (latest + 1,))
    with pytest.raises(Incompatible, match=f"version {latest + 1} of Heed's schema.*newer Heed"):
        PostgresStore(url)


def test_an_append_changes_no_index_of_users(postgres: PostgresDatabases) -> None:
    """No index has a column that every append changes, so that rows are updated in their pages."""
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        migrate(connection)
        rows = connection.execute(
            "SELECT DISTINCT attname FROM pg_index JOIN pg_attribute"
            " ON attrelid = indrelid AND attnum = ANY(indkey)"
            " WHERE indrelid = 'heed.users'::regclass"
        ).fetchall()
    changed = {"version", "generation", "next_seq", "has_vectors", "profile"}
    assert changed.isdisjoint(name for (name,) in rows)
