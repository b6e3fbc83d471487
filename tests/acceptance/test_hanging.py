"""Processes that hang or do not stop: workers that are replaced, a server that ends in time."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
from pathlib import Path

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support.server import PATIENCE, Server
from tests.support.tiny import World
from tests.support.waiting import eventually
from tests.support.workers import children, workers


def test_a_hung_worker_is_not_waited_for_and_replaced(world: World, tmp_path: Path) -> None:
    """While one of two workers is stopped, the other activates a model; then it is replaced."""
    data = world.copy(tmp_path / "data")
    with Server(data, workers=2, worker_timeout=8) as server:
        eventually(lambda: len(served_by(server)) == 2)
        well, hung = workers(server)
        with well.connected() as ask:
            os.kill(hung.pid, signal.SIGSTOP)
            assert ask("POST", f"/v1/models/{world.second}/activate", {}).status == 200
        assert "is not waited for" in server.log()
        assert "silent for" not in server.log()
        eventually(lambda: hung.pid not in children(server.pid))
        assert f"(process {hung.pid}) hangs" in server.log()
        eventually(lambda: len(served_by(server)) == 2)
        for worker in workers(server):
            ready = worker.ask("GET", "/health/ready").body
            assert ready["checks"]["model"] == world.second
        assert well.pid in children(server.pid)


def served_by(server: Server) -> set[str]:
    """Return the numbers of the workers whose metrics are answered."""
    with server.client() as client:
        text = client.get("/metrics").text
    return set(re.findall(r'^heed_events\{.*worker="(\d)"', text, re.MULTILINE))


def has_ended(pid: int) -> bool:
    """True when a process is gone, or waits as a zombie for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_sigterm_ends_a_server_whose_work_does_not_end(world: World, tmp_path: Path) -> None:
    """With a stopped training and an endless import, the process ends; nothing stored is lost."""
    data = world.copy(tmp_path / "data")
    with Server(data, drain_timeout=0) as server:
        with server.client() as client:
            begun = client.post("/v1/models/train", json={"options": {"epochs": 1000}})
            assert begun.status_code == 202
            place = begun.headers["location"]
            # Stopped before it has replaced itself by the command, it would hold up its parent.
            eventually(lambda: client.get(place).json()["progress"])
            (training,) = children(server.pid)
            os.kill(training, signal.SIGSTOP)  # it will not obey SIGTERM
            item = {"item_id": "acknowledged", "title": "quagga"}
            assert client.post("/v1/items", json={"items": [item]}).status_code == 200
        stream = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
        stream.putrequest("POST", "/v1/items")
        stream.putheader("Content-Type", "application/x-ndjson")
        stream.putheader("Transfer-Encoding", "chunked")
        half = b'{"item_id": "half a line", "t'
        stream.endheaders(b"%x\r\n%b\r\n" % (len(half), half))
        server.terminate()
        assert server.wait() == 0
        stream.close()
    assert "not stopped within 5 s" in server.log()
    eventually(lambda: has_ended(training))

    async def stored() -> bool:
        store = SQLiteStore(data / STORE_FILE)
        try:
            return (await store.get_items(["acknowledged"]))[0] is not None
        finally:
            await store.close()

    assert asyncio.run(stored())
