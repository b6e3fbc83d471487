"""`heed check` on a PostgreSQL database: what is planted is named, what is intact passes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.shared_registry import KIND, SharedRegistry
from service.stores.postgres.check import check_database
from service.stores.postgres.store import PostgresStore
from tests.support import full_store
from tests.support.command_line import Heed
from tests.support.postgres_server import PostgresDatabases, PostgresServer
from tests.support.tiny import World


@pytest.fixture(scope="module")
def filled(postgres: PostgresDatabases) -> str:
    """A database with everything in it, changed in every way, to be copied."""
    url = postgres.create_database()

    async def fill() -> None:
        store = PostgresStore(url)
        await full_store.fill(store)
        await full_store.change(store)
        await store.clean_up()
        await store.close()

    asyncio.run(fill())
    return url


@pytest.fixture
def url(filled: str, postgres: PostgresDatabases) -> str:
    """A copy of that database for one test."""
    return postgres.copy_database(filled)


def problems(url: str) -> list[str]:
    return [
        each.sentence
        for each in check_database(url, "default", full=True)
        if each.level == "problem"
    ]


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        changed = connection.execute(statement.encode())
        assert changed.rowcount, statement


ONE_EVENT = """(namespace_no, user_key, timestamp, seq) IN (
  SELECT namespace_no, user_key, timestamp, seq FROM heed.events
   WHERE namespace_no = 1 AND event_id IS NOT NULL LIMIT 1)"""


# Of a user with all events at different times, since the key has the time too.
DOUBLE_SEQS = """
UPDATE heed.events AS e
   SET seq = (SELECT min(seq) FROM heed.events AS o WHERE o.user_key = e.user_key)
 WHERE user_key = (SELECT user_key FROM heed.events GROUP BY user_key
                   HAVING count(DISTINCT timestamp) = count(*) AND count(*) > 1 LIMIT 1)"""


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE heed.tallies SET users = users + 1 WHERE users > 0", "users are stored"),
        ("UPDATE heed.namespaces SET items = items - 1", "items are stored"),
        ("UPDATE heed.namespaces SET item_bytes = 0", "bytes of items are stored"),
        ("UPDATE heed.tallies SET bytes = bytes + 1 WHERE bytes > 0", "bytes of users and events"),
        (f"DELETE FROM heed.events WHERE {ONE_EVENT}", "events are stored"),
        (f"DELETE FROM heed.events WHERE {ONE_EVENT}", "1 ids of events that are not stored"),
        (f"DELETE FROM heed.event_ids WHERE {ONE_EVENT}", "1 events without their id"),
        (f"UPDATE heed.event_ids SET seq = 30000 WHERE {ONE_EVENT}", "1 events without their id"),
        (f"UPDATE heed.events SET seq = 30000 WHERE {ONE_EVENT}", "1 events with a seq"),
        (DOUBLE_SEQS, "seqs that several events of a user have"),
        ("DELETE FROM heed.users WHERE user_id = 'user 0008'", "events of users who are not"),
        ("DELETE FROM heed.types WHERE type = 'buy'", "events of types without a name"),
        ("DELETE FROM heed.items WHERE item_id = 'item 1'", "events of items without a name"),
        ("DELETE FROM heed.imports WHERE import_no = 1", "imports that are not recorded"),
        ("UPDATE heed.vectors SET seq = seq + 30000", "vectors without their event"),
        ("UPDATE heed.users SET has_vectors = false WHERE has_vectors", "vectors are not read"),
        ("UPDATE heed.users SET user_id = 'twice' WHERE next_seq > 3", "ids that several users"),
        ("UPDATE heed.users SET user_id = 'x' WHERE user_id = 'user 0008'", "not found by their"),
        ("UPDATE heed.users SET user_no = 1", "numbers that several users have, or had"),
        ("ALTER SEQUENCE heed.item_numbers RESTART 2", "numbers that a sequence will give again"),
        ("UPDATE heed.users SET version = 1::bigint << 60", "versions that the clock has not"),
        (
            "UPDATE heed.tallies SET dislikes = dislikes + 1 WHERE item_no > 0",
            "items whose numbers of events differ",
        ),
    ],
)
def test_what_does_not_hold_is_found(url: str, statement: str, sentence: str) -> None:
    """A sound namespace has no problem; one that is planted is named."""
    assert problems(url) == []
    if statement.startswith("ALTER"):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement.encode())
            connection.execute("SELECT nextval('heed.item_numbers')")
    else:
        _execute(url, statement)
    assert any(sentence in each for each in problems(url)), problems(url)


def test_the_command(
    url: str, world: World, heed: Heed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks records and models of the database, and refuses what is for a file."""
    monkeypatch.setenv("HEED_STORE", url)
    data = world.copy(tmp_path / "data")
    store = PostgresStore(url)
    for version in (world.second, world.first):
        SharedRegistry(data / MODELS_FOLDER, store.shared.files(KIND)).activate(version)
    asyncio.run(store.close())
    said = heed("check", "--full")
    assert said.code == 0, said.out + said.err
    assert f"model {world.first}: every file matches its manifest" in said.out
    assert "pg_amcheck" in said.out
    for options in (["--salvage", tmp_path / "new.db"], ["--accept-loss"]):
        said = heed("check", *options)
        assert said.code == 1
        assert "heed restore" in said.err
    _execute(
        url,
        "UPDATE heed.file_chunks SET data = set_byte(data, 0, get_byte(data, 0) # 1)"
        f" WHERE (set_no, chunk_no) IN (SELECT set_no, 0 FROM heed.file_sets"
        f" WHERE name = '{world.first}')",
    )
    said = heed("check")
    assert said.code == 1
    assert f"model {world.first}" in said.out
    assert "is damaged" in said.out
    assert heed("check", "--namespace", "nowhere").code == 1


def test_damaged_pages_are_found(heed: Heed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that fails its checksum is a problem, in words that say where."""
    with PostgresServer() as server:
        url = server.create_database("heed")

        async def fill() -> None:
            store = PostgresStore(url)
            await full_store.fill(store)
            await store.close()

        asyncio.run(fill())
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
            row = connection.execute("SELECT pg_relation_filepath('heed.users')").fetchone()
        assert row is not None
        server.stop()
        path = server.data / row[0]
        content = bytearray(path.read_bytes())
        content[8000] ^= 1
        path.write_bytes(content)
        server.start()
        monkeypatch.setenv("HEED_STORE", url)
        said = heed("check")
        assert said.code == 1
        assert "PostgreSQL has found damage: invalid page" in said.out
        said = heed("doctor", "--json")
        assert "damaged-pages" in said.out
