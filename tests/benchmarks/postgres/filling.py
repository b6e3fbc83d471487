"""Databases with as many events as wanted, loaded the way `heed copy` loads them.

Histories are as unequal as those of shops: their lengths are lognormal, so that half of the users
have half of the mean or less, and one in eight twice the mean or more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import psycopg
from numpy.typing import NDArray

from service.stores.encoding import item_document
from service.stores.postgres.store import PostgresStore
from service.stores.records.copying import BulkAccess
from service.stores.values import MAX_ITEMS, StoredEvent, StoredUser
from service.stores.values import StoredItem as BulkItem
from tests.benchmarks.postgres.measured_server import MeasuredServer, checkpoint
from tests.benchmarks.workload.many_events import (
    FIRST_TIME,
    SECONDS,
    TYPE_SHARES,
    TYPES,
    generate_items,
    user_lengths,
)

_BATCH = 20_000  # events of a transaction, as `heed copy` has them


@dataclass(frozen=True, slots=True)
class Loaded:
    """A database with its users, and what loading took."""

    url: str
    events: int
    items: int
    lengths: NDArray[np.int64]  # events of each user
    seconds: float  # of loading the events and the users
    client_seconds: float  # of this process' processor, without making the events up
    server_seconds: float

    @property
    def users(self) -> int:
        """Number of users."""
        return len(self.lengths)


def user_id(number: int) -> str:
    """Return the id of the user of this number."""
    return f"user-{number:09}"


def item_id(number: int) -> str:
    """Return the id of the item of this number."""
    return f"item-{number}"


async def load(
    server: MeasuredServer,
    events: int,
    *,
    items: int,
    mean: int,
    progress: Callable[[int, int], None],
    seed: int = 0,
) -> Loaded:
    """Fill a new database, and leave it vacuumed and written to disk, as one that has rested.

    Args:
        server: in which the database is created.
        events: how many.
        items: of the catalogue.
        mean: events of a user on average.
        progress: called with the number of events that are stored.
        seed: of everything that is drawn.
    """
    url = server.create_database()
    lengths = np.array(user_lengths(events, max(1, events // mean), seed), np.int64)
    store = PostgresStore(url, patience=60)
    try:
        bulk = store.bulk()
        await bulk.begin_copy("a benchmark")
        await _put_items(bulk, items, seed)
        wall = client = stored = 0.0
        before = server.cpu_seconds()
        for users in _batches(lengths, items, seed):
            started, used = time.perf_counter(), time.process_time()
            await bulk.put_users(users, users[-1].user_id)
            wall += time.perf_counter() - started
            client += time.process_time() - used
            stored += sum(len(user.events) for user in users)
            progress(int(stored), events)
        await bulk.finish_copy()
        await bulk.mark_copy(is_whole=True)
        worked = server.cpu_seconds() - before
    finally:
        await store.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
    checkpoint(url)
    return Loaded(url, events, items, lengths, wall, client, worked)


def count_events(url: str) -> int:
    """Count the events of a database one by one."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM heed.events").fetchone()
    return 0 if row is None else int(row[0])


async def _put_items(bulk: BulkAccess, count: int, seed: int) -> None:
    items = [
        BulkItem(item.item_id, True, item_document(item), None, [], (1, number))
        for number, item in enumerate(generate_items(count, seed))
    ]
    for start in range(0, count, MAX_ITEMS):
        part = items[start : start + MAX_ITEMS]
        await bulk.add_item_names([item.item_id for item in part])
        await bulk.put_items(part)


def _batches(lengths: NDArray[np.int64], items: int, seed: int) -> Iterator[list[StoredUser]]:
    """Yield users with their events, about `_BATCH` of these at once."""
    rng, ids = np.random.default_rng(seed), random.Random(seed)
    batch: list[StoredUser] = []
    held = 0
    for number, length in enumerate(lengths.tolist()):
        batch.append(_user(number, length, items, rng, ids))
        held += length
        if held >= _BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _user(
    number: int, length: int, items: int, rng: np.random.Generator, ids: random.Random
) -> StoredUser:
    times = np.sort(rng.integers(0, SECONDS, length)) * 1_000_000 + FIRST_TIME
    rows = (items * rng.random(length) ** 3).astype(np.int64)  # a few items have most of them
    kinds = rng.choice(len(TYPES), length, p=TYPE_SHARES)
    columns = zip(times.tolist(), rows.tolist(), kinds.tolist(), strict=True)
    events = [
        # As clients name them: at random.
        StoredEvent(at, seq, item_id(row), TYPES[kind], 1.0, random_id(ids), 0, None)
        for seq, (at, row, kind) in enumerate(columns, 1)
    ]
    return StoredUser(user_id(number), length + 1, None, events, [], [], [])


def random_id(ids: random.Random) -> str:
    """Return a random UUID, of version 4."""
    return str(UUID(int=ids.getrandbits(128), version=4))
