"""A database that is dumped and restored into other servers, or promoted: its clocks go on."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import psycopg
import pytest

from service.domain.errors import HeedError
from service.domain.keys import issue_key
from service.domain.records import Event, Item
from service.stores.postgres.store import PostgresStore
from service.stores.postgres.ticks import MARGIN, TICKS
from tests.support.heed_process import PATIENCE
from tests.support.postgres_cluster import PostgresCluster
from tests.support.postgres_programs import ENVIRONMENT, multi_host_url, program
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.verify

NOBODY = np.zeros(0, np.int64)
_BURN = """
CREATE PROCEDURE burn(count integer) LANGUAGE plpgsql AS $$
BEGIN
  FOR each IN 1..count LOOP
    PERFORM pg_current_xact_id();
    COMMIT;
  END LOOP;
END $$"""


@pytest.fixture
def servers() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """Two servers that know nothing of each other."""
    with PostgresServer() as first, PostgresServer() as second:
        yield first, second


def burn(server: PostgresServer, count: int) -> None:
    """Let a server give out so many ids of transactions."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(_BURN)
        connection.execute("CALL burn(%s)", (count,))
        connection.execute("DROP PROCEDURE burn")


def move(source: str, target: PostgresServer) -> str:
    """Dump a database and restore it into another server, as an operator does; return its URL."""
    url = target.create_database("heed")
    dump = [program("pg_dump"), "--dbname", source]
    dumping = subprocess.run(dump, stdout=subprocess.PIPE, check=True, env=ENVIRONMENT)
    restoring = [program("psql"), "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", url]
    subprocess.run(
        restoring, input=dumping.stdout, stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT
    )
    return url


def next_id(url: str) -> int:
    """The id that the next transaction of a server gets."""
    with psycopg.connect(url) as connection:
        query = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ((number,),) = connection.execute(query).fetchall()
    return int(number)


def base(url: str) -> int:
    """The base of ticks."""
    with psycopg.connect(url) as connection:
        ((number,),) = connection.execute("SELECT tick_base FROM heed.installation").fetchall()
    return int(number)


async def fill(store: PostgresStore) -> None:
    """Store something of each kind that has versions."""
    await store.append([Event("u", f"i{n}", f"e{n}", timestamp=n) for n in range(5)])
    await store.append([Event("gone", "i", "e-gone")])
    await store.forget("gone")
    await store.put_items([Item("i1"), Item("i2")])
    key, _ = issue_key("k", frozenset({"read"}), 1)
    await store.add_key(key)


async def versions(store: PostgresStore) -> dict[str, int]:
    """All versions that readers of a store compare."""
    return {
        "user": await store.version("u"),
        "clock": await store.clock(),
        "catalogue": await store.catalogue_version(),
        "keys": await store.keys_version(),
    }


async def test_versions_grow_after_a_dump_was_restored(
    servers: tuple[PostgresServer, PostgresServer],
) -> None:
    """In servers whose ids of transactions are far lower, every change has a higher version."""
    first, second = servers
    burn(first, 20_000)
    source = PostgresStore(first.create_database("heed"))
    await fill(source)
    before = await versions(source)
    changes = await source.log_changes(0, NOBODY)
    await source.close()
    url = move(first.url("heed"), second)
    assert TICKS * next_id(url) < min(before.values()), "the ids must run backwards"
    assert base(url) == 0
    moved = PostgresStore(url)
    found = await versions(moved)
    assert found == before
    assert (await moved.log_changes(changes.version, NOBODY)).events.item_ids == []
    await moved.append([Event("u", "late", "late")])
    await moved.put_items([Item("i3")])
    for key in await moved.keys():
        await moved.revoke_key(key.key_id)
    after = await versions(moved)
    assert {name: after[name] > before[name] for name in after} == dict.fromkeys(after, True)
    assert (await moved.catalogue_changes(before["catalogue"])).upserted == [Item("i3")]
    known = np.array([0, 5], np.int64)  # the seqs of u, the first user
    late = await moved.log_changes(changes.version, known)
    assert late.events.item_ids == ["late"]
    await moved.close()
    raised = base(url)
    again = PostgresStore(url)
    await again.append([Event("u", "later", "later")])
    assert base(url) == raised, "it is raised once"
    assert await again.version("u") > after["user"]
    await again.close()


async def test_versions_that_were_lost_do_not_come_again(
    servers: tuple[PostgresServer, PostgresServer],
) -> None:
    """Other servers, whose ids are higher, leave room for what was written after the dump."""
    first, second = servers
    source = PostgresStore(first.create_database("heed"))
    await fill(source)
    burn(second, 5_000)
    url = move(first.url("heed"), second)
    highest = max((await versions(source)).values())
    await source.append([Event("u", "lost", "lost")])
    lost = await source.version("u")
    await source.close()
    assert TICKS * next_id(url) > highest
    moved = PostgresStore(url)
    await moved.append([Event("u", "other", "other")])
    assert await moved.version("u") > highest + MARGIN > lost
    await moved.close()


async def test_a_store_that_is_open_follows_to_other_servers(
    servers: tuple[PostgresServer, PostgresServer],
) -> None:
    """Where other servers answer than those it was opened on, its clocks go on too."""
    first, second = servers
    burn(first, 20_000)
    first.create_database("heed")
    both = multi_host_url([first.port, second.port], "heed", connect_timeout=2)
    store = PostgresStore(both)
    await fill(store)
    before = await versions(store)
    move(first.url("heed"), second)
    first.kill()
    until = time.monotonic() + PATIENCE
    while True:
        try:
            await store.append([Event("u", "late", "late")])
            break
        except HeedError:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)
    await store.append([Event("new", "late", "new")])
    assert await store.version("new") > await store.version("u") > before["clock"] + MARGIN
    assert await store.clock() > before["clock"]
    assert (await store.history("u")).item_ids == [f"i{n}" for n in range(5)] + ["late"]
    await store.close()


async def test_a_promoted_standby_leaves_room_for_what_was_lost() -> None:
    """On a newer timeline the base is raised once, also while commits wait for a standby."""
    with PostgresCluster() as cluster:
        store = PostgresStore(cluster.url(connect_timeout=2))
        await store.append([Event("u", "i", "e")])
        before = await store.version("u")
        await store.close()
        (standby,) = cluster.standbys
        cluster.primary.kill()
        cluster.promote(standby)
        other = PostgresStore(standby.url())  # its own commit must not wait
        raised = base(standby.url())
        cluster.require_standby(False)
        await other.append([Event("u", "i2", "e2")])
        assert await other.version("u") > before + MARGIN
        await other.close()
        await PostgresStore(standby.url()).close()
        assert base(standby.url()) == raised
