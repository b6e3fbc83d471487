"""Recommendations for all users that go on after an interruption, and of shards of the users."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import models.ranking.recommend
from service.domain.errors import Invalid
from service.domain.records import Event, Item
from service.domain.settings import Settings
from service.engine import lists as recommend_all
from service.engine.lists import Listed, ListShard, write_lists
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.support import asking
from tests.support.tiny import NOON, World, item_id

pytestmark = pytest.mark.verify

ALL = asking.recommend(asking.who(at=NOON))
NOW = asking.recommend(asking.who())
USERS = sorted(f"u{n}" for n in range(40))
HALF = 20  # users, after which a run is interrupted


class InterruptionError(Exception):
    """Raised in the middle of a run."""


@pytest.fixture
def data(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small world; runs compute four lists at a time."""
    monkeypatch.setattr(recommend_all, "_BATCH", 4)
    return world.copy(tmp_path / "data")


def make(data: Path, out: Path, query: Any = ALL, **options: Any) -> tuple[Listed, list[str]]:
    """Write the lists of a data directory; return counts, and what was announced."""
    said: list[str] = []
    settings = options.pop("settings", Settings(data=data))
    options = {"progress": lambda *_: None, "announce": said.append} | options
    return asyncio.run(write_lists(settings, out, query, **options)), said


def interrupt(data: Path, out: Path, query: Any = ALL, **options: Any) -> None:
    """Begin to write the lists of a data directory, and stop half-way."""

    def stop(done: int, _total: int) -> None:
        if done >= HALF:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        make(data, out, query, progress=stop, **options)


def change(data: Path, *works: Callable[[SQLiteStore], Awaitable[Any]]) -> None:
    """Do this to the store of a data directory."""

    async def do() -> None:
        store = SQLiteStore(data / STORE_FILE)
        for work in works:
            await work(store)
        await store.close()

    asyncio.run(do())


def users(path: Path) -> list[str]:
    """Return the users of a JSONL file, each once, in its order."""
    lines = path.read_text().splitlines()
    return list(dict.fromkeys(line.split('"')[3] for line in lines))


def test_only_what_is_missing_is_computed(data: Path, tmp_path: Path) -> None:
    """A continued run computes the other lists, and makes the same file as an uninterrupted one."""
    whole, said = make(data, tmp_path / "whole.jsonl")
    assert (whole.computed, said) == (40, [])
    interrupt(data, tmp_path / "x.jsonl")
    heard: list[tuple[int, int]] = []
    listed, said = make(data, tmp_path / "x.jsonl", progress=lambda *told: heard.append(told))
    assert (listed.users, listed.rows, listed.computed) == (40, 800, HALF)
    assert heard == [(done, 40) for done in range(HALF, 41, 4)]
    assert len(said) == 1
    assert said[0].startswith("Continuing the interrupted run: 20 of 40 users")
    assert "2026-01-01T12:00:00Z" in said[0]
    assert (tmp_path / "x.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_recall_is_of_the_whole_sample(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall of a continued run is that of all sampled lists, not of those it computed."""
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 10)
    monkeypatch.setattr(models.ranking.recommend, "CANDIDATES", 20)
    some = np.flatnonzero(np.arange(60) % 3)

    def candidates(_: object, __: object, allowed: NDArray[np.bool_], *___: object) -> Any:
        return some[allowed[some]]

    monkeypatch.setattr(models.ranking.recommend, "candidates", candidates)
    query = asking.recommend(asking.who(at=NOON), limit=5)
    whole, _ = make(data, tmp_path / "whole.jsonl", query)
    interrupt(data, tmp_path / "x.jsonl", query)
    listed, _ = make(data, tmp_path / "x.jsonl", query)
    assert whole.sampled == listed.sampled == 40
    assert listed.recall == pytest.approx(whole.recall)
    assert 0 < listed.recall < 1


def test_a_continued_run_keeps_its_time(data: Path, tmp_path: Path) -> None:
    """Without a time of the request, all lists are as of the beginning of the first run."""
    interrupt(data, tmp_path / "x.parquet", NOW)
    make(data, tmp_path / "y.parquet", NOW)
    make(data, tmp_path / "x.parquet", NOW)
    x, y = (pq.read_schema(tmp_path / f"{name}.parquet").metadata[b"heed.at"] for name in "xy")
    assert x < y


@pytest.mark.parametrize(
    ("what", "again"),
    [
        ("model", {}),
        ("request", {"query": asking.recommend(asking.who(at=NOON), limit=7)}),
        ("request", {"query": NOW}),
        ("request", {"query": asking.recommend(asking.who(at=NOON), exclude_seen=False)}),
        ("shard", {"shard": ListShard(1, 2)}),
        ("configuration", {"settings": {"max_attention_error": 0.5}}),
        ("store", {}),
    ],
)
def test_another_run_starts_again(
    data: Path, world: World, tmp_path: Path, what: str, again: dict[str, Any]
) -> None:
    """A run of anything else discards the lists, says why, and contains none of them."""
    interrupt(data, tmp_path / "x.csv")
    if what == "model":
        Registry(data / MODELS_FOLDER).activate(world.second)
    elif what == "store":  # restored: the same records in another file
        content = (data / STORE_FILE).read_bytes()
        (data / STORE_FILE).rename(tmp_path / "old.db")
        (data / STORE_FILE).write_bytes(content)
    if "settings" in again:
        again = again | {"settings": Settings(data=data, **again["settings"])}
    listed, said = make(data, tmp_path / "x.csv", **again)
    assert said == [f"Starting again: the interrupted run was of another {what}."]
    assert listed.computed == listed.users
    fresh, said = make(data, tmp_path / "fresh.csv", **again)
    assert (fresh.users, said) == (listed.users, [])
    if again.get("query") is not NOW:
        assert (tmp_path / "x.csv").read_bytes() == (tmp_path / "fresh.csv").read_bytes()


