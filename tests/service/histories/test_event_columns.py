"""The cache of event columns: always equal to a read of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from models.data.vocabulary import Vocabulary
from service.domain.records import Event, User
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import MemoryProvider
from service.stores.sqlite.store import SQLiteStore
from tests.support.stored_events import memory_provider

MINUTE = 60_000_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    opened = SQLiteStore(tmp_path / "heed.db")
    yield opened
    await opened.close()


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture
def memories(store: SQLiteStore, vocabulary: Vocabulary) -> MemoryProvider:
    return memory_provider(1 << 20, store, vocabulary)


async def load(memories: MemoryProvider, user: str = "u") -> EventColumns:
    return await memories.load(user, now=0)


def event(number: int, *, user: str = "u", minute: int | None = None, **other: object) -> Event:
    when = (number if minute is None else minute) * MINUTE
    return Event(user, f"i{number % 5}", f"{user}-{number}", timestamp=when, **other)  # type: ignore[arg-type]


def vector(number: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full(4, number, dtype=np.float32)


async def same(
    memories: MemoryProvider, store: SQLiteStore, vocabulary: Vocabulary, user: str = "u"
) -> EventColumns:
    """Load the columns, assert that they equal the store's history, and return them."""
    got, true = await load(memories, user), await store.history(user)
    if len(true) or true.user:
        assert (got.version, got.generation) == (true.version, true.generation)
    assert [vocabulary.id(row) for row in got.rows] == true.item_ids
    assert [got.type_names[code] for code in got.types] == true.types
    np.testing.assert_array_equal(got.timestamps, true.timestamps)
    np.testing.assert_array_equal(got.seqs, true.seqs)
    np.testing.assert_array_equal(got.filled_weights(), true.weights)
    assert got.vectors.keys() == true.vectors.keys()
    for place, pair in true.vectors.items():
        for one, other in zip(got.vectors[place], pair, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)
    assert got.user == true.user
    return got


async def test_cache_equals_the_store_after_every_change(
    memories: MemoryProvider, store: SQLiteStore, vocabulary: Vocabulary
) -> None:
    """The cached columns equal the store's history after each of 150 random writes."""
    random = np.random.default_rng(0)
    there: list[int] = []
    for number in range(150):
        kind = random.random()
        if kind < 0.7 or not there:
            await store.append(
                [
                    event(
                        number,
                        minute=int(random.integers(50)),
                        weight=float(random.integers(1, 3)),
                        type=str(random.choice(["view", "buy"])),
                        key=vector(number) if random.random() < 0.2 else None,
                        value=vector(-number) if random.random() < 0.2 else None,
                    )
                ]
            )
            there.append(number)
        elif kind < 0.85:
            gone = there.pop(int(random.integers(len(there))))
            assert await store.delete_event("u", f"u-{gone}")
        elif kind < 0.9:
            await store.put_user(User("u", interests=(f"c{number}",)))
        elif kind < 0.95:
            await store.append([event(number, user="v")])
            there.append(number)
            assert await store.merge("u", "v")
            await store.delete_event("u", f"v-{number}")
            there.pop()
        else:
            await store.forget("u")
            there.clear()
        await same(memories, store, vocabulary)


async def test_appended_events_alone_are_read(
    memories: MemoryProvider, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an append only the new event is read; without one nothing is."""
    await store.append([event(number) for number in range(20)])
    await load(memories)
    read: list[int] = []
    true = store.changed_history

    async def counted(user_id: str, **how: int) -> object:
        found = await true(user_id, **how)
        if found is not None:
            read.append(len(found))
        return found

    monkeypatch.setattr(store, "changed_history", counted)
    await load(memories)
    await store.append([event(20)])
    assert len(await load(memories)) == 21
    await load(memories)
    assert read == [1]
    stats = memories.stats()
    assert (stats["history_hits"], stats["history_misses"]) == (2, 2)


async def test_unknown_users_are_not_cached(memories: MemoryProvider) -> None:
    """Unknown users have no events and take no cache memory."""
    for number in range(100):
        assert len(await load(memories, f"stranger {number}")) == 0
    assert memories.stats()["cached_history_bytes"] == 0


async def test_cached_event_takes_twenty_bytes(
    memories: MemoryProvider, store: SQLiteStore
) -> None:
    """A cached event takes 20 bytes, or 24 if any weight of its history differs from 1."""
    await store.append([event(number) for number in range(1000)])
    plain = (await load(memories)).nbytes
    await store.append([event(1000, weight=2.0)])
    weighed = (await load(memories)).nbytes
    assert plain <= 20 * 1000 + 512
    assert weighed == plain + 20 + 4 * 1001


async def test_a_time_leaves_out_later_events_with_all_that_they_brought(
    memories: MemoryProvider, store: SQLiteStore
) -> None:
    """Events after the time of a request are left out, and what is cached stays whole."""
    await store.put_user(User("u", {}, ("jazz",)))
    await store.append([event(n, weight=1 + n, key=vector(n), value=vector(-n)) for n in range(4)])
    for minute, count in ((2, 3), (-1, 0), (3, 4), (1, 2)):
        found = await memories.load("u", minute * MINUTE, now=0)
        assert found.timestamps.tolist() == [n * MINUTE for n in range(count)]
        assert found.filled_weights().tolist() == [1 + n for n in range(count)]
        assert sorted(found.vectors) == list(range(count))
        assert len(found.rows) == len(found.types) == len(found.seqs) == count
        assert found.interests == ("jazz",)
        assert (found.version == 0) == (count < 4)
    assert len(await load(memories)) == 4


async def test_load_of_a_cancelled_request_is_cached(
    memories: MemoryProvider, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.append([event(1), event(2)])
    read, gate = store.history, asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> Any:
        await gate.wait()
        return await read(*given, **named)

    monkeypatch.setattr(store, "history", slowly)
    with anyio.move_on_after(0.01) as scope:
        await load(memories)
    assert scope.cancelled_caught
    assert memories.stats()["cached_histories"] == 0
    gate.set()
    for _ in range(10_000):
        await asyncio.sleep(0)
    monkeypatch.setattr(store, "history", None)  # nothing is read again
    assert len(await load(memories)) == 2
    assert memories.stats()["history_hits"] == 1
