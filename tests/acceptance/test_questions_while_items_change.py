"""Every question while items are written, changed and deleted, by two workers over each store."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.postgres_server import PostgresDatabases
from tests.support.server import Server

ROUNDS = 15  # rounds of the writer
PASSING = [f"passing-{number}" for number in range(4)]  # items that come and go
# Questions about a user and an item; a deleted item is not found.
QUESTIONS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/v1/items/{item}/audience", None),
    ("GET", "/v1/items/{item}/similar", None),
    ("GET", "/v1/items/{item}/together", None),
    ("GET", "/v1/users/{user}/affinities", None),
    ("POST", "/v1/rows", {"user_id": "{user}"}),
    ("POST", "/v1/recommend", {"user_id": "{user}", "explain": 2}),
    ("POST", "/v1/score", {"user_id": "{user}", "item_ids": ["{item}"]}),
    ("POST", "/v1/search", {"query": "moon passing", "user_id": "{user}"}),
    ("POST", "/v1/search", {"query": "moon", "user_id": "{user}", "memory": "history"}),
    ("POST", "/v1/search", {}),
    ("POST", "/v1/attend", {"query": {"item_id": "{item}"}, "memory": {"user_id": "{user}"}}),
    *(("POST", "/v1/popular", {"by": kind}) for kind in ("popular", "trending", "newest", "rated")),
]


@pytest.fixture(params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest, world: tiny.World, tmp_path: Path) -> Iterator[Server]:
    """Two workers over the small world, or over the same items and events in PostgreSQL."""
    if request.param == "sqlite":
        with Server(world.copy(tmp_path / "data"), workers=2) as server:
            yield server
    else:
        databases: PostgresDatabases = request.getfixturevalue("postgres")
        store = databases.create_database()
        with Server(tmp_path / "data", workers=2, store=store) as server:
            with server.client() as http:
                fill(http)
            yield server
    assert "Traceback" not in server.log()


def fill(http: httpx.Client) -> None:
    """Put the items of the small world and events on them."""
    items = [
        {"item_id": item.item_id, "title": item.title, "categories": [*item.categories]}
        for item in tiny.items()
    ]
    http.post("/v1/items", json={"items": items}).raise_for_status()
    events = [
        {
            "user_id": f"u{user}",
            "item_id": tiny.item_id(user % 4, user + step),
            "timestamp": datetime.fromtimestamp(1.76e9 + 3600 * step, UTC).isoformat(),
        }
        for user in range(40)
        for step in range(8)
    ]
    http.post("/v1/events", json={"events": events}).raise_for_status()


def filled(value: Any, names: dict[str, str]) -> Any:
    """Put a user and an item into a question."""
    if isinstance(value, str):
        return value.format(**names)
    if isinstance(value, list):
        return [filled(each, names) for each in value]
    if isinstance(value, dict):
        return {name: filled(each, names) for name, each in value.items()}
    return value


def ask(http: httpx.Client, drawn: random.Random, found: Counter[tuple[str, int]]) -> None:
    """Ask every question once, about drawn users and items, and count the statuses."""
    for method, path, body in QUESTIONS:
        item = drawn.choice([*PASSING, tiny.item_id(drawn.randrange(4), drawn.randrange(15))])
        names = {"user": f"u{drawn.randrange(40)}", "item": item}
        answer = http.request(method, filled(path, names), json=filled(body, names))
        status = answer.status_code
        found[path, status] += 1
        is_about_passing = item in PASSING and "{item}" in f"{path} {body}"
        right = {200, 404} if is_about_passing else {200}
        assert status in right, (path, names, answer.text)


def change(http: httpx.Client, drawn: random.Random) -> None:
    """Write one item of each kind of write, and an event on an item without any text."""
    passing = drawn.choice(PASSING)
    kept = tiny.item_id(drawn.randrange(4), drawn.randrange(15))
    user = f"u{drawn.randrange(40)}"
    put = {"item_id": passing, "title": f"passing {drawn.random()}", "categories": ["space"]}
    events = [
        {"user_id": user, "item_id": name}
        for name in (passing, kept, f"only-named-{drawn.random()}")
    ]
    price = {"attributes": {"price": drawn.random()}}
    for answer in (
        http.post("/v1/items", json={"items": [put]}),
        http.post("/v1/events", json={"events": events}),
        http.patch(f"/v1/items/{kept}", json=price),
        http.patch(f"/v1/items/{kept}", json={"title": f"moon {drawn.random()}"}),
        http.post("/v1/items", json={"items": [{"item_id": kept, **price}], "update": True}),
        http.delete(f"/v1/items/{drawn.choice(PASSING)}"),
    ):
        assert answer.status_code in {200, 202, 204, 404}, answer.text


def test_every_question_is_answered_while_items_change(server: Server) -> None:
    """Beside writes, and right after each, a question is answered, or its item is not found."""
    found: Counter[tuple[str, int]] = Counter()
    errors: list[Exception] = []
    is_done = threading.Event()

    def go_on(seed: int) -> None:
        drawn = random.Random(seed)
        try:
            while not is_done.is_set():
                with server.client() as http:  # another connection, and so another worker
                    ask(http, drawn, found)
        except Exception as error:  # noqa: BLE001 - raised below, on the thread of the test
            errors.append(error)

    readers = [threading.Thread(target=go_on, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    try:
        drawn = random.Random(9)
        for _ in itertools.repeat(None, ROUNDS):
            with server.client() as http:
                change(http, drawn)
            with server.client() as http:
                ask(http, drawn, found)
    finally:
        is_done.set()
        for reader in readers:
            reader.join()
    assert not errors, errors[0]
    assert {path for path, _ in found} == {path for _, path, _ in QUESTIONS}
