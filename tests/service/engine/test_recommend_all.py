"""Recommendations for all users: equal to the engine's answers, written completely or not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import models.ranking.recommend
from models.catalogue.item_filter import Condition
from service.domain.records import Event, Item, User
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.engine.lists import Listed, write_lists
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support import asking
from tests.support.tiny import NOON, World, item_id, items

Row = tuple[str, int, str, float]

ALL = asking.recommend(asking.who(at=NOON))
ODD = ["all gone", "interested", "new", "stranger"]  # beside the forty of the small world


def fill(data: Path, *works: Callable[[SQLiteStore], Awaitable[Any]]) -> None:
    """Do this to the store of a data directory."""

    async def do() -> None:
        store = SQLiteStore(data / STORE_FILE)
        for work in works:
            await work(store)
        await store.close()

    data.mkdir(exist_ok=True)
    asyncio.run(do())


def make(
    data: Path,
    out: Path,
    query: Any = ALL,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Listed:
    """Write the lists of a data directory, as of noon."""
    return asyncio.run(write_lists(Settings(data=data), out, query, progress=told))


def rows(path: Path) -> list[Row]:
    """The rows of a Parquet file."""
    return [tuple(row.values()) for row in pq.read_table(path).to_pylist()]


def answers(data: Path, users: list[str], query: Any) -> dict[str, Any]:
    """What an engine answers each user, asked at noon."""

    async def do() -> dict[str, Any]:
        engine = await open_engine(Settings(data=data))
        try:
            return {
                user: await asking.ask(
                    engine,
                    asking.recommend(
                        asking.who(user, at=NOON), query.limit, exclude_seen=query.exclude_seen
                    ),
                )
                for user in users
            }
        finally:
            await engine.close()

    return asyncio.run(do())


def expected(data: Path, users: list[str], query: Any) -> list[Row]:
    """The rows that those answers make."""
    return [
        (user, rank, item["item_id"], item["score"])
        for user, answer in answers(data, users, query).items()
        for rank, item in enumerate(answer.items, 1)
    ]


def same(found: list[Row], wanted: list[Row]) -> None:
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in wanted], abs=1e-5)


@pytest.fixture(params=["trained", "untrained"])
def data(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Path:
    """The small world, with users who have no events, a profile alone, or unknown items."""
    copy = world.copy(tmp_path / "data", trained=request.param == "trained")
    vector = np.linspace(-1, 1, 256, dtype=np.float32)
    own = Event("stranger", "nowhere", "own", timestamp=NOON - 5, key=vector, value=-vector)
    fill(
        copy,
        lambda store: store.put_user(User("new")),
        lambda store: store.put_user(User("interested", {}, ("space", item_id(1, 3)))),
        lambda store: store.append([own, Event("stranger", "elsewhere"), Event("all gone", "x")]),
        lambda store: store.append([Event("all gone", item_id(0, 1), "last")]),
        lambda store: store.append([Event("u1", item_id(2, 3), weight=9, timestamp=NOON + 7)]),
    )

    async def forget(store: SQLiteStore) -> None:
        for event in (await store.page("all gone"))[0]:
            assert event.event_id is not None
            await store.delete_event("all gone", event.event_id)

    fill(copy, forget)
    return copy


@pytest.mark.parametrize(
    "query", [ALL, asking.recommend(asking.who(at=NOON), limit=7, exclude_seen=False)]
)
def test_everyone_gets_what_the_service_answers(data: Path, tmp_path: Path, query: Any) -> None:
    """Every known user's list equals the engine's recommendations, to 1e-5."""
    heard: list[tuple[int, int]] = []
    listed = make(data, tmp_path / "x.parquet", query, lambda *told: heard.append(told))
    users = sorted([*ODD, *(f"u{n}" for n in range(40))])
    wanted = expected(data, users, query)
    found = rows(tmp_path / "x.parquet")
    same(found, wanted)
    assert len(found) == listed.rows == 44 * query.limit
    assert listed.users == 44
    assert (heard[-1], heard == sorted(heard)) == ((44, 44), True)


def test_who_did_nothing_gets_what_is_popular(data: Path, tmp_path: Path) -> None:
    """Users without events or interests get popular items."""
    make(data, tmp_path / "x.parquet")
    lists = {user: [row[2] for row in rows(tmp_path / "x.parquet") if row[0] == user]
             for user in (*ODD, "u0")}  # fmt: skip
    popular = answers(data, ["nobody"], ALL)["nobody"]
    assert {item["reason"] for item in popular.items} == {"popular"}
    assert lists["new"] == lists["all gone"] == [item["item_id"] for item in popular.items]
    assert lists["interested"] != lists["new"] != lists["u0"]


def test_beyond_the_exact_crossover_the_candidates_are_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With candidates the lists equal the engine's recommendations of as many."""
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 10)
    monkeypatch.setattr(models.ranking.recommend, "CANDIDATES", 4)
    query = asking.recommend(asking.who(at=NOON), limit=3)
    users = sorted(f"u{n}" for n in range(40))
    some = [answer.candidates for answer in answers(data, users, query).values()]
    assert max(count or 0 for count in some) < len(items())
    make(data, tmp_path / "x.parquet", query)
    found = [row for row in rows(tmp_path / "x.parquet") if row[0] in users]
    same(found, expected(data, users, query))


