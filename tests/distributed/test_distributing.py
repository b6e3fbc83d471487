"""The script that distributes a database, on one that has rows, and migrations after it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from service.domain.records import Event, Item, User
from service.stores.postgres import schema as migrations
from service.stores.postgres.schema import is_distributed, migrate
from service.stores.postgres.store import PostgresStore
from service.stores.store_digest import digest_store
from tests.distributed.conftest import COORDINATOR
from tests.support.citus_databases import CitusDatabases, distribute
from tests.support.command_line import Heed
from tests.support.store_contract import NOON, vector
from tests.support.waiting import eventually


@pytest.fixture
def plain() -> Iterator[str]:
    """The URL of a database of the cluster that is not distributed."""
    databases = CitusDatabases(COORDINATOR, f"heed_test_{uuid.uuid4().hex[:8]}_", shards=None)
    yield databases.create_database()
    databases.drop_databases()


async def fill(store: PostgresStore) -> None:
    """Rows in every table that is distributed."""
    first = await store.begin_import("first")
    events = [
        Event(f"u{n % 40}", f"i{n % 7}", f"e{n}", timestamp=NOON + n, key=vector(n))
        for n in range(200)
    ]
    await store.append(events, import_id=first)
    await store.append(events[:50], import_id=await store.begin_import("second"))
    await store.put_user(User("u1", {"a": 1}), import_id=first)
    await store.put_items([Item(f"i{n}", f"title {n}") for n in range(7)])
    await store.forget("u2")
    await store.merge("u3", "u4")


async def state(url: str, change: bool = False) -> Mapping[str, Any]:
    """What a store says of its content, after it was filled if `change`."""
    store = PostgresStore(url, patience=20.0)
    if change:
        await fill(store)
    found = {
        "digests": await digest_store(store),
        "counts": await store.counts(),
        "popularity": [list(each) for each in await store.popularity()],
        "versions": [await store.version(f"u{n}") for n in range(40)],
    }
    await store.close()
    return found


def test_a_database_with_rows_is_distributed(plain: str) -> None:
    """All content stays what it was, rows are on all workers, and both imports can be undone."""
    before = asyncio.run(state(plain, change=True))
    with psycopg.connect(plain, autocommit=True) as connection:
        distribute(connection, 8)
        tables = connection.execute("SELECT logicalrelid::text FROM pg_dist_partition").fetchall()
        distribute(connection, 8)  # which changes nothing
    assert len(tables) == 8
    assert asyncio.run(state(plain)) == before
    with psycopg.connect(plain) as connection:
        for (table,) in tables:
            rows = connection.execute(
                "SELECT success, result::bigint FROM run_command_on_placements(%s, %s)",
                (table, "SELECT count(*) FROM %s"),
            ).fetchall()
            assert len(rows) == 8
            assert all(success for success, _ in rows)
            assert sum(count for _, count in rows) > 0, table

    async def undo() -> list[tuple[int, int]]:
        store = PostgresStore(plain, patience=20.0)
        undone = [await store.undo_import(number) for number in (1, 2)]
        counts = await store.counts()
        await store.close()
        assert counts["events"] == 0
        return [(each.events, each.shared) for each in undone]

    first, second = asyncio.run(undo())
    assert first[0] + first[1] == before["counts"]["events"]
    assert first[1] == second[0] > 0


def test_nobody_may_use_a_database_while_it_is_distributed(plain: str) -> None:
    """The script refuses while another process is connected, and leaves everything as it is."""
    with psycopg.connect(plain, autocommit=True) as connection:
        with psycopg.connect(plain, autocommit=True) as other:
            migrate(other)
            pid = other.info.backend_pid
            with pytest.raises(psycopg.errors.RaiseException, match="stop all of Heed's processes"):
                distribute(connection, 8)
            assert not is_distributed(other)
        # The server ends a connection some time after its client.
        others = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"
        eventually(lambda: connection.execute(others).fetchall() == [(0,)])
        distribute(connection, 8)
        assert is_distributed(connection)


def test_distributed_tables_of_schema_5_are_upgraded(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Citus takes every migration since then, and rows on all workers have the new column."""
    known = migrations._migrations()
    with psycopg.connect(plain, autocommit=True) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "_migrations", lambda: {n: known[n] for n in range(1, 6)})
            migrate(connection)
        distribute(connection, 8)
        for number in range(50):
            connection.execute(
                "INSERT INTO heed.users (user_key, user_no, version, generation, namespace_no,"
                " next_seq, has_vectors, user_id) VALUES (%s, %s, %s, 1, 1, 1, false, 'u')",
                (number, number, number << 17),
            )
        assert migrate(connection) == max(known)
        rows = connection.execute("SELECT user_no, version_range FROM heed.users").fetchall()
    assert sorted(rows) == [(number, number) for number in range(50)]


def test_a_backup_of_distributed_tables_is_refused(
    url: str, tmp_path: Path, heed: Heed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what to do instead, and nothing but a lock is left in the target."""
    asyncio.run(state(url))
    monkeypatch.setenv("HEED_STORE", url)
    refused = heed("backup", tmp_path / "backup")
    assert refused.code == 1
    assert "heed copy" in refused.err
    left = [path.name for path in (tmp_path / "backup").rglob("*") if path.is_file()]
    assert left == ["lock"]
