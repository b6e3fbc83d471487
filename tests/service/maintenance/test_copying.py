"""Copies of whole stores between SQLite and PostgreSQL: complete, resumed, repeated, refused."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import psycopg
import pytest

from service.domain.errors import Conflict, Corrupt, Invalid, NotFound
from service.domain.keys import issue_key
from service.domain.names import DEFAULT_NAMESPACE
from service.domain.records import Event, Item, User
from service.maintenance.copying import compare_stores, copy_store
from service.maintenance.store_places import parse_place
from service.stores.base import Store
from tests.support import doomed_copy, full_store
from tests.support.full_store import read_all, stored_items, stored_users
from tests.support.heed_process import PATIENCE
from tests.support.store_contract import NOON

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([doomed_copy.__name__])
DIRECTIONS = ["sqlite-postgres", "postgres-sqlite", "sqlite-sqlite", "postgres-postgres"]
MOVES = DIRECTIONS[:2]


class Spot(NamedTuple):
    """A namespace of a place."""

    text: str  # as a command names the place
    namespace: str

    @property
    def identity(self) -> str:
        return parse_place(self.text).identity(self.namespace)

    def open(self, *, is_target: bool = False) -> Store:
        return parse_place(self.text).open(self.namespace, is_target=is_target)


Make = Callable[[str], Spot]


class Open(Protocol):
    """Function that opens a spot."""

    def __call__(self, spot: Spot, *, is_target: bool = False) -> Store: ...


@pytest.fixture
def make(tmp_path: Path, url: str) -> Make:
    """Return an empty spot of a kind, each time another one."""

    def make(kind: str) -> Spot:
        name = uuid.uuid4().hex
        return Spot(url, name) if kind == "postgres" else Spot(str(tmp_path / name), "default")

    return make


@pytest.fixture
def spots(make: Make, direction: str) -> tuple[Spot, Spot]:
    """The spots of a source and of a target."""
    source, target = direction.split("-")
    return make(source), make(target)


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens a spot; it is closed at the end."""
    stores: list[Store] = []

    def open_spot(spot: Spot, *, is_target: bool = False) -> Store:
        stores.append(spot.open(is_target=is_target))
        return stores[-1]

    yield open_spot
    for store in stores:
        await store.close()


@pytest.fixture
def stores(spots: tuple[Spot, Spot], opened: Open) -> tuple[Store, Store]:
    return opened(spots[0]), opened(spots[1])


async def assert_same(source: Store, target: Store) -> None:
    """Both hold the same, however it is read."""
    ours, theirs = await read_all(source), await read_all(target)
    for part, value in ours.items():
        assert value == theirs[part], part
    assert await stored_users(target) == await stored_users(source)
    assert await stored_items(target) == await stored_items(source)
    assert all(table.is_same for table in await compare_stores(source, target))


