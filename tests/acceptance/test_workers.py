"""Several workers behind one port: shared writes, models, jobs, metrics and memory.

Every request is shown to have been answered by the process that it is said to be answered by.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.domain.records import Item
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.server import PATIENCE, Server
from tests.support.tiny import AT, World, item_id
from tests.support.waiting import eventually
from tests.support.workers import Worker, children, memory, workers

COUNT = 2
_FIRST_LINE = b'{"item_id": "drained-0", "title": "quagga"}\n'
_LAST_LINE = b'{"item_id": "drained-1", "title": "quagga"}\n'
TRAINING = {"options": {"preset": "quick", "epochs": 1}}


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The small world, served by two workers."""
    data = world.copy(tmp_path_factory.mktemp("shared") / "data")
    with Server(data, workers=COUNT) as server:
        eventually(lambda: len(answering(server)) == COUNT)
        yield server
    assert "Traceback" not in server.log()


@pytest.fixture
def pair(server: Server) -> tuple[Worker, Worker]:
    """The two workers of the server."""
    one, other = workers(server)
    return one, other


def answering(server: Server) -> list[Worker]:
    """Return the workers of a server once all of them serve, else none."""
    with server.client() as http:
        text = http.get("/metrics").text
    serving = set(re.findall(r'heed_events\{namespace="default",worker="(\d)"\}', text))
    return workers(server) if len(serving) == COUNT else []


def both_ways(pair: tuple[Worker, Worker]) -> Iterator[tuple[Worker, Worker]]:
    """Yield the two workers as (writer, reader), then the other way round."""
    yield pair
    yield pair[::-1]


def test_an_event_is_in_the_next_answer_of_the_other(pair: tuple[Worker, Worker]) -> None:
    """An event sent to one worker is in the next history and score of the other."""
    target = item_id(0, 3)
    asked = {"user_id": "shared-1", "item_ids": [target], "explain": 20, "at": AT}
    for number, (writer, reader) in zip(range(20), itertools.cycle(both_ways(pair)), strict=False):
        event = {
            "event_id": f"shared-{number}",
            "user_id": "shared-1",
            "item_id": item_id(number % 4, number),  # an item once, so that each event is a reason
            "timestamp": f"2025-12-01T00:00:{number:02}Z",
        }
        assert writer.ask("POST", "/v1/events", {"events": [event]}).body["stored"] == 1
        known = reader.ask("GET", "/v1/users/shared-1/history?limit=1").body["events"]
        assert known[0]["event_id"] == f"shared-{number}"
        told = reader.ask("POST", "/v1/score", asked).body["items"][0]["explanation"]
        named = {reason["event_id"] for reason in told}
        assert named == {f"shared-{earlier}" for earlier in range(number + 1)}


def test_the_event_log_is_read_once_and_mapped_by_all(pair: tuple[Worker, Worker]) -> None:
    """Workers answer ready questions alike, from one file in memory that a worker filled."""
    asked = {"limit": 10, "at": AT}
    answers = [worker.ask("POST", "/v1/popular", asked) for worker in pair]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].body["items"] == answers[1].body["items"] != []
    mapped = [
        set(re.findall(r" (\d+) +/memfd:heed-shared", Path(f"/proc/{worker.pid}/maps").read_text()))
        for worker in pair
    ]
    assert len(mapped[0]) == 1
    assert mapped[0] == mapped[1]


def test_a_forgotten_event_is_in_no_answer_of_the_other(pair: tuple[Worker, Worker]) -> None:
    """An event deleted through one worker is absent from the other's next explanation."""
    for at, (writer, reader) in enumerate(both_ways(pair)):
        user = f"shared-forget-{at}"
        events = [
            {"event_id": f"{user}-{n}", "user_id": user, "item_id": item_id(1, n)} for n in range(4)
        ]
        asked = {"user_id": user, "item_ids": [item_id(1, 9)], "explain": 9}
        assert writer.ask("POST", "/v1/events", {"events": events}).status == 200

        def named(reader: Worker = reader, asked: Any = asked) -> set[str]:
            told = reader.ask("POST", "/v1/score", asked).body["items"][0]["explanation"]
            return {reason["event_id"] for reason in told}

        assert named() == {event["event_id"] for event in events}
        assert writer.ask("DELETE", f"/v1/users/{user}/history/{user}-2").status in {200, 204}
        assert named() == {f"{user}-{n}" for n in (0, 1, 3)}
        assert writer.ask("DELETE", f"/v1/users/{user}").status in {200, 204}
        assert named() == set()


