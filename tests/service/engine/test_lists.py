"""Recommendations for all users: the engine's answers, continued after an interruption, sharded."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import models.ranking.recommend
from service.domain.errors import Invalid, StoreFull
from service.domain.records import Event, Item, User
from service.domain.settings import Settings
from service.engine import lists
from service.engine.engine import open_engine
from service.engine.lists import (
    ListBatch,
    Listed,
    ListRun,
    ListShard,
    UserList,
    open_parts,
    write_lists,
)
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.encoding import user_key
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.support import asking
from tests.support.postgres_server import PostgresDatabases
from tests.support.tiny import NOON, World, events, item_id, items

Row = tuple[str, int, str, float]

ALL = asking.recommend(asking.who(at=NOON))
NOW = asking.recommend(asking.who())
FIVE = asking.recommend(asking.who(at=NOON), limit=5)
USERS = sorted(f"u{n}" for n in range(40))
HALF = 20  # users, after which a run is interrupted


class InterruptionError(Exception):
    """Raised in the middle of a run."""


@pytest.fixture
def data(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small world; runs compute four lists at a time, and keep as many in a part."""
    monkeypatch.setattr(lists, "_BATCH", 4)
    monkeypatch.setattr(lists, "_PART", 4)
    return world.copy(tmp_path / "data")


def change(data: Path, *works: Callable[[SQLiteStore], Awaitable[Any]]) -> None:
    """Do this to the store of a data directory."""

    async def do() -> None:
        store = SQLiteStore(data / STORE_FILE)
        for work in works:
            await work(store)
        await store.close()

    data.mkdir(exist_ok=True)
    asyncio.run(do())


def make(data: Path, out: Path, query: Any = ALL, **options: Any) -> tuple[Listed, list[str]]:
    """Write the lists of a data directory; return counts, and what was announced."""
    said: list[str] = []
    settings = options.pop("settings", Settings(data=data))
    options = {"progress": lambda *_: None} | options
    done = write_lists(settings, out, query, announce=said.append, writing=print, **options)
    return asyncio.run(done), said


def interrupt(data: Path, out: Path, query: Any = ALL, **options: Any) -> None:
    """Begin to write the lists of a data directory, and stop half-way."""

    def stop(done: int, _total: int) -> None:
        if done >= HALF:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        make(data, out, query, progress=stop, **options)


def rows(path: Path) -> list[Row]:
    """Return the rows of a Parquet file."""
    return [tuple(row.values()) for row in pq.read_table(path).to_pylist()]


def users(path: Path) -> list[str]:
    """Return the users of a Parquet file, each once, in its order."""
    return list(dict.fromkeys(row[0] for row in rows(path)))


def answers(data: Path, user_ids: Sequence[str], query: Any) -> dict[str, Any]:
    """Return what an engine answers each user, asked at noon."""

    async def do() -> dict[str, Any]:
        engine = await open_engine(Settings(data=data))
        try:
            asked = {user: query.model_copy(update={"user_id": user}) for user in user_ids}
            return {user: await asking.ask(engine, each) for user, each in asked.items()}
        finally:
            await engine.close()

    return asyncio.run(do())


# ----------------------------------------------------------------------------- the lists