@pytest.mark.parametrize("direction", DIRECTIONS)
async def test_everything_is_copied(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of a full store arrive, in small steps and in their order."""
    source, target = stores
    doomed_copy.take_small_steps(monkeypatch.setattr)
    await full_store.fill(source)
    before = await read_all(source), await source.clock()
    steps: list[tuple[str, int, int]] = []
    done = await copy_store(source, target, "here", progress=lambda *step: steps.append(step))
    counts = await source.counts()
    assert (done.users, done.events) == (counts["users"], counts["events"])
    assert (await read_all(source), await source.clock()) == before
    await assert_same(source, target)
    assert steps[-2] == ("events", counts["events"], counts["events"])
    copied = [done for stage, done, _ in steps if stage == "events"]
    assert copied == sorted(copied)


@pytest.mark.parametrize("direction", MOVES)
async def test_imports_are_undone_at_the_target_as_at_the_source(
    stores: tuple[Store, Store],
) -> None:
    """Events that imports share stay, and what they have replaced comes back."""
    source, target = stores
    await full_store.fill(source)
    await copy_store(source, target, "here")
    for number in (2, 1):
        assert await target.undo_import(number) == await source.undo_import(number)
    ours, theirs = await read_all(source), await read_all(target)
    for part in ("histories", "events", "items", "profiles", "imports", "counts", "popularity"):
        assert ours[part] == theirs[part], part


@pytest.mark.parametrize("direction", MOVES)
async def test_a_whole_copy_is_only_compared(stores: tuple[Store, Store]) -> None:
    """A second call writes nothing, and names what has changed at the source since."""
    source, target = stores
    await full_store.fill(source)
    await copy_store(source, target, "here")
    again = await copy_store(source, target, "here")
    assert (again.users, again.events, again.differing) == (0, 0, [])
    before = await read_all(target)
    await full_store.change(source)
    changed = await copy_store(source, target, "here")
    assert set(changed.differing) == {
        *("events", "items", "users", "profiles", "imports", "keys", "forgotten"),
        *("scenarios", "deleted_scenarios"),
    }
    assert await read_all(target) == before


@pytest.mark.parametrize("direction", MOVES)
async def test_names_of_the_forgotten_are_deleted_at_the_target_too(
    stores: tuple[Store, Store],
) -> None:
    """Names of items that no event uses any more are left to `clean_up` of the target."""
    source, target = stores
    await full_store.fill(source)
    await full_store.change(source)
    await copy_store(source, target, "here")
    await target.clean_up()
    await source.clean_up()
    names = [name for _, name in await target.bulk().item_names(0, 1_000)]
    assert names == [name for _, name in await source.bulk().item_names(0, 1_000)]


async def test_a_finished_copy_is_analysed(make: Make, opened: Open, url: str) -> None:
    """The server plans with the numbers of rows that were copied, before autovacuum looks."""
    source, target = opened(make("sqlite")), opened(make("postgres"))
    await full_store.fill(source)
    await copy_store(source, target, "here")
    with psycopg.connect(url) as connection:
        for table in ("heed.users", "heed.events"):
            assert planned_rows(connection, table) > 0, table  # -1: it was never looked at


def planned_rows(connection: psycopg.Connection, table: str) -> float:
    """Return with how many rows a table is planned, on the workers where it is distributed."""
    citus = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"
    query = "SELECT reltuples FROM pg_class WHERE oid = {}::regclass"
    if connection.execute(citus.encode()).fetchall() == [(True,)]:
        command = query.format("'%s'")
        query = f"SELECT max(result::float) FROM run_command_on_placements(%s, $${command}$$)"
    else:
        query = query.format("%s")
    ((rows,),) = connection.execute(query.replace("'%s'", "'%%s'").encode(), (table,)).fetchall()
    return float(rows)


@pytest.mark.parametrize("moment", ["inside", "after"])
@pytest.mark.parametrize("direction", MOVES)
async def test_a_killed_copy_goes_on_where_it_stopped(
    spots: tuple[Spot, Spot],
    opened: Open,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed at one step after another, it ends; nothing is there twice."""
    source = opened(spots[0])
    await full_store.fill(source, 60)
    total = (await source.counts())["events"]
    positions: list[str] = []
    for step in (1, 10, 6):
        killed = await asyncio.to_thread(_copy_and_die, *spots, step, moment)
        assert killed == -signal.SIGKILL
        with pytest.raises(Corrupt, match="holds part of a copy of"):
            spots[1].open()
        target = spots[1].open(is_target=True)
        record = await target.bulk().copy_record()
        assert record is not None
        assert record.is_untouched
        assert not record.is_whole
        positions.append(record.position)
        # The users up to the position are there, and no others.
        expected = [each for each in await stored_users(source) if each.user_id <= record.position]
        assert await stored_users(target) == expected
        await target.close()
    assert positions == sorted(positions)
    assert positions[0] == "" < positions[-1]
    target = opened(spots[1], is_target=True)
    doomed_copy.take_small_steps(monkeypatch.setattr)
    done = await copy_store(source, target, spots[0].identity)
    assert 0 < done.events < total
    await assert_same(source, target)


def _copy_and_die(source: Spot, target: Spot, step: int, moment: str) -> int | None:
    process = FORKS.Process(target=doomed_copy.main, args=(source, target, step, moment))
    process.start()
    process.join(PATIENCE)
    return process.exitcode


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize(
    "held", ["event", "profile", "item", "scenario", "key", "import", "ledger"]
)
async def test_a_target_with_other_data_is_refused(
    make: Make, opened: Open, kind: str, held: str
) -> None:
    """Whatever a store holds, it is left as it is, and the error says what that is."""
    source, target = opened(make("sqlite")), opened(make(kind))
    await source.append([Event("u", "i", "e")])
    key, _ = issue_key("k", frozenset({"read"}), NOON)
    writes: dict[str, Callable[[], Awaitable[object]]] = {
        "event": lambda: target.append([Event("u", "i")]),
        "profile": lambda: target.put_user(User("u")),
        "item": lambda: target.put_items([Item("i")]),
        "scenario": lambda: target.put_scenario("s", {"question": "popular"}),
        "key": lambda: target.add_key(key),
        "import": lambda: target.begin_import("x"),
        "ledger": lambda: target.forget("u"),
    }
    if held == "ledger":
        await target.append([Event("u", "i")])
    await writes[held]()
    before = await read_all(target)
    with pytest.raises(Conflict, match="the target is not empty, and no copy: it holds 1 "):
        await copy_store(source, target, "here")
    assert await read_all(target) == before
    assert await target.bulk().copy_record() is None


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_copy_of_something_else_or_changed_since_is_refused(
    make: Make, opened: Open, kind: str
) -> None:
    """A target goes on only with its own source, and only until it is written to."""
    source, target = opened(make("sqlite")), opened(make(kind))
    await full_store.fill(source, 12)
    await copy_store(source, target, "here")
    with pytest.raises(Conflict, match="a copy of another store, here"):
        await copy_store(source, target, "there")
    await target.append([Event("new", "i", "at the target")])
    await source.append([Event("old", "i", "at the source")])
    with pytest.raises(Conflict, match="a store of its own now"):
        await copy_store(source, target, "here")
    assert await target.version("new")
    assert not await target.version("old")


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_records_that_leave_no_tick_are_noticed_too(
    make: Make, opened: Open, kind: str
) -> None:
    """A scenario that only the target has is reported."""
    source, target = opened(make("sqlite")), opened(make(kind))
    await full_store.fill(source, 12)
    await copy_store(source, target, "here")
    await target.put_scenario("home", {"question": "popular"})
    await source.put_scenario("home", {"question": "recommend"})
    assert (await copy_store(source, target, "here")).differing == ["scenarios"]


# ------------------------------------------------------------------------------ places


def test_places_are_what_commands_name(tmp_path: Path) -> None:
    """Directories, files, both with a scheme, and URLs, whose passwords are not shown."""
    data = tmp_path / "data"
    asyncio.run(parse_place(str(data)).open(DEFAULT_NAMESPACE).close())
    file = data / "heed.db"
    expected = f"sqlite:{file.resolve()}"
    for text in (data, f"sqlite:{data}", file, f"sqlite:{file}", f"sqlite://{data}"):
        assert parse_place(str(text)).identity(DEFAULT_NAMESPACE) == expected
    other = file.rename(data / "other.db")
    place = parse_place(str(other))
    assert place.identity(DEFAULT_NAMESPACE) == f"sqlite:{other.resolve()}"
    assert place.namespaces() == [DEFAULT_NAMESPACE]
    with pytest.raises(Invalid, match="the file of one store"):
        place.identity("shop")
    with pytest.raises(NotFound):
        parse_place(str(data)).identity(DEFAULT_NAMESPACE)
    url = "postgresql://me:secret@127.0.0.1:1/db"
    assert parse_place(url).name == "postgresql://127.0.0.1/db"
    for wrong in ("", "sqlite:", "mysql://me:secret@host/db", "postgresql://me:secret@host/db?x=1"):
        with pytest.raises(Invalid) as raised:
            parse_place(wrong)
        assert "secret" not in raised.value.detail
