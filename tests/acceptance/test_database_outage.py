"""A service whose PostgreSQL server stalls, refuses, loses its connections and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.delaying_proxy import DelayingProxy
from tests.support.postgres_server import PostgresDatabases
from tests.support.server import PATIENCE, Server

DEADLINE = 5.0  # seconds, of requests
KNOWN = {"user_id": "known", "limit": 3}
FIELDS = {"fields": ["description"]}
# Questions whose answers read the store for more than the history: event ids, fields, passages.
QUESTIONS: dict[str, tuple[str, str, Any]] = {
    "score": ("POST", "/v1/score", {"user_id": "known", "item_ids": ["i1"], "explain": 2} | FIELDS),
    "recommend": ("POST", "/v1/recommend", KNOWN | FIELDS | {"explain": 2}),
    "search": ("POST", "/v1/search", KNOWN | FIELDS | {"query": "title", "highlight": True}),
    "list": ("POST", "/v1/search", {"limit": 3} | FIELDS),
    "rows": ("POST", "/v1/rows", KNOWN | FIELDS),
    "popular": ("POST", "/v1/popular", KNOWN | FIELDS),
    "together": ("POST", "/v1/items/i1/together", {"limit": 3} | FIELDS),
    "audience": ("GET", "/v1/items/i1/audience?limit=3&explain=2", None),
    "affinities": ("GET", "/v1/users/known/affinities?field=categories", None),
}


class Site(NamedTuple):
    """A service, its client, and the way to its database."""

    http: httpx.Client
    proxy: DelayingProxy


@pytest.fixture(scope="module")
def site(postgres: PostgresDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service over a database that a proxy stands in front of, with one known user."""
    data = tmp_path_factory.mktemp("site") / "data"
    url = postgres.create_database()
    port = int(url.rpartition(":")[2].partition("/")[0])
    with (
        DelayingProxy(port) as proxy,
        Server(data, store=proxy.through(url), deadline=DEADLINE) as server,
        server.client() as http,
    ):
        items = [{"item_id": f"i{n}", "title": f"title {n}"} for n in range(20)]
        assert http.post("/v1/items", json={"items": items}).status_code == 200
        append(http, "known", range(10))
        assert not ask(http, "known").json()["degraded"]
        yield Site(http, proxy)


def append(http: httpx.Client, user: str, numbers: Any, prefix: str = "e") -> httpx.Response:
    """Append events with ids of their own."""
    events = [
        {"user_id": user, "item_id": f"i{n % 20}", "event_id": f"{prefix}-{user}-{n}"}
        for n in numbers
    ]
    return http.post("/v1/events", json={"events": events})


def ask(http: httpx.Client, user: str) -> httpx.Response:
    """Score two items for a user."""
    return http.post("/v1/score", json={"user_id": user, "item_ids": ["i1", "i2"], "explain": 3})


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("fault", ["stall", "refuse and cut"])
def test_questions_are_answered_without_the_database(site: Site, fault: str) -> None:
    """Questions answer from what is known and say so, writes are refused, and all comes back."""
    http, proxy = site
    before = ask(http, "known").json()
    if fault == "stall":
        proxy.stall()
    else:
        proxy.refuse()
        proxy.cut()
    answers = [ask(http, "known") for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 10
    for answer in answers:
        body = answer.json()
        assert body["degraded"]
        scores = [item["score"] for item in body["items"]]
        assert scores == pytest.approx([item["score"] for item in before["items"]], abs=1e-4)
    stranger = ask(http, "never seen")
    assert (stranger.status_code, stranger.json()["degraded"]) == (200, True)
    refused = append(http, "known", range(10, 12), prefix=fault)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    assert http.get("/health/ready").status_code == 503
    assert http.get("/health/live").status_code == 200
    proxy.flow()
    until(lambda: http.get("/health/ready").status_code == 200)
    until(lambda: not ask(http, "known").json()["degraded"])
    assert append(http, "known", range(10, 12), prefix=fault).status_code == 200
    user = http.get("/v1/users/known/history", params={"limit": 100}).raise_for_status().json()
    ids = [event["event_id"] for event in user["events"]]
    assert len(ids) == len(set(ids))
    assert {f"{fault}-known-10", f"{fault}-known-11"} <= set(ids)


def test_every_question_is_answered_without_the_database(site: Site) -> None:
    """Answers lack what only the database has, and have the items that they had before."""
    http, proxy = site

    def answers() -> dict[str, Any]:
        found = {}
        for name, (method, path, body) in QUESTIONS.items():
            answer = http.request(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code == 200, (name, answer.text)
            found[name] = answer.json()
        return found

    before = answers()
    assert [name for name, answer in before.items() if answer["degraded"]] == []
    assert before["rows"]["rows"][0]["items"][0]["fields"] == {"description": ""}
    proxy.refuse()
    proxy.cut()
    without = answers()
    proxy.flow()
    assert [name for name, answer in without.items() if not answer["degraded"]] == []
    assert "fields" not in without["rows"]["rows"][0]["items"][0]
    for name in ("recommend", "search", "list", "popular", "together"):
        ids = [[item["item_id"] for item in answer[name]["items"]] for answer in (before, without)]
        assert ids[0] == ids[1] != []
    until(lambda: not any(answer["degraded"] for answer in answers().values()))
