"""Commits of several workers, seen between their two phases and under load."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import psycopg
import pytest

from service.domain.errors import Unavailable
from service.domain.records import Event
from service.stores.postgres.store import PostgresStore
from tests.support.citus_databases import CitusDatabases
from tests.support.half_commit import HalfCommit
from tests.support.store_contract import NOON, LogFollower

pytestmark = pytest.mark.anyio
WRITERS = 6
USERS = 40


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def store(url: str, namespace: str) -> AsyncIterator[PostgresStore]:
    """A store in a namespace of its own."""
    store = PostgresStore(url, namespace=namespace, patience=20.0)
    yield store
    await store.close()


@pytest.fixture
def slow_commits(citus: CitusDatabases, url: str) -> Iterator[None]:
    """Workers that take long to commit, be it in one phase or in the second of two."""
    name = urlsplit(url).path[1:]
    for reset in (False, True):
        for group in citus.workers:
            with psycopg.connect(citus.worker_url(url, group), autocommit=True) as connection:
                connection.execute("SET citus.enable_ddl_propagation = off")
                for setting, value in (("commit_delay", "20000"), ("commit_siblings", "0")):
                    new = f"RESET {setting}" if reset else f"SET {setting} = {value}"
                    connection.execute(f'ALTER DATABASE "{name}" {new}'.encode())
        if not reset:
            yield


@pytest.mark.usefixtures("slow_commits")
async def test_followers_have_what_concurrent_writers_have_stored(
    store: PostgresStore, url: str, namespace: str
) -> None:
    """A follower that reads all the time, while batches reach all workers, misses no event."""
    rng = random.Random(3)
    writers = [
        PostgresStore(f"{url}?application_name=writer{n}", namespace=namespace, patience=20.0)
        for n in range(WRITERS)
    ]

    async def write(writer: PostgresStore, number: int) -> None:
        for batch in range(25):
            users = rng.sample(range(USERS), rng.choice((1, 2, 8)))
            events = [
                Event(f"u{user}", f"i{batch}", f"{number}-{batch}-{user}", timestamp=NOON + batch)
                for user in users
            ]
            await writer.append(events)

    follower = LogFollower(store, limit=None)
    writing = asyncio.gather(*(write(each, number) for number, each in enumerate(writers)))
    while not writing.done():
        await follower.follow()
        await asyncio.sleep(0)
    await writing
    await follower.follow()
    assert await follower.log() == sorted(
        (e.user_id, e.item_id, e.type, e.timestamp, e.weight) for e in store.scan_events()
    )
    for writer in writers:
        await writer.close()


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
        assert await store.clock() > half.tick
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


async def test_no_id_is_left_of_a_user_who_is_forgotten(
    store: PostgresStore, citus: CitusDatabases, url: str, namespace: str
) -> None:
    """Forgetting waits for ids of the user's events that their worker has only prepared."""
    await store.append([Event("u", "i", timestamp=NOON)])
    event = Event("u", "i", "kept", timestamp=NOON + 1)
    with HalfCommit(citus, url, namespace, event, held="id") as half:
        with pytest.raises(Unavailable):
            await store.forget("u")
        assert len(await store.history("u")) == 2
        half.finish()
        assert await store.forget("u") == 2
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM heed.event_ids JOIN heed.namespaces USING (namespace_no)"
            " WHERE name = %s",
            (namespace,),
        ).fetchone()
    assert found == (0,)
    assert await store.append([event]) == (1, 0)


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
