"""`heed recommend-all` beside a running service: the service's lists, or no file."""

from __future__ import annotations

import asyncio
import csv
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.domain.records import Event
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support import tiny
from tests.support.heed_process import PATIENCE, HeedProcess
from tests.support.server import Server
from tests.support.tiny import AT, GENRES, item_id


def start(data: Path, *arguments: object) -> HeedProcess:
    """Start `heed recommend-all` on a data directory."""
    return HeedProcess("recommend-all", "--data", data, *arguments, log=data.with_suffix(".lists"))


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_run_leaves_no_output_file(
    world: tiny.World, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGINT leaves no file; SIGKILL leaves only the temporary file."""

    async def crowd() -> None:
        store = SQLiteStore(data / STORE_FILE)
        await store.append([Event(f"one of many {n}", item_id(0, n)) for n in range(4_000)])
        await store.close()

    data, out = world.copy(tmp_path / "data"), tmp_path / "lists" / "x.parquet"
    out.parent.mkdir()
    asyncio.run(crowd())
    process = start(data, "--out", out)
    try:
        for _ in range(int(PATIENCE / 0.01)):
            if any(out.parent.iterdir()) or not process.is_alive:
                break
            time.sleep(0.01)
        process.send(number)
        assert process.wait() != 0
    finally:
        process.send(signal.SIGKILL)
    assert not out.exists()
    left = [] if number == signal.SIGINT else ["x.parquet.tmp"]
    assert [entry.name for entry in out.parent.iterdir()] == left
