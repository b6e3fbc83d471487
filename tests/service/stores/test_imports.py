"""Imports of a store and their undoing, against exports of the whole store."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.datasets.imports import import_dataset
from service.datasets.record_files import EventsFile
from service.datasets.rows import to_json_lines
from service.domain.errors import Invalid
from service.domain.records import Event, Item, User
from service.stores.base import Store
from service.stores.sqlite.store import SQLiteStore
from tests.support.old_stores import to_version

pytestmark = pytest.mark.verify

NOON = 1_700_000_000_000_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    """An empty store."""
    opened = SQLiteStore(tmp_path / "heed.db")
    yield opened
    await opened.close()


def exported(store: Store) -> list[bytes]:
    """Every record of the store as a line, in an order that arrival does not change."""
    lines: list[bytes] = []
    for records in (store.scan_events(), store.scan_items(), store.scan_users()):
        lines += sorted(to_json_lines(records))
    return lines + [user.encode() for user in store.scan_user_ids()]


def drawn_events(source: random.Random, count: int) -> list[Event]:
    """Events of few contents, so that imports have many in common."""
    return [
        Event(
            f"u{source.randrange(6)}",
            f"i{source.randrange(5)}",
            f"e{source.randrange(150)}",
            timestamp=NOON,
            key=np.ones(2, np.float32) if source.random() < 0.2 else None,
        )
        for _ in range(count)
    ]


async def write(store: Store, source: random.Random, import_id: int | None) -> None:
    """Store some of everything; event ids determine the events."""
    events = {event.event_id: event for event in drawn_events(source, 30)}
    known = {event.event_id async for event in _stored(store)}
    await store.append([e for i, e in events.items() if i not in known], import_id=import_id)
    items = [Item(f"i{source.randrange(8)}", str(source.randrange(3))) for _ in range(4)]
    await store.put_items(items, import_id=import_id)
    user = User(f"u{source.randrange(9)}", {"n": source.randrange(3)})
    await store.put_user(user, import_id=import_id)


async def _stored(store: Store) -> AsyncIterator[Event]:
    for event in store.scan_events():
        yield event


@pytest.mark.parametrize("seed", range(30))
async def test_undoing_the_last_import_restores_the_store(store: SQLiteStore, seed: int) -> None:
    """Whatever came before, an import that is undone at once leaves no trace."""
    source = random.Random(seed)
    for _ in range(source.randrange(4)):
        await write(store, source, None if source.random() < 0.5 else await store.begin_import("a"))
    before, counts = exported(store), await store.counts()
    import_id = await store.begin_import("b")
    for _ in range(1 + source.randrange(3)):
        await write(store, source, import_id)
    assert exported(store) != before
    progress: list[int] = []
    undone = await store.undo_import(import_id, progress=progress.append)
    assert exported(store) == before
    assert await store.counts() == counts
    assert undone.kept == 0
    assert progress[-1] == undone.events


@pytest.mark.parametrize("seed", range(20))
async def test_imports_may_be_undone_in_any_order(store: SQLiteStore, seed: int) -> None:
    """After all imports are undone, the store has what was there before the first."""
    source = random.Random(seed)
    await write(store, source, None)
    before = exported(store)
    ids = []
    for _ in range(4):
        ids.append(await store.begin_import("night"))
        await write(store, source, ids[-1])
    source.shuffle(ids)
    for import_id in ids:
        assert (await store.undo_import(import_id)).kept == 0
    assert exported(store) == before
    assert [record.is_undone for record in await store.imports()] == [True] * 4


async def test_changes_since_an_import_are_kept(store: SQLiteStore) -> None:
    """What was written over an import's items and profiles stays, and is counted."""
    import_id = await store.begin_import("a")
    await store.put_items([Item("i", "imported"), Item("j", "imported")], import_id=import_id)
    await store.put_user(User("u", {"n": 1}), import_id=import_id)
    await store.put_items([Item("i", "edited")])
    await store.put_user(User("u", {"n": 2}))
    undone = await store.undo_import(import_id)
    assert tuple(undone) == (0, 1, 0, 2, 0)
    assert await store.get_items(["i", "j"]) == [Item("i", "edited"), None]
    assert await store.get_user("u") == User("u", {"n": 2})


async def test_a_forgotten_profile_does_not_come_back(store: SQLiteStore) -> None:
    """Forgetting a user deletes the profiles that imports have replaced."""
    await store.put_user(User("u", {"secret": "before"}))
    import_id = await store.begin_import("a")
    await store.put_user(User("u", {"n": 1}), import_id=import_id)
    await store.append([Event("u", "i")], import_id=import_id)
    await store.forget("u")
    assert tuple(await store.undo_import(import_id)) == (0, 0, 0, 0, 0)
    assert await store.get_user("u") is None


