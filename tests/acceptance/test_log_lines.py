"""Lines on stderr of a real server: all JSON, and none with what clients sent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.support.server import Server
from tests.support.tiny import World, item_id
from tests.support.waiting import eventually
from tests.support.workers import children

COUNT = 2
USER = "private-user-4711"
QUERY = "private quagga medieval"
KEY = "heed_0123456789ab_private-key-of-a-client"
TRAINING = {"options": {"preset": "quick", "epochs": 1}}


def test_every_line_is_json_and_none_has_what_clients_sent(world: World, tmp_path: Path) -> None:
    """Errors, a killed worker, a training and SIGTERM give JSON lines without private texts."""
    data = world.copy(tmp_path / "data")
    events = [{"user_id": USER, "item_id": item_id(0, n)} for n in range(3)]
    with Server(data, workers=COUNT, log_level="debug") as server, server.client() as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        named = {"x-request-id": "trace-me"}
        assert http.post("/v1/events", json={"events": events}).status_code == 200
        http.post("/v1/search", json={"query": QUERY, "user_id": USER}, headers=named)
        http.post("/v1/search", content=f'{{"query": "{QUERY}"', headers={"content-type": "x/y"})
        http.post("/v1/recommend", json={"user_id": USER, "nonsense": USER})
        http.get(f"/v1/users/{USER}/history", params={"cursor": USER})
        http.get(f"/nowhere/{USER}", params={"q": QUERY})
        job = http.post("/v1/models/train", json=TRAINING).json()["job_id"]
        assert http.post(f"/v1/jobs/{job}/cancel", json={}).status_code == 202
        eventually(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
        victim, *_ = children(server.pid)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: victim not in children(server.pid))
    text = server.log()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines)
    for private in (USER, QUERY, "quagga", "private-key", "nonsense"):
        assert private not in text
    (search,) = [line for line in lines if line.get("request_id") == "trace-me"]
    assert (search["route"], search["status"], search["namespace"]) == (
        "/v1/search",
        200,
        "default",
    )
    assert search["milliseconds"] >= max(search["stages"].values()) > 0
    assert search["bytes"] > 0
    assert search["worker"] in range(COUNT)
    by_event = {line["event"]: line for line in lines}
    assert by_event["job ended"]["job"] == job
    assert by_event["job ended"]["state"] == "cancelled"
    statuses = {line["status"] for line in lines if line["event"] == "request"}
    assert {200, 404, 415, 422} <= statuses
    assert {"job started", "serving", "stopping", "stopped"} <= by_event.keys()
    assert f"(process {victim}) was ended by SIGKILL" in text


def test_the_access_log_can_be_switched_off(world: World, tmp_path: Path) -> None:
    """With the fraction 0 no request has a line; the others remain."""
    data = world.copy(tmp_path / "data")
    with Server(data, access_log=0) as server, server.client() as http:
        assert http.post("/v1/search", json={"query": QUERY}).status_code == 200
    events = [json.loads(line)["event"] for line in server.log().splitlines()]
    assert {"serving", "stopped"} <= set(events)
    assert "request" not in events