def test_a_scenario_is_changed_at_once_for_the_other(pair: tuple[Worker, Worker]) -> None:
    """What one worker saves or deletes is in the next answer of the other."""
    for number, (writer, reader) in zip(range(20), itertools.cycle(both_ways(pair)), strict=False):
        limit = 1 + number % 7
        saved = writer.ask(
            "PUT", "/v1/scenarios/shared", {"question": "popular", "limit": limit}
        ).body
        answer = reader.ask("POST", "/v1/scenarios/shared", {}).body
        assert (answer["scenario_version"], len(answer["items"])) == (saved["version"], limit)
    assert writer.ask("DELETE", "/v1/scenarios/shared").status == 204
    assert reader.ask("POST", "/v1/scenarios/shared", {}).status == 404


def test_item_changes_are_found_by_the_other(pair: tuple[Worker, Worker]) -> None:
    """New, changed and deleted items are reflected in the next answer of the other worker."""
    for at, (writer, reader) in enumerate(both_ways(pair)):
        item = {"item_id": f"shared-item-{at}", "title": f"zyzzyva{at} weevil"}

        def found(text: str, reader: Worker = reader) -> list[str]:
            answer = reader.ask("POST", "/v1/search", {"query": f'"{text}"'}).body
            return [each["item_id"] for each in answer["items"]]

        assert found(f"zyzzyva{at}") == []
        assert writer.ask("POST", "/v1/items", {"items": [item]}).status == 200
        assert found(f"zyzzyva{at}") == [item["item_id"]]
        scored = reader.ask("POST", "/v1/score", {"item_ids": [item["item_id"]]}).body["items"]
        assert scored[0]["title"] == item["title"]
        item["title"] = f"quokka{at} marsupial"
        assert writer.ask("POST", "/v1/items", {"items": [item]}).status == 200
        assert (found(f"zyzzyva{at}"), found(f"quokka{at}")) == ([], [item["item_id"]])
        assert writer.ask("DELETE", f"/v1/items/{item['item_id']}").status in {200, 204}
        assert found(f"quokka{at}") == []
        assert reader.ask("GET", f"/v1/items/{item['item_id']}").status == 404


def test_an_event_is_counted_by_the_other(pair: tuple[Worker, Worker]) -> None:
    """An event stored through one worker counts in the other's next answer, until forgotten."""
    for at, (writer, reader) in enumerate(both_ways(pair)):
        user, kind = f"counted-{at}", f"kind-{at}"
        event = {"user_id": user, "item_id": item_id(1, 2), "type": kind}
        for count in (1, 2):
            assert writer.ask("POST", "/v1/events", {"events": [event]}).status == 200
            (item,) = reader.ask("POST", "/v1/popular", {"type": kind}).body["items"]
            assert (item["item_id"], item["events"]) == (item_id(1, 2), count)
        assert writer.ask("DELETE", f"/v1/users/{user}").status == 200
        assert reader.ask("POST", "/v1/popular", {"type": kind}).body["items"] == []


def test_a_profile_is_known_to_the_other(pair: tuple[Worker, Worker]) -> None:
    """A profile stored through one worker makes the next answer of the other personal."""
    for at, (writer, reader) in enumerate(both_ways(pair)):
        path = f"/v1/users/shared-profile-{at}"
        asked = {"user_id": f"shared-profile-{at}", "item_ids": [item_id(2, 1)]}
        assert reader.ask("POST", "/v1/score", asked).body["items"][0]["reason"] == "popular"
        profile = {"interests": ["medieval castle"]}
        assert writer.ask("PUT", path, profile).status in {200, 204}
        assert reader.ask("GET", path).body["interests"] == profile["interests"]
        assert reader.ask("POST", "/v1/score", asked).body["items"][0]["reason"] == "personal"


