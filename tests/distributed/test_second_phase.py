"""Commits of several workers, seen between their two phases."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest

from service.domain.errors import Unavailable
from service.domain.records import Event
from service.stores.encoding import user_key
from service.stores.postgres.store import PostgresStore
from tests.support.citus_databases import CitusDatabases
from tests.support.half_commit import HalfCommit
from tests.support.heed_process import PATIENCE
from tests.support.store_contract import NOON, LogFollower


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def store(url: str, namespace: str) -> AsyncIterator[PostgresStore]:
    """A store in a namespace of its own."""
    store = PostgresStore(url, namespace=namespace, patience=20.0)
    yield store
    await store.close()


async def test_followers_wait_for_what_a_worker_has_only_prepared(
    store: PostgresStore, citus: CitusDatabases, url: str, namespace: str
) -> None:
    """A follower reads no later event before one that a worker does not show yet."""
    await store.append([Event("u", "i", timestamp=NOON), Event("v", "i", timestamp=NOON)])
    follower = LogFollower(store, limit=None)
    await follower.follow()
    before = await follower.log()
    event = Event("u", "i", "half", timestamp=NOON + 1)
    with HalfCommit(citus, url, namespace, event) as half:
        for n in range(8):
            await store.append([Event(f"later{n}", "i", timestamp=NOON)])
        assert await store.clock() < half.tick
        await follower.follow()
        assert await follower.log() == before
        half.finish()
        async with asyncio.timeout(PATIENCE):  # others on the server hold it up, too
            while await store.clock() < half.tick:  # noqa: ASYNC110 - a commit sets no event
                await asyncio.sleep(0.05)
        await follower.follow()
    log = await follower.log()
    assert len(log) == len(before) + 9
    assert ("u", "i", "view", NOON + 1, 1.0) in log


async def test_a_duplicate_is_acknowledged_when_its_event_can_be_read(
    store: PostgresStore, citus: CitusDatabases, url: str, namespace: str
) -> None:
    """A retry of an event whose id is there, but that no answer has yet, is refused until then."""
    await store.append([Event("u", "i", timestamp=NOON)])
    event = Event("u", "i", "again", timestamp=NOON + 1)
    with HalfCommit(citus, url, namespace, event) as half:
        with pytest.raises(Unavailable):
            await store.append([event])
        assert len(await store.history("u")) == 1
        half.finish()
        assert await store.append([event]) == (0, 1)
    assert (await store.history("u")).timestamps.tolist() == [NOON, NOON + 1]


async def forget(store: PostgresStore) -> None:
    await store.forget("u")


async def merge(store: PostgresStore) -> None:
    await store.merge("other", "u")


async def undo(store: PostgresStore) -> None:
    await store.undo_import(1)


@pytest.mark.parametrize("change", [forget, merge, undo])
async def test_no_id_is_left_of_events_that_are_gone(
    store: PostgresStore,
    citus: CitusDatabases,
    url: str,
    namespace: str,
    change: Callable[[PostgresStore], Awaitable[None]],
) -> None:
    """Events go once a worker shows their ids, which it may have prepared and no more."""
    first = await store.begin_import("a file")
    await store.append([Event("u", "i", timestamp=NOON)], import_id=first)
    event = Event("u", "i", "kept", timestamp=NOON + 1)
    with HalfCommit(citus, url, namespace, event, held="id", import_no=first) as half:
        with pytest.raises(Unavailable):
            await change(store)
        assert len(await store.history("u")) == 2
        half.finish()
        await change(store)
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM heed.event_ids JOIN heed.namespaces USING (namespace_no)"
            " WHERE name = %s AND user_key = %s",
            (namespace, user_key("u")),
        ).fetchone()
    assert found == (0,)
    assert len(await store.history("u")) == 0


async def test_writes_do_not_wait_for_what_a_lost_worker_has_prepared(
    store: PostgresStore, citus: CitusDatabases, url: str, namespace: str
) -> None:
    """A write to a user whose row an undecided commit has locked is refused; others succeed."""
    await store.append([Event(f"u{n}", "i", timestamp=NOON) for n in range(8)])
    with HalfCommit(citus, url, namespace, Event("u0", "i", "half", timestamp=NOON + 1)) as half:
        with pytest.raises(Unavailable, match="lock timeout"):
            await store.append([Event("u0", "i")])
        for n in range(1, 8):
            assert await store.append([Event(f"u{n}", "i")]) == (1, 0)
        half.finish()
        assert await store.append([Event("u0", "i")]) == (1, 0)
    assert len(await store.history("u0")) == 3


async def test_names_of_events_that_cannot_be_read_yet_are_kept(
    store: PostgresStore, citus: CitusDatabases, url: str, namespace: str
) -> None:
    """A name that one event used and another is about to use is not deleted with the first."""
    await store.append([Event("u", "i", timestamp=NOON), Event("v", "rare", "e", timestamp=NOON)])
    with HalfCommit(citus, url, namespace, Event("u", "rare", "half", timestamp=NOON + 1)) as half:
        await store.delete_event("v", "e")
        assert not await store.clean_up()
        half.finish()
        assert await store.clean_up()
    assert (await store.history("u")).item_ids == ["i", "rare"]
