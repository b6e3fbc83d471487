"""Materialised histories: never older than the store, and as exact as reading everything anew."""

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
from service.histories.event_cache import EventColumns, Histories, weights_of
from service.stores.sqlite import SQLiteStore

pytestmark = pytest.mark.anyio

MINUTE = 60_000_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    opened = SQLiteStore(tmp_path / "heed.db")
    yield opened
    await opened.close()


@pytest.fixture
def histories(store: SQLiteStore) -> Histories:
    return Histories(store, Vocabulary(), 1 << 20)


def event(number: int, *, user: str = "u", minute: int | None = None, **other: object) -> Event:
    when = (number if minute is None else minute) * MINUTE
    return Event(user, f"i{number % 5}", f"{user}-{number}", timestamp=when, **other)  # type: ignore[arg-type]


def vector(number: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.full(4, number, dtype=np.float32)


async def same(histories: Histories, store: SQLiteStore, user: str = "u") -> EventColumns:
    """What the cache gives, after comparing it with the store's own reading."""
    got, true = await histories.get(user), await store.history(user)
    assert (got.version, got.generation) == (true.version, true.generation)
    assert [histories._items.id(row) for row in got.rows] == true.item_ids
    assert [histories.types.id(code) for code in got.types] == true.types
    np.testing.assert_array_equal(got.timestamps, true.timestamps)
    np.testing.assert_array_equal(got.seqs, true.seqs)
    np.testing.assert_array_equal(weights_of(got), true.weights)
    assert got.vectors.keys() == true.vectors.keys()
    for place, pair in true.vectors.items():
        for one, other in zip(got.vectors[place], pair, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)
    assert got.user == true.user
    return got


async def test_it_is_what_the_store_says_after_every_change(
    histories: Histories, store: SQLiteStore
) -> None:
    """Random writes of every kind, each followed by a reading: the cache agrees every time."""
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
        await same(histories, store)


async def test_what_is_only_appended_to_is_read_from_its_end(
    histories: Histories, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new event costs a reading of one, a question without one costs none."""
    await store.append([event(number) for number in range(20)])
    await histories.get("u")
    read: list[int] = []
    true = store.history

    async def counted(user_id: str, **how: int | None) -> object:
        found = await true(user_id, **how)
        read.append(len(found))
        return found

    monkeypatch.setattr(store, "history", counted)
    await histories.get("u")
    await store.append([event(20)])
    assert len(await histories.get("u")) == 21
    await histories.get("u")
    assert read == [1]
    assert (histories.hits, histories.misses) == (2, 2)


async def test_an_unknown_user_has_nothing_and_takes_no_room(histories: Histories) -> None:
    """Asking for strangers does not fill the memory."""
    for number in range(100):
        assert len(await histories.get(f"stranger {number}")) == 0
    assert (len(histories), histories.nbytes) == (0, 0)


async def test_a_profile_without_events_is_kept(histories: Histories, store: SQLiteStore) -> None:
    """It is somebody, who has interests and no events yet."""
    await store.put_user(User("u", interests=("music",)))
    found = await same(histories, store)
    assert found.user is not None
    await store.append([event(1)])
    assert len(await same(histories, store)) == 1


async def test_the_least_recently_asked_for_makes_room(store: SQLiteStore) -> None:
    """Never more bytes than allowed, and whoever was let go is read again, unchanged."""
    await store.append([event(n, user=f"u{u}") for u in range(10) for n in range(50)])
    whole = Histories(store, Vocabulary(), 1 << 30)
    sizes = {(await whole.get(f"u{u}")).nbytes for u in range(10)}
    (one,) = sizes
    assert whole.nbytes == 10 * one
    small = Histories(store, Vocabulary(), 3 * one)
    for user in range(10):
        await small.get(f"u{user}")
        assert small.nbytes <= 3 * one
        await small.get("u0")  # asked for all the time, it stays
    assert len(small) == 3
    misses = small.misses
    await small.get("u0")
    assert small.misses == misses
    await same(small, store, "u4")
    small.drop()
    assert (len(small), small.nbytes) == (0, 0)
    await same(small, store, "u0")


async def test_what_is_too_large_drives_nobody_out(store: SQLiteStore) -> None:
    """A history beyond the bound is answered and not kept; who was there stays."""
    await store.append([event(n, user="u0") for n in range(50)])
    await store.append([event(n, user="giant") for n in range(500)])
    one = (await Histories(store, Vocabulary(), 1 << 30).get("u0")).nbytes
    small = Histories(store, Vocabulary(), 2 * one)
    await small.get("u0")
    assert len(await small.get("giant")) == 500
    hits = small.hits
    await small.get("u0")
    assert small.hits == hits + 1
    assert len(small) == 1


async def test_no_room_at_all_is_only_slower(store: SQLiteStore) -> None:
    """With nothing kept every question reads the store."""
    histories = Histories(store, Vocabulary(), 0)
    await store.append([event(1)])
    for _ in range(2):
        await same(histories, store)
    assert (len(histories), histories.nbytes) == (0, 0)


async def test_ten_million_events_would_fit(histories: Histories, store: SQLiteStore) -> None:
    """An ordinary event takes twenty bytes; weights that differ from one take four more."""
    await store.append([event(number) for number in range(1000)])
    plain = (await histories.get("u")).nbytes
    await store.append([event(1000, weight=2.0)])
    weighed = (await histories.get("u")).nbytes
    assert plain <= 20 * 1000 + 512
    assert weighed == plain + 20 + 4 * 1001


async def test_any_number_of_types(histories: Histories, store: SQLiteStore) -> None:
    """Names of events are the client's own, and may be as many as there are events."""
    await store.append([event(n, type=f"type {n}") for n in range(40_000)])
    found = await histories.get("u")
    assert histories.types.id(int(found.types[-1])) == "type 39999"


async def test_what_nobody_waited_for_to_the_end_is_kept(
    histories: Histories, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that ran out of time has read the history for the next one."""
    await store.append([event(1), event(2)])
    read, gate = store.history, asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> Any:
        await gate.wait()
        return await read(*given, **named)

    monkeypatch.setattr(store, "history", slowly)
    with anyio.move_on_after(0.01) as scope:
        await histories.get("u")
    assert scope.cancelled_caught
    assert len(histories) == 0
    gate.set()
    for _ in range(10_000):
        await asyncio.sleep(0)
    monkeypatch.setattr(store, "history", None)  # nothing is read again
    assert len(await histories.get("u")) == 2
    assert histories.hits == 1
