"""`heed recommend-all` beside a running service: the service's lists, or no file."""

from __future__ import annotations

import asyncio
import csv
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from service.domain.records import Event
from service.engine import lists
from service.engine.lists import ListBatch, ListParts
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import MemoryProvider
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.stores.sqlite.store import SQLiteStore
from tests.support import tiny
from tests.support.heed_process import PATIENCE, HeedProcess
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, NOON, item_id

BEGUN = 16 * (2 * (os.cpu_count() or 1) + 1)  # users at most whose lists threads have begun


def start(
    data: Path, *arguments: object, log: str = "lists", prepare: Callable[[], None] | None = None
) -> HeedProcess:
    """Start `heed recommend-all` on a data directory."""
    path = data.with_suffix(f".{log}")
    return HeedProcess("recommend-all", "--data", data, *arguments, log=path, prepare=prepare)


@pytest.fixture(scope="module", params=["trained", "untrained"])
def server(
    request: pytest.FixtureRequest, world: tiny.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server for this module alone, since events of other tests change popularity."""
    path = tmp_path_factory.mktemp("lists") / "data"
    with Server(world.copy(path, trained=request.param == "trained")) as served:
        yield served


def test_each_list_is_what_the_service_answers(server: Server, tmp_path: Path) -> None:
    """Every user's list equals /v1/recommend at the same time, in items, order and scores."""
    with server.client() as http:
        http.put("/v1/users/fond", json={"interests": [GENRES[2]]}).raise_for_status()
        done = start(server.data, "--out", tmp_path / "x.csv", "--at", AT)
        assert done.wait() == 0, done.log()
        with (tmp_path / "x.csv").open(newline="") as file:
            found = list(csv.DictReader(file))
        assert len(found) == 41 * 20
        for user in {row["user_id"] for row in found}:
            asked = {"user_id": user, "at": AT, "limit": 20}
            answer = http.post("/v1/recommend", json=asked).json()
            mine = [row for row in found if row["user_id"] == user]
            assert [int(row["rank"]) for row in mine] == list(range(1, 21))
            assert [row["item_id"] for row in mine] == [i["item_id"] for i in answer["items"]]
            scores = [item["score"] for item in answer["items"]]
            assert [float(row["score"]) for row in mine] == pytest.approx(scores, abs=1e-4)
        assert answer["model_version"] in done.out()
    assert "820 rows for 41 users" in done.out()
    assert "users/s" in done.out()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "x.json"], "must end in one of"),
        (["--out", "x.csv", "--at", "noon"], "RFC 3339"),
        (["--out", "x.csv", "--limit", "0"], "--limit"),
        (["--out", "nowhere/x.csv"], "nowhere"),
        (["--out", "x.csv", "--shard", "5/4"], "--shard 5/4: must be NUMBER/COUNT"),
        (["--out", "x.csv", "--shard", "0/4"], "--shard 0/4: must be NUMBER/COUNT"),
        (["--out", "x.csv", "--shard", "x"], "--shard x: must be NUMBER/COUNT"),
    ],
)
def test_invalid_arguments_are_reported(
    world: tiny.World, tmp_path: Path, arguments: list[str], said: str
) -> None:
    """An invalid argument fails with a message, without a traceback or a file."""
    done = start(world.copy(tmp_path / "here" / "data"), *arguments)
    assert done.wait() != 0
    assert said in done.log()
    assert "Traceback" not in done.log()
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


