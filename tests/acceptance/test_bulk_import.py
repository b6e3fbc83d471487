"""Requests during the import of a large catalogue, and the first search after an import."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import numpy as np
import orjson
import pytest

from tests.support.server import Server
from tests.support.tiny import WORDS, World, item_id

ITEMS = 20_000
MAX_EXACT_ROWS = 30_000  # so that FAISS has an index of them
BATCH = 500  # items of one request
LEAST = 200  # questions asked meanwhile
SPIN = "while True: pass"


class Asked(NamedTuple):
    """One question and its answer."""

    status: int
    found: bool = True  # the item that it searched for


class Import(NamedTuple):
    """The questions during an import, and how each of its requests was answered."""

    during: list[Asked]
    searches: list[Asked]  # each for the last item that was acknowledged
    posts: list[int]


def _item(number: int) -> dict[str, object]:
    words = " ".join(WORDS.values()).split()
    random = np.random.default_rng(number)
    return {
        "item_id": f"new-{number}",
        "title": f"unheard{number} {random.choice(words)}",
        "description": " ".join(random.choice(words, 8)),
    }


def _ask(http: httpx.Client, number: int) -> Asked:
    """A score, a recommendation or a search in turn."""
    user = f"u{number % 40}"
    path, body = (
        ("score", {"user_id": user, "item_ids": [item_id(0, number), item_id(3, number)]}),
        ("recommend", {"user_id": user, "limit": 10}),
        ("search", {"user_id": user, "query": "rocket orbit", "limit": 10}),
    )[number % 3]
    return Asked(http.post(f"/v1/{path}", json=body).status_code)


def _search(http: httpx.Client, number: int) -> Asked:
    """A search for one new item by a word that no other item has."""
    answer = http.post("/v1/search", json={"query": f"unheard{number}", "limit": 3})
    ids = [item["item_id"] for item in answer.json().get("items", [])]
    return Asked(answer.status_code, f"new-{number}" in ids)


def _import(server: Server) -> Import:
    bodies = [
        orjson.dumps({"items": [_item(number) for number in range(at, at + BATCH)]})
        for at in range(0, ITEMS, BATCH)
    ]
    posts: list[int] = []

    def post() -> None:
        with server.client() as http:
            json = {"content-type": "application/json"}
            for body in bodies:
                answer = http.post("/v1/items", content=body, headers=json)
                posts.append(answer.status_code)

    during, searches = list[Asked](), list[Asked]()
    poster = threading.Thread(target=post)
    with server.client() as http:
        for number in range(30):
            _ask(http, number)
        poster.start()
        while poster.is_alive() or len(during) < LEAST:
            during.append(_ask(http, len(during)))
            if posts and len(during) % 5 == 0:
                searches.append(_search(http, len(posts) * BATCH - 1))
        poster.join()
    return Import(during, searches, posts)


@pytest.fixture(scope="module")
def imported(world: World, tmp_path_factory: pytest.TempPathFactory) -> Import:
    """An import into the small world, trained, with the default deadline of a second."""
    data = world.copy(tmp_path_factory.mktemp("import") / "data")
    with Server(data, deadline=1, max_exact_rows=MAX_EXACT_ROWS) as server:
        return _import(server)


def test_no_question_fails_during_an_import(imported: Import) -> None:
    """Every request sent during an import, and every request of the import, returns 200."""
    assert len(imported.during) >= LEAST
    assert {asked.status for asked in (*imported.during, *imported.searches)} == {200}
    assert set(imported.posts) == {200}


def test_acknowledged_items_are_found_during_an_import(imported: Import) -> None:
    """A search for the last acknowledged item of a running import finds it."""
    assert imported.searches
    assert all(asked.found for asked in imported.searches)


@contextmanager
def _busy_cores(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def test_the_first_search_after_an_import_is_answered(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The first search after a stream of 5,000 items meets the deadline on a busy machine."""
    data = world.copy(tmp_path_factory.mktemp("first") / "data", trained=False)
    lines = b"\n".join(orjson.dumps(_item(number)) for number in range(5_000))
    with Server(data, deadline=1) as server, server.client() as http, _busy_cores(2):
        kind = {"content-type": "application/x-ndjson"}
        stored = http.post("/v1/items", content=lines, headers=kind)
        assert stored.json()["stored"] == 5_000
        first = _search(http, 4_999)
    assert first.status == 200
    assert first.found