@pytest.mark.parametrize("work", [None, 10], ids=["exact", "candidates"])
def test_everyone_gets_what_the_service_answers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: int | None
) -> None:
    """Each list is the engine's, for users without events, with unknown items or all seen, too."""
    if work is not None:
        monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", work)
        monkeypatch.setattr(models.ranking.recommend, "CANDIDATES", 4)
    vector = np.linspace(-1, 1, 256, dtype=np.float32)
    own = Event("stranger", "nowhere", "own", timestamp=NOON - 5, key=vector, value=-vector)
    every = [item_id(genre, n) for genre in range(4) for n in range(15)]
    change(
        data,
        lambda store: store.put_user(User("new")),
        lambda store: store.put_user(User("interested", {}, ("space", item_id(1, 3)))),
        lambda store: store.append([own, Event("stranger", "elsewhere")]),
        lambda store: store.append([Event("u1", item_id(2, 3), weight=9, timestamp=NOON + 7)]),
        lambda store: store.append([Event("u7", item, timestamp=NOON) for item in every]),
    )
    everybody = sorted([*USERS, "new", "interested", "stranger"])
    for query in (FIVE, asking.recommend(asking.who(at=NOON), limit=7, exclude_seen=False)):
        heard: list[tuple[int, int]] = []

        def note(done: int, total: int, to: list[tuple[int, int]] = heard) -> None:
            to.append((done, total))

        listed, _ = make(data, tmp_path / "x.parquet", query, progress=note)
        answered = answers(data, everybody, query)
        wanted = [
            (user, rank, item["item_id"], item["score"])
            for user, answer in answered.items()
            for rank, item in enumerate(answer.items, 1)
        ]
        found = rows(tmp_path / "x.parquet")
        assert [row[:3] for row in found] == [row[:3] for row in wanted]
        assert [row[3] for row in found] == pytest.approx([row[3] for row in wanted], abs=1e-5)
        assert (listed.users, listed.rows) == (43, len(found))
        assert (heard[0], heard[-1], heard) == ((0, 43), (43, 43), sorted(heard))
        assert {item["reason"] for item in answered["new"].items} == {"popular"}
        if query is FIVE:
            assert not answered["u7"].items


