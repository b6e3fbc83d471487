"""Lifecycle of one server: training over HTTP, activation, SIGTERM and restart."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from models.recommender.artifact import WEIGHTS_FILE
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots.registry import Registry
from tests.support.server import PATIENCE, Server
from tests.support.tiny import AT, World, events, items

NAMES = [item.item_id for item in items()]


@pytest.fixture(scope="module")
def server(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own; its last test stops it."""
    with Server(world.copy(tmp_path_factory.mktemp("run") / "data")) as server:
        yield server


@pytest.fixture
def registry(server: Server) -> Registry:
    """The model registry as another process opens it."""
    return Registry(server.data / MODELS_FOLDER)


def answer(http: httpx.Client, user: str = "u9") -> dict[str, Any]:
    """All scores for one user as of noon, with reasons."""
    body = {"user_id": user, "item_ids": NAMES, "explain": 12, "at": AT}
    found: dict[str, Any] = http.post("/v1/score", json=body).json()
    return found


def serving(http: httpx.Client) -> str:
    """Return the model version of an answer."""
    version: str = answer(http)["model_version"]
    return version


# ------------------------------------------------------------------ what runs


def test_unknown_users_get_popular_items(http: httpx.Client) -> None:
    """A request without a user recommends items by falling number of events."""
    seen = Counter(event.item_id for event in events())
    offers = http.post("/v1/recommend", json={"limit": 60}).json()["items"]
    counts = [seen[offer["item_id"]] for offer in offers]
    assert len(counts) == len(NAMES)
    assert counts == sorted(counts, reverse=True)


def test_health_metrics_and_headers_report_the_state(http: httpx.Client, world: World) -> None:
    assert http.get("/health/live").json() == {"live": True}
    ready = http.get("/health/ready").json()
    details = ready["checks"].pop("details")
    assert ready == {"ready": True, "checks": {"store": True, "disk": True, "model": world.first}}
    assert details["disk"]["free_bytes"] > details["disk"]["needed_bytes"]
    assert details["model"] == {"degraded": False}
    metrics = http.get("/metrics").text
    assert re.search(r'^heed_events\{namespace="default"\} 480\.0$', metrics, re.MULTILINE)
    assert re.search(r'^heed_items\{namespace="default"\} 60\.0$', metrics, re.MULTILINE)
    scored = http.post("/v1/score", json={"user_id": "u1", "item_ids": NAMES[:1]})
    assert {"store", "attend"} <= set(re.findall(r"(\w+);dur=", scored.headers["server-timing"]))
    assert scored.headers["x-request-id"]


# ------------------------------------------------------------------ training and versions


def test_a_training_is_cancelled_over_http(http: httpx.Client) -> None:
    """The job ends as cancelled, without a version, and cancelling it again changes nothing."""
    begun = http.post("/v1/models/train", json={"options": {"epochs": 1000}})
    place = begun.headers["location"]
    assert http.post(f"{place}/cancel", json={}).status_code == 202
    while (job := http.get(place).json())["state"] in {"queued", "running"}:
        time.sleep(0.1)
    assert (job["state"], job["result"]) == ("cancelled", None)
    assert http.post(f"{place}/cancel", json={}).json() == job


def test_model_trained_over_http_is_served_without_a_restart(
    http: httpx.Client, world: World
) -> None:
    """A version trained over HTTP is served at once if it is better; each can be activated."""
    before = answer(http)
    options = {"preset": "quick", "epochs": 10, "seed": 7}
    begun = http.post("/v1/models/train", json={"options": options})
    assert begun.status_code == 202, begun.text
    place = begun.headers["location"]
    assert http.post("/v1/models/train", json={}).status_code == 409  # one at a time

    progress: list[dict[str, Any]] = []
    while (job := http.get(place).json())["state"] in {"queued", "running"}:
        assert answer(http)["items"]  # it goes on answering
        if job["progress"] and job["progress"] not in progress:
            progress.append(job["progress"])
    assert job["state"] == "succeeded", job
    assert (job["options"], job["error"]) == (options, None)
    assert progress
    assert {each["epochs"] for each in progress if "epochs" in each} <= {10}
    assert job["curve"][-1]["epoch"] == 10
    version = job["result"]["version"]
    metrics = job["result"]["metrics"]
    assert metrics["ndcg"] > metrics["popularity_ndcg"]

    if not job["result"]["verdict"]["is_served"]:
        assert serving(http) == before["model_version"]
        assert http.post(f"/v1/models/{version}/activate", json={}).status_code == 200
    assert serving(http) == version
    listed = {model["version"]: model for model in http.get("/v1/models").json()["models"]}
    assert listed.keys() == {world.first, world.second, version}
    assert listed[version]["current"]
    assert listed[version]["metrics"] == metrics
    assert listed[version]["metadata"]["preset"] == "quick"
    assert answer(http)["items"] != before["items"]
    assert http.post(f"/v1/models/{world.first}/activate", json={}).status_code == 200
    assert answer(http) == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"epochs": 0}, "whole number of at least 1"),
        ({"epochs": 1001}, "whole number of at most 1000"),
        ({"epochs": "x"}, "whole number of at least 1"),
        ({"epochs": True}, "whole number of at least 1"),
        ({"seed": -1}, "whole number of at least 0"),
        ({"preset": "slow"}, "must be one of quick, best"),
        ({"preset": 1}, "must be one of quick, best"),
        ({"preset": ""}, "must be one of quick, best"),
        ({"speed": 1}, "those are epochs, preset, seed"),
    ],
)
def test_invalid_training_option_is_refused(
    http: httpx.Client, options: dict[str, Any], why: str
) -> None:
    refused = http.post("/v1/models/train", json={"options": {"seed": 1} | options})
    assert refused.status_code == 422
    (name,) = options
    (error,) = refused.json()["errors"]
    assert error["pointer"] == f"/options/{name}"
    assert why in error["detail"]
    assert http.get("/v1/jobs/nothing").status_code == 404


