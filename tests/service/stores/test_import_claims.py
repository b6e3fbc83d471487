"""Imports that contain the same events, and their undoing in any order."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.datasets.imports import import_dataset
from service.datasets.record_files import EventsFile
from service.domain.records import Event
from service.stores import base
from service.stores.sqlite.store import SQLiteStore
from tests.support.old_stores import to_version

NOON = 1_700_000_000_000_000
USERS, EVENTS = "uvw", range(12)


@contextmanager
def opened(undone_rows: int = 20_000) -> Iterator[tuple[SQLiteStore, Path]]:
    """An empty store that undoes imports in small transactions, and its directory."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "UNDONE_ROWS", undone_rows)
        yield SQLiteStore(Path(folder) / "heed.db"), Path(folder)


def rows_of(store: SQLiteStore) -> Counter[str]:
    """The stored events as rows of a file."""
    return Counter(f"{event.user_id},{event.item_id}" for event in store.scan_events())


ROWS = st.sampled_from([f"{user},{item}" for user in "uv" for item in "abc"])


@settings(max_examples=40, deadline=None)
@given(
    nights=st.lists(st.lists(ROWS, max_size=12), min_size=2, max_size=5),
    undo=st.lists(st.integers(0, 4), max_size=8),
    undone_rows=st.integers(1, 5),
)
@example(nights=[["u,a"], ["u,a"]], undo=[0], undone_rows=1)
def test_files_that_remain_are_stored_as_their_union(
    nights: list[list[str]], undo: list[int], undone_rows: int
) -> None:
    """Of each row as many are stored as the one file with most of them has, of those not undone.

    Each number of `undo` takes back the file of that number, or imports it again.
    """

    async def check() -> None:
        remaining: dict[int, int] = {}  # the import of each night
        for number in [*range(len(nights)), *(n % len(nights) for n in undo)]:
            if number in remaining:
                undone = await store.undo_import(remaining.pop(number))
                assert undone.kept == 0
            else:
                remaining[number] = await store.begin_import(f"night {number}")
                path = folder / f"{number}.csv"
                path.write_text("\n".join(["user_id,item_id", *nights[number]]))
                await import_dataset(store, EventsFile(path), import_id=remaining[number])
            union: Counter[str] = reduce(or_, (Counter(nights[n]) for n in remaining), Counter())
            assert rows_of(store) == union
            assert (await store.counts())["events"] == union.total()
        await store.close()

    with opened(undone_rows) as (store, folder):
        asyncio.run(check())


class Model:
    """Sets of claimants of each event, by brute force; the claimant 0 is for good."""

    def __init__(self) -> None:
        self.claims: dict[int, set[int]] = {}
        self.owner: dict[int, str] = {}

    def append(self, events: list[int], import_id: int) -> None:
        for event in events:
            if event not in self.claims:
                self.claims[event], self.owner[event] = set(), user_of(event)
            self.claims[event].add(import_id)

    def undo(self, import_id: int) -> None:
        for event, claims in list(self.claims.items()):
            claims.discard(import_id)
            if not claims:
                del self.claims[event]

    def stored(self) -> list[tuple[str, str]]:
        return sorted((f"e{event}", self.owner[event]) for event in self.claims)


def user_of(event: int) -> str:
    """The user who did the event."""
    return USERS[event % len(USERS)]


async def append(store: SQLiteStore, events: list[int], import_id: int) -> None:
    """Store events by number."""
    await store.append(
        [Event(user_of(n), f"i{n}", f"e{n}", timestamp=NOON + n % 5) for n in events],
        import_id=import_id or None,
    )


def stored_in(store: SQLiteStore) -> list[tuple[str, str]]:
    """The id and the user of each event."""
    return sorted((str(event.event_id), event.user_id) for event in store.scan_events())