def test_recall_of_the_candidates_is_reported(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reported recall is the share of the exact lists that the candidates found."""
    data = world.copy(tmp_path / "data")
    query = asking.recommend(asking.who(at=NOON), limit=5)
    whole = make(data, tmp_path / "whole.parquet", query)
    assert whole.sampled == 0
    assert math.isnan(whole.recall)
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 10)
    monkeypatch.setattr(models.ranking.recommend, "CANDIDATES", 20)
    some = np.flatnonzero(np.arange(60) % 3)

    def candidates(_: object, __: object, allowed: NDArray[np.bool_], *___: object) -> Any:
        return some[allowed[some]]

    monkeypatch.setattr(models.ranking.recommend, "candidates", candidates)
    found = make(data, tmp_path / "some.parquet", query)
    best, lists = (
        {(row[0], row[2]) for row in rows(tmp_path / name)}
        for name in ("whole.parquet", "some.parquet")
    )
    assert found.sampled == 40
    assert found.recall == pytest.approx(len(best & lists) / len(best))
    assert 0 < found.recall < 1
    monkeypatch.setattr("service.engine.lists._SAMPLE", 7)
    assert make(data, tmp_path / "x.parquet", query).sampled == 7


def test_metadata_names_the_model_and_the_time(world: World, tmp_path: Path) -> None:
    """The file's metadata name the model version and the time."""
    for trained, version in ((True, world.first), (False, "untrained")):
        data = world.copy(tmp_path / version, trained=trained)
        assert make(data, tmp_path / "x.parquet").model_version == version
        metadata = pq.read_schema(tmp_path / "x.parquet").metadata
        assert metadata[b"heed.model_version"].decode() == version
        assert metadata[b"heed.at"] == b"2026-01-01T12:00:00Z"


def test_who_saw_everything_has_no_rows(world: World, tmp_path: Path) -> None:
    """A user who has seen every item has no rows; all others have theirs."""
    data = world.copy(tmp_path / "data")
    everything = [
        Event("u7", item_id(genre, n), timestamp=NOON) for genre in range(4) for n in range(15)
    ]
    fill(data, lambda store: store.append(everything))
    assert make(data, tmp_path / "x.parquet").users == 40
    assert {row[0] for row in rows(tmp_path / "x.parquet")} == {
        f"u{n}" for n in range(40) if n != 7
    }


@pytest.mark.parametrize("most", [1, 100, 10**6])
def test_rows_are_written_as_they_come(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Rows are written in groups of bounded size, whose size changes no row."""
    data = world.copy(tmp_path / "data")
    make(data, tmp_path / "whole.parquet")
    monkeypatch.setattr("service.engine.lists._ROWS", most)
    monkeypatch.setattr("service.engine.lists._BATCH", 3)
    make(data, tmp_path / "x.parquet")
    same(rows(tmp_path / "x.parquet"), rows(tmp_path / "whole.parquet"))
    file = pq.ParquetFile(tmp_path / "x.parquet")
    groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    assert max(groups) < most + 20
    assert len([size for size in groups if size]) == 40 if most == 1 else len(groups) < 9


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.jsonl.gz"])
def test_an_empty_store_makes_an_empty_file(tmp_path: Path, name: str) -> None:
    fill(tmp_path / "data")
    listed = make(tmp_path / "data", tmp_path / name)
    assert (listed.users, listed.rows, listed.model_version) == (0, 0, "untrained")
    assert (tmp_path / name).exists()
    if name == "x.parquet":
        assert rows(tmp_path / name) == []


@pytest.mark.parametrize("before", [None, b"yesterday's"])
def test_an_interrupted_run_leaves_what_was_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    """An interrupted run leaves the earlier file, or none, and what it has computed beside it."""
    monkeypatch.setattr("service.engine.lists._BATCH", 3)
    data, out = world.copy(tmp_path / "data"), tmp_path / "lists" / "x.parquet"
    out.parent.mkdir()
    if before is not None:
        out.write_bytes(before)

    def told(done: int, total: int) -> None:
        if done >= total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(data, out, told=told)
    names = sorted(entry.name for entry in out.parent.iterdir())
    assert names == [*(["x.parquet"] if before else []), "x.parquet.progress"]
    assert before is None or out.read_bytes() == before


def test_a_warning_about_the_filter_is_said_once(tmp_path: Path) -> None:
    """A comparison with a kind of value that no item has is said, for all lists together."""
    data, said = tmp_path / "data", list[str]()
    priced = [Item(f"i{n}", attributes={"price": n}) for n in range(9)]
    fill(data, lambda store: store.put_items(priced))
    users = [Event(f"u{n}", "i1") for n in range(40)]
    fill(data, lambda store: store.append(users))
    dear = Condition("attributes.price", {"gt": "8"}, {"gt": "/gt"})
    query = ALL.model_copy(update={"filter": dear})
    settings = Settings(data=data)
    done = write_lists(
        settings, tmp_path / "x.parquet", query, progress=lambda *_: None, announce=said.append
    )
    assert asyncio.run(done).rows == 0
    (warning,) = said
    assert warning.startswith("warning: /filter/gt: no item has text in attributes.price")
