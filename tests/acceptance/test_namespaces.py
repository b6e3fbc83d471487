"""Namespaces served by two workers: own models, jobs and read-your-writes, and a removal."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from service.runtime.data_layout import MODELS_FOLDER, remove_namespace
from service.snapshots.registry import Registry
from tests.support.namespaced import copy_namespace, empty_namespace
from tests.support.server import Server
from tests.support.tiny import AT, World, item_id
from tests.support.waiting import eventually
from tests.support.workers import Answered, Worker, workers

COUNT = 2
OTHER = "other"
TRAINING = {"options": {"preset": "quick", "epochs": 1}}


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The small world as `default` and once more as another namespace, served by two workers."""
    data = world.copy(tmp_path_factory.mktemp("namespaces") / "data")
    copy_namespace(world.data, data, OTHER)
    with Server(data, workers=COUNT) as server:
        # Opened at the start by each worker.
        eventually(lambda: len(opened(server, OTHER)) == COUNT)
        yield server
    assert "Traceback" not in server.log()


@pytest.fixture
def pair(server: Server) -> tuple[Worker, Worker]:
    """The two workers of the server."""
    one, other = workers(server)
    return one, other


def opened(server: Server, namespace: str) -> set[str]:
    """Return the numbers of the workers that have a namespace open."""
    with server.client() as http:
        text = http.get("/metrics").text
    return set(re.findall(rf'heed_events{{namespace="{namespace}",worker="(\d)"}}', text))


def ask(worker: Worker, method: str, path: str, body: Any = None, of: str = OTHER) -> Answered:
    """Ask a worker about a namespace."""
    return worker.ask(method, path, body, heed_namespace=of)


def test_a_write_is_in_the_next_answer_of_the_other_worker(pair: tuple[Worker, Worker]) -> None:
    """Events and items of a namespace are read by the other worker at once, in it alone."""
    target = item_id(0, 3)
    ways = itertools.cycle((pair, pair[::-1]))
    for number, (writer, reader) in zip(range(10), ways, strict=False):
        event = {
            "event_id": f"seen-{number}",
            "user_id": "seen",
            "item_id": item_id(number % 4, number),
            "timestamp": f"2025-12-01T00:00:{number:02}Z",
        }
        assert ask(writer, "POST", "/v1/events", {"events": [event]}).body["stored"] == 1
        asked = {"user_id": "seen", "item_ids": [target], "explain": 20, "at": AT}
        reasons = ask(reader, "POST", "/v1/score", asked).body["items"][0]["explanation"]
        assert {each["event_id"] for each in reasons} == {f"seen-{n}" for n in range(number + 1)}
        item = {"item_id": "new", "title": f"zyzzyva{number}"}
        assert ask(writer, "POST", "/v1/items", {"items": [item]}).status == 200
        query = {"query": f'"zyzzyva{number}"'}
        assert len(ask(reader, "POST", "/v1/search", query).body["items"]) == 1
        for worker in pair:
            assert worker.ask("POST", "/v1/search", query).body["items"] == []
            assert worker.ask("GET", "/v1/users/seen/history").body["events"] == []


def test_a_model_is_activated_in_one_namespace(pair: tuple[Worker, Worker], world: World) -> None:
    """A version that one worker activates answers from both, in its namespace alone."""
    asked = {"item_ids": [item_id(0, 0)]}
    ways = itertools.cycle((pair, pair[::-1]))
    for version, (writer, reader) in zip((world.second, world.first), ways, strict=False):
        answer = ask(writer, "POST", f"/v1/models/{version}/activate")
        assert answer.body["model_version"] == version
        assert ask(reader, "POST", "/v1/score", asked).body["model_version"] == version
        for worker in pair:
            scored = worker.ask("POST", "/v1/score", asked)
            assert scored.body["model_version"] == world.first


def test_a_training_belongs_to_its_namespace(
    pair: tuple[Worker, Worker], server: Server, world: World
) -> None:
    """A training is seen, cancelled and published in its own namespace alone."""
    trainer, other = pair
    own = server.data / "namespaces" / OTHER
    before = {each.version for each in Registry(server.data / MODELS_FOLDER).versions()}
    job = ask(trainer, "POST", "/v1/models/train", TRAINING).body["job_id"]
    for worker in pair:
        assert ask(worker, "GET", f"/v1/jobs/{job}").status == 200
        assert worker.ask("GET", "/v1/jobs").body["jobs"] == []
        assert worker.ask("GET", f"/v1/jobs/{job}").status == 404
        assert worker.ask("POST", f"/v1/jobs/{job}/cancel").status == 404

    def ended() -> bool:
        return ask(other, "GET", f"/v1/jobs/{job}").body["state"] not in {"queued", "running"}

    eventually(ended)
    done = ask(other, "GET", f"/v1/jobs/{job}").body
    assert done["state"] == "succeeded", done
    assert {each.version for each in Registry(server.data / MODELS_FOLDER).versions()} == before
    version = done["result"].get("version")
    assert (version in before) == (version is None)
    if version is not None:
        assert version in {each.version for each in Registry(own / MODELS_FOLDER).versions()}
        asked = {"item_ids": [item_id(0, 0)]}
        for worker in pair:
            served = ask(worker, "POST", "/v1/score", asked).body["model_version"]
            assert (served == version) == done["result"]["verdict"]["is_served"]
            scored = worker.ask("POST", "/v1/score", asked).body["model_version"]
            assert scored == world.first


def test_a_removal_is_noticed_by_every_worker(pair: tuple[Worker, Worker], server: Server) -> None:
    """After a removal each worker answers 404, frees the files, and leaves none behind."""
    folder = empty_namespace(server.data, "brief")
    item = {"items": [{"item_id": "one", "title": "one"}]}
    assert ask(pair[0], "POST", "/v1/items", item, "brief").status == 200
    assert ask(pair[1], "GET", "/v1/items/one", None, "brief").status == 200
    remove_namespace(server.data, "brief")
    for worker in pair:
        assert ask(worker, "GET", "/v1/items/one", None, "brief").status == 404

    def freed(worker: Worker) -> bool:
        for each in Path(f"/proc/{worker.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "brief" in str(each.readlink()):
                    return False
        return True

    for worker in pair:
        eventually(partial(freed, worker))
    assert not folder.exists()
    assert [each.name for each in folder.parent.glob("[!.]*")] == [OTHER]