async def test_many_events_are_undone_in_parts(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each transaction deletes some of the events, and readers notice every one."""
    monkeypatch.setattr("service.stores.base.UNDONE_ROWS", 7)
    import_id = await store.begin_import("a")
    await store.append([Event(f"u{n % 3}", f"i{n}") for n in range(50)], import_id=import_id)
    await store.append([Event("u0", "own")])
    history = await store.history("u0")
    progress: list[int] = []
    await store.undo_import(import_id, progress=progress.append)
    assert progress == [7, 14, 21, 28, 35, 42, 49, 50]
    after = await store.history("u0")
    assert after.item_ids == ["own"]
    assert after.version > history.version
    assert after.generation > history.generation
    assert (await store.history("u1")).version == 0


@pytest.mark.parametrize("wrong", [0, 2])
async def test_only_imports_can_be_undone(store: SQLiteStore, wrong: int) -> None:
    """An unknown import, or one that is undone, is refused by name."""
    import_id = await store.begin_import("a")
    with pytest.raises(Invalid, match=f"there is no import {wrong}"):
        await store.undo_import(wrong)
    await store.undo_import(import_id)
    with pytest.raises(Invalid, match="import 1 is undone already"):
        await store.undo_import(import_id)


# ------------------------------------------------------------------------ logs without ids


_HEADER = "user_id,item_id,type,timestamp,weight"
DRAWS = 50  # overlaps of each of the 20 seeds below


def drawn_night(source: random.Random, rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Some of the rows, in any order."""
    return source.sample(rows, source.randrange(1, len(rows)))


def drawn_row(source: random.Random, user: str) -> tuple[str, str]:
    """A line of a file, and what identifies its event: times are spelt in two ways."""
    who, kind = f"{user}{source.randrange(4)},i{source.randrange(4)}", source.choice(["", "buy"])
    second, weight = source.randrange(2), source.choice(["1", "2.5"])
    spelt = source.choice([f"2024-01-01T00:00:0{second}Z", f"2024-01-01T01:00:0{second}+01:00"])
    return f"{who},{kind},{spelt},{weight}", f"{who},{kind or 'view'},{second},{weight}"


def events_of(store: Store, prefix: str) -> list[Event]:
    """The events of the users whose ids begin so, in an order that arrival does not change."""
    found = [event for event in store.scan_events() if event.user_id.startswith(prefix)]
    return sorted(found, key=lambda event: str(event.event_id))


@pytest.mark.parametrize("seed", range(20))
async def test_overlapping_exports_store_their_union(
    store: SQLiteStore, tmp_path: Path, seed: int
) -> None:
    """Of each row as many are stored as the file with most of them has, in any order of both.

    Undoing the last import restores what was stored before it.
    """
    source = random.Random(seed)
    for draw in range(DRAWS):
        user = f"u{draw}-"
        rows = [drawn_row(source, user) for _ in range(source.randrange(2, 30))]
        nights = [drawn_night(source, rows) for _ in range(source.randrange(2, 4))]
        wanted: Counter[str] = Counter()
        stored: list[Event] = []
        for number, night in enumerate([*nights, nights[0][::-1]]):
            path = tmp_path / f"{source.random()}-{number}.csv"
            path.write_text("\n".join([_HEADER, *(line for line, _ in night)]))
            before, import_id = stored, await store.begin_import(path.name)
            await import_dataset(store, EventsFile(path), import_id=import_id)
            stored = events_of(store, user)
            wanted |= Counter(identity for _, identity in night)
            assert wanted == Counter(
                f"{event.user_id},{event.item_id},{event.type},"
                f"{(event.timestamp or 0) // 1_000_000 % 60},{event.weight:g}"
                for event in stored
            )
        await store.undo_import(import_id)
        assert events_of(store, user) == before


async def test_stores_of_version_1_get_ids_of_content(tmp_path: Path) -> None:
    """After a migration, the files that were imported before it change nothing."""
    path, csv = tmp_path / "heed.db", tmp_path / "log.csv"
    timed = "u,i,2024-01-01T00:00:00Z\nu,i,2024-01-01T00:00:00Z\nu,j,2024-01-01T00:00:00.123456Z\n"
    timeless = "u,i,\nu,i,\nv,k,\n"
    csv.write_text("user_id,item_id,timestamp\n" + timed + timeless)
    store = SQLiteStore(path)
    records = EventsFile(csv).records()
    await store.append([replace(e, event_id=f"import:{n}") for n, e in enumerate(records)])
    await store.append([Event("u", "own", "mine", timestamp=NOON)])
    before = [replace(event, event_id=None) for event in store.scan_events()]
    await store.close()
    to_version(path, 1)
    store = SQLiteStore(path)
    after = list(store.scan_events())
    assert [replace(event, event_id=None) for event in after] == before
    assert sorted(str(event.event_id).split(":")[0] for event in after) == [
        *["content"] * 6,
        "mine",
    ]
    imported = await import_dataset(store, EventsFile(csv))
    assert (imported.events, imported.duplicates) == (0, 6)
    assert list(store.scan_events()) == after
    await store.close()