def test_a_model_that_one_activates_answers_from_all(
    pair: tuple[Worker, Worker], world: World
) -> None:
    """A version activated through one worker is served by the next answer of the other."""
    for version, (writer, reader) in zip(
        (world.second, world.first) * 2, itertools.cycle(both_ways(pair)), strict=False
    ):
        answer = writer.ask("POST", f"/v1/models/{version}/activate")
        assert answer.body["model_version"] == version
        asked = {"item_ids": [item_id(0, 0)]}
        assert reader.ask("POST", "/v1/score", asked).body["model_version"] == version


def test_training_is_shared_by_all_workers(pair: tuple[Worker, Worker]) -> None:
    """A second worker refuses another training, follows the job, and serves its version."""
    trainer, other = pair
    job = trainer.ask("POST", "/v1/models/train", TRAINING).body["job_id"]
    refused = other.ask("POST", "/v1/models/train", TRAINING)
    assert refused.status == 409
    states: list[str] = []

    def ended() -> bool:
        states.append(other.ask("GET", f"/v1/jobs/{job}").body["state"])
        return states[-1] not in {"queued", "running"}

    eventually(ended)
    done = other.ask("GET", f"/v1/jobs/{job}").body
    assert done["state"] == "succeeded", done
    asked = {"item_ids": [item_id(0, 0)]}
    versions = {
        each.ask("POST", "/v1/score", asked).body["model_version"] for each in (trainer, other)
    }
    assert len(versions) == 1
    if version := done["result"].get("version"):
        assert (versions == {version}) == done["result"]["verdict"]["is_served"]


def test_metrics_cover_all_workers_from_any_worker(pair: tuple[Worker, Worker]) -> None:
    """Each worker returns the request counts and the memory of all workers."""

    def counted(worker: Worker) -> dict[str, float]:
        text = worker.ask("GET", "/metrics").body
        return {
            sample.labels["worker"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "heed_http_requests_total"
            and sample.labels["route"] == "/v1/users/{user_id}/history"
            and sample.labels["status"] == "200"
        }

    before = counted(pair[0])
    for count, worker in zip((3, 5), pair, strict=True):
        for _ in range(count):
            assert worker.ask("GET", "/v1/users/u1/history").status == 200
    after = counted(pair[1])
    assert after == counted(pair[0])
    gained = sorted(after[number] - before.get(number, 0.0) for number in after)
    assert gained == [3.0, 5.0]
    text = pair[0].ask("GET", "/metrics").body
    assert (
        len(re.findall(r'^process_resident_memory_bytes\{worker="\d"\} ', text, re.MULTILINE))
        == COUNT
    )
    assert len(re.findall("^# TYPE heed_http_requests_total ", text, re.MULTILINE)) == 1


def test_killed_worker_is_replaced(world: World, tmp_path: Path) -> None:
    """The port answers while a worker is dead; its replacement has all data written meanwhile."""
    data = world.copy(tmp_path / "data")
    with Server(data, workers=COUNT) as server:
        eventually(lambda: len(answering(server)) == COUNT)
        for round_ in range(2):
            victim, witness = workers(server)
            os.kill(victim.pid, signal.SIGKILL)
            gone = partial(_is_gone, server, victim.pid)
            eventually(gone)
            events = [{"user_id": "killed", "item_id": item_id(0, n)} for n in range(3)]
            item = {"item_id": f"killed-{round_}", "title": f"wombat{round_}"}
            for _ in range(20):  # none is refused by the port: there is no socket of the dead
                with server.client() as http:
                    assert http.get("/health/ready").status_code == 200
            assert witness.ask("POST", "/v1/events", {"events": events}).status == 200
            assert witness.ask("POST", "/v1/items", {"items": [item]}).status == 200
            eventually(lambda: len(answering(server)) == COUNT)
            text = witness.ask("GET", "/metrics").body
            restarts = re.findall(r"^heed_worker_restarts_total\{.*\} (.*)$", text, re.MULTILINE)
            assert sum(map(float, restarts)) == round_ + 1
            assert len(re.findall(r"^heed_worker_up\{.*\} 1\.0$", text, re.MULTILINE)) == COUNT
            (new,) = [each for each in workers(server) if each.pid != witness.pid]
            assert new.pid != victim.pid
            found = new.ask("POST", "/v1/search", {"query": f"wombat{round_}"}).body["items"]
            assert found[0]["item_id"] == item["item_id"]
            history = new.ask("GET", "/v1/users/killed/history").body["events"]
            assert len(history) == 3 * (round_ + 1)
            assert f"(process {victim.pid}) was ended by SIGKILL" in " ".join(server.log().split())


def _is_gone(server: Server, pid: int) -> bool:
    return pid not in children(server.pid)


def test_every_worker_ends_and_no_process_remains(world: World, tmp_path: Path) -> None:
    """SIGTERM lets workers finish and end; SIGKILL of their parent ends them too."""
    data = world.copy(tmp_path / "data")
    with Server(data, workers=COUNT) as server:
        eventually(lambda: len(answering(server)) == COUNT)
        pids = children(server.pid)

        with contextlib.closing(_started_request(server)) as request:
            server.terminate()  # in the middle of a request
            request.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_LAST_LINE), _LAST_LINE))
            answer = json.loads(request.getresponse().read())
        assert answer["stored"] == 2
        assert server.wait() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with Server(data, workers=COUNT) as server:
        eventually(lambda: len(answering(server)) == COUNT)
        pids = children(server.pid)
        for worker in workers(server):
            found = worker.ask("POST", "/v1/search", {"query": '"quagga"'}).body["items"]
            assert len(found) == 2
        server.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def _started_request(server: Server) -> HTTPConnection:
    """Send the first of two lines of items, and return once a worker reads them."""
    connection = HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=PATIENCE)
    connection.putrequest("POST", "/v1/items")
    connection.putheader("Content-Type", "application/x-ndjson")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    # A worker sends this line when it starts to read the body. Without it, SIGTERM could come
    # before any worker has accepted the connection.
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert connection.sock.recv(len(go_on), socket.MSG_WAITALL) == go_on
    connection.send(b"%x\r\n%b\r\n" % (len(_FIRST_LINE), _FIRST_LINE))
    return connection


