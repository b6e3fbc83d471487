"""Swaps of model versions under load: no request fails, and no answer mixes versions."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.server import Server
from tests.support.tiny import AT, GENRES, World, item_id

SWAPS = 20
CLIENTS = 4

TARGETS = [item_id(genre, number) for genre in range(len(GENRES)) for number in (1, 6, 11)]
# What any two models answer differently, of users whom no other test touches.
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/score", {"user_id": f"u{user}", "item_ids": TARGETS, "explain": 12, "at": AT})
        for user in (20, 21, 22)
    ),
    ("/v1/score", {"item_ids": TARGETS}),
    ("/v1/recommend", {"user_id": "u23", "limit": 20, "at": AT}),
    ("/v1/recommend", {"history": [{"item_id": TARGETS[0], "timestamp": AT}], "at": AT}),
    ("/v1/attend", {"memory": {"user_id": "u24"}, "query": {"item_id": TARGETS[4]}, "at": AT}),
]


def numbers(answer: dict[str, Any]) -> dict[str, float]:
    """All that an answer says in numbers, by name."""
    if "context" in answer:
        return {str(at): value for at, value in enumerate(answer["context"])}
    found: dict[str, float] = {}
    for item in answer["items"]:
        name = item["item_id"]
        found |= {f"{name} {part}": value for part, value in item["parts"].items()}
        found[name] = item["score"]
        for reason in item.get("explanation", []):
            found[f"{name} {reason['event_id']}"] = reason["contribution"]
    return found


def activate(http: httpx.Client, version: str) -> None:
    """Serve this version from now on."""
    answer = http.post(f"/v1/models/{version}/activate", json={})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model_version"] == version


def test_no_answer_mixes_two_models(trained: Server, world: World) -> None:
    """During swaps under load, each answer equals that of the version it names, to 1e-4."""
    versions = (world.first, world.second)
    expected: dict[tuple[str, int], dict[str, float]] = {}
    with trained.client() as http:
        for version in versions:
            activate(http, version)
            for number, (path, body) in enumerate(QUESTIONS):
                answer = http.post(path, json=body).json()
                assert answer["model_version"] == version
                expected[version, number] = numbers(answer)
    for number in range(len(QUESTIONS)):
        one, other = (expected[version, number] for version in versions)
        shared = one.keys() & other.keys()
        assert shared
        assert max(abs(one[name] - other[name]) for name in shared) > 1e-2

    seen: dict[str, int] = dict.fromkeys(versions, 0)
    swapping = True

    async def client(http: httpx.AsyncClient, seed: int) -> None:
        random = np.random.default_rng(seed)
        while swapping:
            number = int(random.integers(len(QUESTIONS)))
            path, body = QUESTIONS[number]
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            version = answer.json()["model_version"]
            assert numbers(answer.json()) == pytest.approx(expected[version, number], abs=1e-4)
            seen[version] += 1

    async def swap(http: httpx.AsyncClient) -> None:
        nonlocal swapping
        try:
            for turn in range(SWAPS):
                version = versions[turn % 2]
                before = seen[version]
                answer = await http.post(f"/v1/models/{version}/activate", json={})
                assert answer.status_code == 200, answer.text
                enough = before + CLIENTS
                while seen[version] < enough:  # noqa: ASYNC110  # what counts it is busy asking
                    await asyncio.sleep(0.01)
        finally:
            swapping = False

    async def run() -> None:
        async with trained.connect() as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(swap(http))
            for seed in range(CLIENTS):
                tasks.create_task(client(http, seed))

    try:
        asyncio.run(run())
    finally:
        with trained.client() as http:
            activate(http, world.first)
    assert min(seen.values()) >= SWAPS // 2 * CLIENTS


def test_reactivated_version_gives_the_same_answers(trained: Server, world: World) -> None:
    """Reactivating a version restores its answers, and the list names the current version."""
    path, body = QUESTIONS[0]
    with trained.client() as http:
        before = http.post(path, json=body).json()
        activate(http, world.second)
        assert http.post(path, json=body).json()["model_version"] == world.second
        listed = {
            model["version"]: model["current"] for model in http.get("/v1/models").json()["models"]
        }
        assert listed == {world.first: False, world.second: True}
        activate(http, world.first)
        assert http.post(path, json=body).json() == before


def test_an_unknown_version_changes_nothing(trained: Server, world: World) -> None:
    """Activating an unknown version is 404, an invalid name 422; the model stays the same."""
    with trained.client() as http:
        assert http.post("/v1/models/nothing/activate", json={}).status_code == 404
        assert http.post("/v1/models/..%2F..%2Fetc/activate", json={}).status_code == 422
        ready = http.get("/health/ready").json()
        assert ready["checks"]["model"] == world.first
