"""The PostgreSQL store while its primary is lost, hangs, or waits for a standby."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from service.domain.errors import HeedError, Unavailable
from service.domain.records import Event, Item
from service.stores.postgres.connections import put_first
from service.stores.postgres.store import PostgresStore
from service.stores.values import AppendResult
from tests.support.heed_process import PATIENCE
from tests.support.postgres_cluster import PostgresCluster

pytestmark = pytest.mark.verify

EVENTS = [Event("u", "i1", event_id="e1"), Event("u", "i2", event_id="e2")]


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    """A primary and its synchronous standby."""
    with PostgresCluster() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: PostgresCluster) -> AsyncIterator[PostgresStore]:
    """A store in them, by a URL of both."""
    store = PostgresStore(cluster.url(connect_timeout=2))
    yield store
    await store.close()


async def append(store: PostgresStore, events: list[Event]) -> AppendResult:
    """Append events as a client does: again and again until they are acknowledged."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return await store.append(events)
        except HeedError:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)


async def is_waiting(cluster: PostgresCluster) -> None:
    """Wait until a commit waits for the standby."""
    query = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    until = time.monotonic() + PATIENCE
    with psycopg.connect(cluster.primary.url(), autocommit=True) as connection:
        while connection.execute(query).fetchone() is None:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)


def _read_all(cluster: PostgresCluster) -> None:
    """Read all rows, so that later readers need not write down that they are committed."""
    with psycopg.connect(cluster.primary.url(), autocommit=True) as connection:
        for (table,) in connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'heed'"
        ).fetchall():
            connection.execute(f"SELECT count(*) FROM heed.{table}".encode())


async def history(store: PostgresStore, user: str) -> list[str]:
    """Return the items of a user's events."""
    return (await store.history(user)).item_ids


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("host=a,b,c port=1,2,3 dbname=d", ("b,a,c", "2,1,3")),
        ("host=a,b,c dbname=d", ("a,b,c", None)),
        ("host=a,b,c port=2 dbname=d", ("b,a,c", "2")),
        ("host=b port=2 dbname=d", ("b", "2")),
        ("host=a,c port=1,3 dbname=d", ("a,c", "1,3")),
    ],
)
async def test_the_known_primary_is_asked_first(url: str, expected: tuple[str, str | None]) -> None:
    """Of several servers that a URL names, each stays with its own port."""
    given = conninfo_to_dict(put_first(url, ("b", "2")))
    assert (given["host"], given.get("port")) == expected


async def test_a_duplicate_is_acknowledged_once_the_standby_has_it(
    cluster: PostgresCluster, store: PostgresStore
) -> None:
    """A batch that a lost primary kept alone is no duplicate to rely on after its restart."""
    await store.append([Event("other", "i1"), Event("other", "i2")])  # their names are known
    (standby,) = cluster.standbys
    standby.freeze()
    first = asyncio.ensure_future(store.append(EVENTS))
    await is_waiting(cluster)
    cluster.primary.kill()
    with pytest.raises(Unavailable):
        await first
    cluster.primary.start()
    _read_all(cluster)
    again = asyncio.ensure_future(append(store, EVENTS))
    waits = asyncio.ensure_future(is_waiting(cluster))
    await asyncio.wait([again, waits], return_when=asyncio.FIRST_COMPLETED)
    assert not again.done()
    await waits
    standby.thaw()
    assert await again == AppendResult(0, 2)
    cluster.primary.kill()
    cluster.promote(standby)
    cluster.require_standby(False)
    assert await append(store, EVENTS) == AppendResult(0, 2)


async def test_a_commit_that_no_longer_waits_for_the_standby_is_no_acknowledgement(
    cluster: PostgresCluster, store: PostgresStore
) -> None:
    """PostgreSQL reports such a commit as done, with a warning."""
    await store.append([Event("other", "i1"), Event("other", "i2")])
    cluster.standbys[0].freeze()
    write = asyncio.ensure_future(store.append(EVENTS))
    await is_waiting(cluster)
    with psycopg.connect(cluster.primary.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        )
    with pytest.raises(Unavailable, match="does not confirm"):
        await write
    cluster.standbys[0].thaw()
    assert await store.append(EVENTS) == AppendResult(0, 2)


async def test_writes_go_on_at_the_standby_while_the_primary_hangs(
    cluster: PostgresCluster, store: PostgresStore
) -> None:
    """Writes that hang at the old primary hold no connection back, nor do notices."""
    await store.append(EVENTS)
    assert store.announced_catalogue() == 0
    cluster.primary.freeze()
    hung = [
        asyncio.ensure_future(store.append([Event(f"u{n}", "i1", event_id=f"h{n}")]))
        for n in range(20)
    ]
    await asyncio.sleep(0.2)
    former, (standby,) = cluster.primary, cluster.standbys
    cluster.promote(standby)
    cluster.require_standby(False)
    outcomes = await asyncio.wait_for(asyncio.gather(*hung, return_exceptions=True), PATIENCE)
    assert all(isinstance(each, (AppendResult, Unavailable)) for each in outcomes)
    new = Event("u", "i3", event_id="e3")
    assert await append(store, [new]) == AppendResult(1, 0)
    # The former primary wakes up, and takes writes as far as it knows; nobody asks it any more.
    former.thaw()
    for number in range(20):
        assert await history(store, "u") == ["i1", "i2", "i3"]
        await append(store, [Event("v", "i1", event_id=f"v{number}")])
    other = PostgresStore(standby.url() + "?application_name=other")
    await other.put_items([Item("i1")])
    until = time.monotonic() + PATIENCE
    while store.announced_catalogue() == 0:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert len(await history(other, "v")) == 20
    await other.close()


async def test_names_that_a_promoted_standby_lacks_are_stored_again(
    cluster: PostgresCluster, store: PostgresStore
) -> None:
    """A store that lives through a failover that lost something mixes no items up."""
    cluster.require_standby(False)  # a mode that promises less
    await store.append([Event("u", "i0")])
    (standby,) = cluster.standbys
    standby.kill()
    lost = [Event("u", f"lost{n}", event_id=f"l{n}") for n in range(3)]
    await store.append(lost)
    cluster.primary.kill()
    standby.start()
    cluster.promote(standby)
    other = PostgresStore(standby.url() + "?application_name=other")
    await other.append([Event("v", f"new{n}") for n in range(5)])
    assert await append(store, lost) == AppendResult(3, 0)
    for each in (store, other):
        assert await history(each, "u") == ["i0", "lost0", "lost1", "lost2"]
        assert await history(each, "v") == [f"new{n}" for n in range(5)]
    await other.close()