@pytest.mark.parametrize("seed", range(50))
def test_events_stay_as_long_as_anything_claims_them(seed: int) -> None:
    """Whatever is imported, written, deleted, merged and undone, the store equals the model."""
    source = random.Random(seed)

    async def check() -> None:
        model, imports = Model(), [0]
        for _ in range(25):
            kind = source.choice(["import", "import", "go on", "undo", "undo", "delete", "move"])
            if kind == "import" or (kind == "go on" and source.random() < 0.3):
                imports.append(await store.begin_import("night"))
            if kind in ("import", "go on"):
                import_id = imports[-1] if kind == "import" else source.choice(imports)
                events = source.choices(EVENTS, k=source.randrange(1, 12))
                model.append(events, import_id)
                await append(store, events, import_id)
            elif kind == "undo" and len(imports) > 1:
                import_id = imports.pop(source.randrange(1, len(imports)))
                before = len(model.claims)
                model.undo(import_id)
                undone = await store.undo_import(import_id)
                assert undone.events == before - len(model.claims)
            elif kind == "delete" and model.claims:
                event = source.choice(sorted(model.claims))
                assert await store.delete_event(model.owner[event], f"e{event}")
                del model.claims[event]
            elif kind == "move":
                user, other = source.sample(USERS, 2)
                moved = [event for event in model.claims if model.owner[event] == user]
                if source.random() < 0.5:
                    assert await store.forget(user) == len(moved)
                    for event in moved:
                        del model.claims[event]
                else:
                    assert await store.merge(other, user) == len(moved)
                    model.owner |= dict.fromkeys(moved, other)
            assert stored_in(store) == model.stored()
            assert (await store.counts())["events"] == len(model.claims)
        for import_id in imports[1:]:
            model.undo(import_id)
            await store.undo_import(import_id)
            assert stored_in(store) == model.stored()
        await store.close()

    with opened(1 + source.randrange(5)) as (store, _):
        asyncio.run(check())


def test_imports_undone_at_once_leave_nothing() -> None:
    """Two undos that take turns hand no event to each other."""

    async def check() -> None:
        ids = [await store.begin_import("night") for _ in range(3)]
        for import_id, events in zip(ids, (range(12), range(11, -1, -1), range(6)), strict=True):
            await append(store, list(events), import_id)
        both = await asyncio.gather(*(store.undo_import(import_id) for import_id in ids[:2]))
        assert stored_in(store) == sorted((f"e{n}", user_of(n)) for n in range(6))
        assert sum(undone.events for undone in both) == 6
        assert (await store.undo_import(ids[2])).events == 6
        assert stored_in(store) == []
        await store.close()

    with opened(2) as (store, _):
        asyncio.run(check())


def test_a_shorter_file_of_an_import_gives_up_nothing() -> None:
    """Of an import's files that begin alike, the claims of the longer one remain."""

    async def check() -> None:
        first, second = [await store.begin_import("night") for _ in range(2)]
        for import_id, events in ((first, [0, 3, 6]), (second, [0, 3, 6]), (second, [0])):
            await append(store, events, import_id)
        await store.undo_import(first)
        assert stored_in(store) == [("e0", "u"), ("e3", "u"), ("e6", "u")]
        await store.close()

    with opened() as (store, _):
        asyncio.run(check())


def test_an_event_that_stays_is_no_change() -> None:
    """Readers of a history notice nothing when an import whose events stay is undone."""

    async def check() -> None:
        first, second = [await store.begin_import("night") for _ in range(2)]
        for import_id in (first, second):
            await append(store, [0, 3, 6], import_id)
        before = await store.history("u")
        assert tuple(await store.undo_import(first)) == (0, 0, 0, 0, 3)
        after = await store.history("u")
        assert (after.version, after.generation) == (before.version, before.generation)
        assert after.seqs.tolist() == before.seqs.tolist()
        await store.close()

    with opened() as (store, _):
        asyncio.run(check())


def test_an_export_that_is_imported_again_takes_little_room() -> None:
    """Claims on a user's consecutive events take one row, in whatever order the file has them."""
    events = [Event(f"u{n % 20}", "i", f"e{n}", timestamp=NOON + n) for n in range(2_000)]

    async def import_as(source: str, store: SQLiteStore) -> None:
        await store.append(events, import_id=await store.begin_import(source))
        await store.close()

    with opened() as (store, folder):
        path = folder / "heed.db"
        asyncio.run(import_as("one", store))
        before = path.stat().st_size
        random.Random(7).shuffle(events)
        asyncio.run(import_as("two", SQLiteStore(path)))
        assert path.stat().st_size < 1.05 * before


Job = Callable[[SQLiteStore], Coroutine[None, None, None]]


def test_stores_of_version_4_get_claims(tmp_path: Path) -> None:
    """Imports from before the migration are undone, but for events that a later one contains."""
    path = tmp_path / "heed.db"

    def run(job: Job) -> list[tuple[str, str]]:
        store = SQLiteStore(path)
        asyncio.run(job(store))
        found = stored_in(store)
        asyncio.run(store.close())
        return found

    async def store_both(store: SQLiteStore) -> None:
        await append(store, [0, 3, 6], await store.begin_import("old"))
        await append(store, [9], 0)

    async def import_again(store: SQLiteStore) -> None:
        await append(store, [3, 9], await store.begin_import("new"))

    async def undo(store: SQLiteStore) -> None:
        await store.undo_import(1)

    before = run(store_both)
    to_version(path, 4)
    assert run(import_again) == before
    assert run(undo) == [("e3", "u"), ("e9", "u")]