def test_restart_computes_all_lists_again(data: Path, tmp_path: Path) -> None:
    """With `restart` nothing is continued."""
    interrupt(data, tmp_path / "x.csv")
    listed, said = make(data, tmp_path / "x.csv", restart=True)
    assert (listed.computed, said) == (40, [])


def test_forgotten_users_are_in_no_list(data: Path, tmp_path: Path) -> None:
    """Users who are forgotten or merged meanwhile have no list, even if they came back."""
    interrupt(data, tmp_path / "x.jsonl")
    before, back, after, merged = USERS[3], USERS[7], USERS[30], USERS[9]
    change(
        data,
        *(lambda store, user=user: store.forget(user) for user in (before, back, after)),
        lambda store: store.append([Event(back, item_id(0, 1), timestamp=NOON - 5)]),
        lambda store: store.merge(USERS[31], merged),
    )
    listed, _ = make(data, tmp_path / "x.jsonl")
    gone = {before, after, merged}
    assert users(tmp_path / "x.jsonl") == [u for u in USERS if u not in gone | {back}]
    assert (listed.users, listed.rows) == (36, 720)
    make(data, tmp_path / "new.jsonl")
    assert users(tmp_path / "new.jsonl") == [u for u in USERS if u not in gone]


def test_who_is_forgotten_before_their_turn_has_no_list(data: Path, tmp_path: Path) -> None:
    """A user who is forgotten while a run goes on is not in its file."""

    def forget(done: int, _total: int) -> None:
        if done == 4:
            for user in (USERS[0], USERS[-1]):
                change_beside(data, user)

    listed, _ = make(data, tmp_path / "x.jsonl", progress=forget)
    assert users(tmp_path / "x.jsonl") == USERS[1:-1]
    assert listed.users == 38


def change_beside(data: Path, user: str) -> None:
    """Forget a user, in a thread of its own since this one runs an event loop."""
    thread = Thread(target=change, args=(data, lambda store: store.forget(user)))
    thread.start()
    thread.join()


def test_users_join_while_their_turn_has_not_come(data: Path, tmp_path: Path) -> None:
    """Who joins before a run is continued has a list if the run has not come so far."""
    interrupt(data, tmp_path / "x.jsonl")
    joined = [Event(user, item_id(0, 1), timestamp=NOON - 5) for user in ("a", "zebra")]
    change(data, lambda store: store.append(joined))
    make(data, tmp_path / "x.jsonl")
    assert users(tmp_path / "x.jsonl") == [*USERS, "zebra"]


def test_a_changed_catalogue_is_announced(data: Path, tmp_path: Path) -> None:
    """A run goes on over a catalogue that has changed, and says so."""
    interrupt(data, tmp_path / "x.jsonl")
    change(data, lambda store: store.put_items([Item("new", "a rocket")]))
    listed, said = make(data, tmp_path / "x.jsonl")
    assert listed.computed == HALF
    assert "The catalogue has changed since" in said[1]


@pytest.mark.parametrize("suffix", ["csv", "jsonl.gz", "parquet"])
def test_shards_are_the_whole(data: Path, tmp_path: Path, suffix: str) -> None:
    """The rows of all shards together are those of a run without shards, and no user is in two."""
    make(data, tmp_path / f"whole.{suffix}")
    counts = []
    for number in (1, 2, 3):
        shard, out = ListShard(number, 3), tmp_path / f"{number}.{suffix}"
        interrupted = number == 2
        if interrupted:
            with pytest.raises(InterruptionError):
                make(data, out, shard=shard, progress=_stop)
        listed, said = make(data, out, shard=shard)
        assert len(said) == interrupted
        counts.append(listed.users)
    whole, *parts = (_lines(tmp_path / f"{name}.{suffix}") for name in ("whole", 1, 2, 3))
    assert sum(counts) == 40
    assert min(counts) > 0
    assert sorted(line for part in parts for line in part) == whole
    owners = [{line.split('"')[1] for line in part} for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 40


@pytest.mark.parametrize("name", ["x.json", "taken.csv"])
def test_a_path_that_cannot_be_written_is_refused_at_once(
    data: Path, tmp_path: Path, name: str
) -> None:
    """A name of no format, and that of a directory, are refused before a list is computed."""
    (tmp_path / "taken.csv").mkdir()
    with pytest.raises(Invalid, match=name):
        make(data, tmp_path / name)
    assert not (tmp_path / f"{name}.progress").exists()


def test_metadata_names_the_shard(data: Path, tmp_path: Path) -> None:
    """Parquet's metadata name the shard of a file that is not of all users."""
    make(data, tmp_path / "x.parquet", shard=ListShard(2, 4))
    assert pq.read_schema(tmp_path / "x.parquet").metadata[b"heed.shard"] == b"2/4"
    make(data, tmp_path / "x.parquet")
    assert b"heed.shard" not in pq.read_schema(tmp_path / "x.parquet").metadata


def _stop(done: int, _total: int) -> None:
    if done >= 4:
        raise InterruptionError


def _lines(path: Path) -> list[str]:
    """Return the rows of a file as sorted texts of one form."""
    if path.suffix == ".parquet":
        rows = [tuple(row.values()) for row in pq.read_table(path).to_pylist()]
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [tuple(row) for row in csv.reader(file)][1:]
    else:
        lines = gzip.decompress(path.read_bytes()).splitlines()
        rows = [tuple(json.loads(line).values()) for line in lines]
    return sorted(json.dumps([str(cell) for cell in row]) for row in rows)