def test_workers_share_the_loaded_memory(tmp_path: Path) -> None:
    """Two workers hold less than 1.2 times the memory of one, 1.4 times after item changes."""
    data = tmp_path / "data"
    random = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(5_000)])
    items = [
        Item(f"item-{at}", title=" ".join(random.choice(words, 5)),
             description=" ".join(random.choice(words, 30)))
        for at in range(12_000)
    ]  # fmt: skip

    async def fill() -> None:
        store = SQLiteStore(data / STORE_FILE)
        await store.put_items(items)
        await store.close()

    data.mkdir()
    asyncio.run(fill())
    query = {"query": items[77].title, "limit": 5, "retrieval": {"mode": "coarse"}}
    with Server(data) as server, server.client() as http:
        whole = memory(server.pid)["Rss"]
        expected = http.post("/v1/search", json=query).json()
    assert expected["retrieval"] == "coarse"
    with Server(data, workers=COUNT) as server:
        eventually(lambda: len(answering(server)) == COUNT)
        for worker in workers(server):
            assert worker.ask("POST", "/v1/search", query).body == expected
        assert _held(server) < 1.2 * whole
        changed = [{"item_id": f"item-{at}", "title": f"other {at}"} for at in range(0, 12_000, 99)]
        one, other = workers(server)
        assert one.ask("POST", "/v1/items", {"items": changed}).status == 200
        found = [each.ask("POST", "/v1/search", query).body["items"] for each in (one, other)]
        assert found[0] == found[1]
        assert found[0][0]["item_id"] == "item-77"
        assert _held(server) < 1.4 * whole


def _held(server: Server) -> int:
    """Bytes of a server and its workers, each that several share counted once."""
    pid = server.pid
    return sum(memory(each)["Pss"] for each in (pid, *children(pid)))


def test_a_port_that_is_served_is_not_shared_with_another_service(
    server: Server, world: World, tmp_path: Path
) -> None:
    """A second service on a port that workers already share is refused."""
    data = world.copy(tmp_path / "data")
    port = server.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match=r"in use"):
        Server(data, workers=COUNT, port=port)