@pytest.fixture
def crowd(world: tiny.World, tmp_path: Path) -> Path:
    """The small world, and 300 more users."""
    data = world.copy(tmp_path / "data")

    async def join() -> None:
        store = SQLiteStore(data / STORE_FILE)
        events = [Event(f"one of many {n}", item_id(n % 4, n), timestamp=NOON) for n in range(300)]
        await store.append(events)
        await store.close()

    asyncio.run(join())
    return data


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_run_leaves_no_output_file(
    crowd: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGINT and SIGKILL leave no output, only the folder from which the next run goes on."""
    out = tmp_path / "lists" / "x.parquet"
    out.parent.mkdir()
    process = start(crowd, "--out", out, prepare=partial(stop_after, 48, number))
    assert process.wait() != 0
    assert [entry.name for entry in out.parent.iterdir()] == ["x.parquet.progress"]
    done = start(crowd, "--out", out)
    assert done.wait() == 0, done.log()
    assert "Continuing the interrupted run: 48 of 340 users" in done.out()
    assert [entry.name for entry in out.parent.iterdir()] == ["x.parquet"]


@pytest.mark.parametrize(
    ("name", "steps"), [("x.parquet", range(9)), ("x.csv", (2, 6, 8)), ("x.jsonl.gz", (3, 7, 8))]
)
def test_killed_runs_go_on_to_the_same_file(
    crowd: Path, tmp_path: Path, name: str, steps: Sequence[int]
) -> None:
    """Killed at every step and continued, a run makes the very bytes of an uninterrupted one.

    Each run computes the lists that those before have not left, and after them at most what the
    threads have begun. Progress is the same for all formats: one of them is killed at every step.
    """
    whole, out = tmp_path / "whole" / name, tmp_path / "lists" / name
    whole.parent.mkdir()
    out.parent.mkdir()
    done = start(crowd, "--out", whole, "--at", AT)
    assert done.wait() == 0, done.log()
    assert "340 users" in done.out()
    everybody = sorted([*(f"one of many {n}" for n in range(300)), *(f"u{n}" for n in range(40))])
    before = b"yesterday's"
    out.write_bytes(before)
    # How each run ends, after how many users' lists, and bytes that are cut off its last part.
    runs: list[tuple[Callable[[], None] | None, int, int]] = [
        (partial(stop_after, 0, signal.SIGKILL), 0, 0),
        (partial(stop_after, 16, signal.SIGKILL), 16, 0),
        (partial(stop_after, 80, signal.SIGKILL), 80, 1),
        (partial(stop_after, 96, signal.SIGKILL), 96, 500),
        (partial(stop_after, 320, signal.SIGKILL), 320, 0),
        (partial(stop_after, 340, signal.SIGKILL), 340, 0),
        (partial(kill_before_it_appears, name), 340, 0),
        (kill_before_progress_is_removed, 340, 0),
        (None, 340, 0),
    ]
    kept = 0  # users whose lists the runs so far have left
    for number in steps:
        stop, written, torn = runs[number]
        log = tmp_path / f"computed-{number}"
        log.touch()
        process = start(crowd, "--out", out, "--at", AT, prepare=partial(record, log, stop))
        assert process.wait() == (0 if stop is None else -signal.SIGKILL), process.log()
        computed = log.read_text().splitlines()
        assert len(set(computed)) == len(computed)
        assert {*everybody[kept:written]} <= {*computed} <= {*everybody[kept : written + BEGUN]}
        continues = f"Continuing the interrupted run: {kept} of 340 users" in process.out()
        assert continues == bool(kept)
        kept = written - (16 if torn else 0)
        if torn:
            part = out.with_name(f"{name}.progress") / str(kept // 16)
            os.truncate(part, part.stat().st_size - torn)
        is_complete = stop in (kill_before_progress_is_removed, None)
        assert out.read_bytes() == (whole.read_bytes() if is_complete else before)
    assert [entry.name for entry in out.parent.iterdir()] == [name]


def test_another_model_is_not_mixed_with_the_first(
    crowd: Path, world: tiny.World, tmp_path: Path
) -> None:
    """A run that was killed starts again, and says so, once another model is the current one."""
    out = tmp_path / "x.csv"
    process = start(crowd, "--out", out, prepare=partial(stop_after, 160, signal.SIGKILL))
    assert process.wait() == -signal.SIGKILL
    Registry(crowd / MODELS_FOLDER).activate(world.second)
    for path in (out, tmp_path / "fresh.csv"):
        done = start(crowd, "--out", path, "--at", AT)
        assert done.wait() == 0, done.log()
        again = "Starting again: the interrupted run was of another model" in done.out()
        assert again == (path == out)
        assert world.second in done.out()
    assert out.read_bytes() == (tmp_path / "fresh.csv").read_bytes()


def test_shards_may_be_computed_at_once(crowd: Path, tmp_path: Path) -> None:
    """Processes beside each other compute shards of one data directory, together all lists."""
    whole = start(crowd, "--out", tmp_path / "whole.csv", "--at", AT)
    assert whole.wait() == 0, whole.log()
    shards = [
        start(
            crowd, "--out", tmp_path / f"{n}.csv", "--shard", f"{n}/3", "--at", AT, log=f"shard{n}"
        )
        for n in (1, 2, 3)
    ]
    for shard in shards:
        assert shard.wait() == 0, shard.log()
    header, *rows = (tmp_path / "whole.csv").read_text().splitlines()
    parts = [(tmp_path / f"{n}.csv").read_text().splitlines() for n in (1, 2, 3)]
    assert {part.pop(0) for part in parts} == {header}
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert all(part == [row for row in rows if row in set(part)] for part in parts)
    assert min(map(len, parts)) > 0


def test_two_runs_of_one_file_exclude_each_other(crowd: Path, tmp_path: Path) -> None:
    """While a run is going on, another one of the same file is refused, and disturbs nothing."""
    out = tmp_path / "lists" / "x.csv"
    out.parent.mkdir()
    first = start(crowd, "--out", out, prepare=partial(stop_after, 16, signal.SIGSTOP))
    try:
        progress = out.with_name("x.csv.progress")
        for _ in range(int(PATIENCE / 0.01)):
            if (progress / "0").exists() or not first.is_alive:
                break
            time.sleep(0.01)
        second = start(crowd, "--out", out, log="second")
        assert second.wait() == 1
        assert f"another process is computing these lists: it has {progress} open" in second.log()
        first.send(signal.SIGCONT)
        assert first.wait() == 0, first.log()
    finally:
        first.send(signal.SIGKILL)
    assert [entry.name for entry in out.parent.iterdir()] == ["x.csv"]


# ------------------------------------------------------------------ in the process of a run


def stop_after(users: int, number: signal.Signals) -> None:
    """Have this process, whose parts are of 16 users, stop once it has the lists of some users."""
    append = ListParts.append

    def append_and_stop(parts: ListParts, part: ListBatch) -> None:
        if users:
            append(parts, part)
        if parts.users == users:
            os.kill(os.getpid(), number)

    setattr(ListParts, "append", append_and_stop)  # noqa: B010  # a method, which mypy guards
    lists._PART = 16


def kill_before_it_appears(name: str) -> None:
    """Have this process killed when all is written, before it renames the output."""
    replace = os.replace

    def replace_or_die(source: Path, target: Path) -> None:
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    setattr(os, "replace", replace_or_die)  # noqa: B010  # a function, which mypy guards


def kill_before_progress_is_removed() -> None:
    """Have this process killed when the output is there, before its progress is removed."""

    def die(_: ListParts) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(ListParts, "remove", die)  # noqa: B010  # a method, which mypy guards


def record(log: Path, stop: Callable[[], None] | None) -> None:
    """Have this process note each user whose list it computes; then prepare its end."""
    memory = MemoryProvider.memory

    def note_and_provide(
        self: MemoryProvider, snapshot: Snapshot, events: EventColumns, *how: Any, **more: Any
    ) -> AbstractContextManager[UserMemory]:
        with log.open("a") as file:
            file.write(f"{events.user_id}\n")
        return memory(self, snapshot, events, *how, **more)

    setattr(MemoryProvider, "memory", note_and_provide)  # noqa: B010  # which mypy guards
    if stop is not None:
        stop()