def test_recall_of_the_candidates_is_of_the_whole_sample(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recall is the share of exact lists that candidates found, in a continued run too."""
    whole, _ = make(data, tmp_path / "whole.parquet", FIVE)
    assert whole.sampled == 0
    assert math.isnan(whole.recall)
    monkeypatch.setattr(models.ranking.recommend, "EXACT_WORK", 10)
    monkeypatch.setattr(models.ranking.recommend, "CANDIDATES", 20)
    some = np.flatnonzero(np.arange(60) % 3)

    def candidates(_: object, __: object, allowed: NDArray[np.bool_], *___: object) -> Any:
        return some[allowed[some]]

    monkeypatch.setattr(models.ranking.recommend, "candidates", candidates)
    interrupt(data, tmp_path / "some.parquet", FIVE)
    found, _ = make(data, tmp_path / "some.parquet", FIVE)
    best, listed = (
        {(row[0], row[2]) for row in rows(tmp_path / name)}
        for name in ("whole.parquet", "some.parquet")
    )
    assert found.sampled == 40
    assert found.recall == pytest.approx(len(best & listed) / len(best))
    assert 0 < found.recall < 1
    monkeypatch.setattr(lists, "_SAMPLE", 7)
    assert make(data, tmp_path / "x.parquet", FIVE)[0].sampled == 7


def test_metadata_name_the_model_the_time_and_the_shard(world: World, tmp_path: Path) -> None:
    for trained, version in ((True, world.first), (False, "untrained")):
        data = world.copy(tmp_path / version, trained=trained)
        shard = ListShard(2, 4) if trained else ListShard()
        listed, _ = make(data, tmp_path / "x.parquet", shard=shard)
        assert listed.model_version == version
        metadata = pq.read_schema(tmp_path / "x.parquet").metadata
        assert metadata[b"heed.model_version"].decode() == version
        assert metadata[b"heed.at"] == b"2026-01-01T12:00:00Z"
        assert metadata.get(b"heed.shard") == (b"2/4" if trained else None)


def test_rows_are_written_in_groups_of_bounded_size(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(data, tmp_path / "whole.parquet")
    monkeypatch.setattr(lists, "_ROWS", 100)
    make(data, tmp_path / "x.parquet")
    assert rows(tmp_path / "x.parquet") == rows(tmp_path / "whole.parquet")
    file = pq.ParquetFile(tmp_path / "x.parquet")
    groups = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]
    assert len(groups) > 5
    assert max(groups) < 120


def test_an_empty_store_makes_an_empty_file(tmp_path: Path) -> None:
    change(tmp_path / "data")
    listed, _ = make(tmp_path / "data", tmp_path / "x.parquet")
    assert (listed.users, listed.rows, listed.model_version) == (0, 0, "untrained")
    assert rows(tmp_path / "x.parquet") == []


# ------------------------------------------------------------------------- continued runs


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
        ("request", {"query": asking.recommend(asking.who(at=NOON), exclude_seen=False)}),
        ("shard", {"shard": ListShard(1, 2)}),
        ("configuration", {"settings": {"max_attention_error": 0.5}}),
        ("store", {}),
        ("", {"restart": True}),
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
    why = [f"Starting again: the interrupted run was of another {what}."]
    assert said == (why if what else [])
    assert listed.computed == listed.users
    make(data, tmp_path / "fresh.csv", **again)
    assert (tmp_path / "x.csv").read_bytes() == (tmp_path / "fresh.csv").read_bytes()


def test_users_and_items_that_change_meanwhile(data: Path, tmp_path: Path) -> None:
    """Who was forgotten or merged has no list, even if they came back; who joins behind has one."""
    out = tmp_path / "x.parquet"
    interrupt(data, out)
    before, back, after, merged = USERS[3], USERS[7], USERS[30], USERS[9]
    joined = [Event(user, item_id(0, 1), timestamp=NOON - 5) for user in (back, "a", "zebra")]
    change(
        data,
        *(lambda store, user=user: store.forget(user) for user in (before, back, after)),
        lambda store: store.append(joined),
        lambda store: store.merge(USERS[31], merged),
        lambda store: store.put_items([Item("new", "a rocket")]),
    )
    listed, said = make(data, out)
    gone = {before, after, merged}
    assert users(out) == [*(u for u in USERS if u not in gone | {back}), "zebra"]
    assert (listed.users, listed.rows) == (37, 740)
    assert "The catalogue has changed since" in said[1]
    make(data, out)
    assert users(out) == sorted([*(u for u in USERS if u not in gone), "a", "zebra"])


def test_who_is_forgotten_while_a_run_goes_on_has_no_list(data: Path, tmp_path: Path) -> None:
    def forget(done: int, _total: int) -> None:
        if done == 4:
            for user in (USERS[0], USERS[-1]):
                # In a thread of its own, since this one runs an event loop.
                work = (data, lambda store, user=user: store.forget(user))
                thread = Thread(target=change, args=work)
                thread.start()
                thread.join()

    listed, _ = make(data, tmp_path / "x.parquet", progress=forget)
    assert users(tmp_path / "x.parquet") == USERS[1:-1]
    assert listed.users == 38


@pytest.mark.parametrize("name", ["x.json", "taken.csv"])
def test_a_path_that_cannot_be_written_is_refused_at_once(
    data: Path, tmp_path: Path, name: str
) -> None:
    """A name of no format, and that of a directory, are refused before a list is computed."""
    (tmp_path / "taken.csv").mkdir()
    with pytest.raises(Invalid, match=name):
        make(data, tmp_path / name)
    assert not (tmp_path / f"{name}.progress").exists()


# -------------------------------------------------------------------- machines that share a store


@pytest.fixture(scope="module")
def urls(postgres: PostgresDatabases) -> list[str]:
    """Two databases with the small world."""

    async def put(url: str) -> None:
        store = PostgresStore(url, namespace="default", create=True)
        await store.put_items(items())
        await store.append(events())
        await store.close()

    made = [postgres.create_database() for _ in range(2)]
    for url in made:
        asyncio.run(put(url))
    return made


def test_another_machine_goes_on(data: Path, urls: list[str], world: World, tmp_path: Path) -> None:
    """A run that stopped on one machine is continued by another over the same database."""
    first = Settings(data=data, store=urls[0])
    second = Settings(data=world.copy(tmp_path / "second"), store=urls[0])
    whole, _ = make(data, tmp_path / "whole.parquet", settings=first)
    interrupt(data, tmp_path / "x.parquet", settings=first)
    listed, said = make(data, tmp_path / "x.parquet", settings=second)
    assert (whole.computed, listed.computed) == (40, HALF)
    assert said[0].startswith("Continuing the interrupted run: 20 of 40 users")
    assert (tmp_path / "x.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_another_database_is_another_store(data: Path, urls: list[str], tmp_path: Path) -> None:
    """Lists of one database are not mixed with those of another, nor with those of a file."""
    first, second, alone = (Settings(data=data, store=store) for store in (*urls, ""))
    for begun, another in ((first, alone), (second, first), (alone, second)):
        for settings, said in ((begun, "Continuing"), (another, "of another store")):
            interrupt(data, tmp_path / "x.csv", settings=begun)
            assert said in make(data, tmp_path / "x.csv", settings=settings)[1][0]


# ---------------------------------------------------------------------------- part files

RUN = ListRun({"model": "one", "shard": "1/1"}, at=7, begun=8, catalogue_version=9)
LATER = replace(RUN, at=70, begun=80, catalogue_version=90)
PARTS = [
    ListBatch([UserList("a", ["x", "y\n"], [1 / 3, -2e-30]), UserList("b", [], [])], []),
    ListBatch([UserList("ç", ["z"], [0.1])], [0.25, 1.0]),
    ListBatch([UserList("名", ["\u2028"], [3.0])], []),
]


def fill(folder: Path, parts: Sequence[ListBatch] = PARTS) -> None:
    with open_parts(folder, RUN) as made:
        for part in parts:
            made.append(part)


@pytest.mark.parametrize("name", ["run", "0", "1", "2"])
def test_a_damaged_file_and_all_behind_it_are_not_believed(tmp_path: Path, name: str) -> None:
    """If a file is cut or has a changed byte, only the parts before it are continued."""
    folder = tmp_path / "p"
    fill(folder)
    data = (folder / name).read_bytes()
    whole = 0 if name == "run" else int(name)
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for content in [*damaged, *(data[:length] for length in range(len(data)))]:
        (folder / name).write_bytes(content)
        with open_parts(folder, LATER) as parts:
            assert list(parts.parts()) == PARTS[:whole]
            assert (parts.users, len(parts.recalls)) == ((0, 0), (2, 0), (3, 2))[whole]
            assert parts.run == (LATER if name == "run" else RUN)
            assert len([*folder.iterdir()]) == 1 + whole
            for part in PARTS[whole:]:
                parts.append(part)
            assert list(parts.parts()) == PARTS
        if name == "run":
            fill(folder, ())
            (folder / name).write_bytes(data)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that a full disk refuses is reported; the next run goes on after the last one."""
    folder = tmp_path / "p"
    fill(folder, PARTS[:2])

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with open_parts(folder, LATER) as parts, monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(StoreFull, match=str(folder)):
            parts.append(PARTS[2])
    with open_parts(folder, LATER) as parts:
        assert (parts.users, parts.last) == (3, "ç")
        parts.append(PARTS[2])
        assert list(parts.parts()) == PARTS


def test_parts_are_their_owners_alone(tmp_path: Path) -> None:
    """The lists of users cannot be read by other users of the machine."""
    mask = os.umask(0)
    try:
        fill(tmp_path / "p")
    finally:
        os.umask(mask)
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "p").iterdir()} == {0o600}


# -------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    ("user_id", "key"),  # by b2sum -l 64, and all bits but the first
    [
        ("", 0x64A6A0577479B2B4),
        ("u1", 0x12994D683F4E6AD5),
        ("名", 0x69F40412298B18E5),
    ],
)
def test_user_keys_never_change(user_id: str, key: int) -> None:
    """A user's key is 63 bits of the BLAKE2b digest of the id, whatever the machine."""
    assert user_key(user_id) == key
    assert [n for n in range(1, 5) if ListShard(n, 4).has(user_id)] == [key % 4 + 1]


def test_shards_are_written_as_they_are_read() -> None:
    """NUMBER/COUNT is parsed, with the number from 1 to the count."""
    assert [str(ListShard.parse(text)) for text in ("1/1", "2/4", "4/4")] == ["1/1", "2/4", "4/4"]
    for text in ("5/4", "0/4", "x", "", "2", "2/0", "-1/4", "1/4/2", " 1/4", "1.0/4", "²/4"):
        with pytest.raises(Invalid, match="NUMBER/COUNT"):
            ListShard.parse(text)