def test_version_activated_by_another_process_is_served(
    http: httpx.Client, registry: Registry, world: World
) -> None:
    """A running service follows the activations of another process, forward and back."""
    for version in (world.second, world.first):
        registry.activate(version)
        end = time.monotonic() + PATIENCE
        while serving(http) != version:  # the other one answers meanwhile
            assert time.monotonic() < end, "the service did not follow"
            time.sleep(0.02)
        assert registry.current() == version


def test_a_broken_version_never_replaces_a_good_one(
    http: httpx.Client, server: Server, registry: Registry, world: World
) -> None:
    """A version with NaN weights or changed bytes is never served, and its reason is reported."""
    files = registry.load(world.first)
    weights = load(bytes(files[WEIGHTS_FILE]))
    weights["prior"][3] = np.nan
    before = answer(http)
    registry.publish(files | {WEIGHTS_FILE: save(weights)}, {}, version="nan")
    registry.publish(files, {}, version="bitten", activate=False)
    path = server.data / MODELS_FOLDER / "versions" / "bitten" / WEIGHTS_FILE
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    end = time.monotonic() + PATIENCE
    while "prior is not finite" not in server.log():
        assert time.monotonic() < end, "the service did not look at it"
        time.sleep(0.02)
    degraded = before | {"degraded": True}  # what was made current is not what answers
    assert answer(http) == degraded
    for version, reason in (("nan", "prior is not finite"), ("bitten", WEIGHTS_FILE)):
        refused = http.post(f"/v1/models/{version}/activate", json={})
        assert refused.status_code == 409
        assert reason in refused.json()["detail"]
        assert answer(http) == degraded
    broken = {m["version"]: m["broken"] for m in http.get("/v1/models").json()["models"]}
    assert WEIGHTS_FILE in broken["bitten"]
    assert http.post(f"/v1/models/{world.first}/activate", json={}).status_code == 200
    assert registry.current() == world.first
    assert answer(http) == before


# ------------------------------------------------------------------ the end


def test_sigterm_finishes_requests_and_a_restart_serves_the_same(server: Server) -> None:
    slow = {"user_id": "u8", "item_ids": NAMES * 6, "explain": 12}
    with server.client() as http:
        before = {user: answer(http, user) for user in ("u9", "u10", "nobody")}
        found = http.post("/v1/search", json={"query": "king", "user_id": "u9", "at": AT}).json()

    def line(number: int) -> bytes:
        return json.dumps({"item_id": f"late-{number}", "hidden": True}).encode() + b"\n"

    async def welcome(stranger: httpx.AsyncClient) -> bool:
        try:
            await stranger.get("/health/live", headers={"connection": "close"})
        except httpx.TransportError:
            return False
        return True

    async def run() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def lines() -> AsyncIterator[bytes]:
            yield line(0)
            begun.set()
            await go_on.wait()
            for number in range(1, 50):
                yield line(number)

        async with server.connect() as http, server.connect() as stranger:
            headers = {"content-type": "application/x-ndjson"}
            stream = asyncio.create_task(http.post("/v1/items", content=lines(), headers=headers))
            scores = [asyncio.create_task(http.post("/v1/score", json=slow)) for _ in range(6)]
            await begun.wait()
            in_flight = 0.0
            # The stream, this question, and two that are computed.
            while in_flight < 4 and not all(each.done() for each in scores):
                metrics = (await http.get("/metrics")).text
                (number,) = re.findall(r"^heed_http_in_flight (.*)$", metrics, re.MULTILINE)
                in_flight = float(number)
            server.terminate()
            while await welcome(stranger):
                pass
            go_on.set()
            assert (await stream).json() == {"stored": 50, "failed": 0, "errors": []}
            for answered in await asyncio.gather(*scores):
                assert answered.status_code == 200
                assert len(answered.json()["items"]) == 6 * len(NAMES)

    asyncio.run(run())
    assert server.wait() == 0
    with Server(server.data) as again, again.client() as http:
        assert {user: answer(http, user) for user in before} == before
        asked = {"query": "king", "user_id": "u9", "at": AT}
        assert http.post("/v1/search", json=asked).json() == found
        assert http.get("/v1/items/late-49").json()["hidden"] is True
