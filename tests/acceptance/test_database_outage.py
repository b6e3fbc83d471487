"""A service whose PostgreSQL server stalls, refuses, loses its connections and comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.delaying_proxy import DelayingProxy
from tests.support.postgres_server import PostgresDatabases
from tests.support.server import PATIENCE, Server

DEADLINE = 5.0  # seconds, of requests
SCRAPE = 10.0  # seconds that Prometheus waits by default
KNOWN = {"user_id": "known", "limit": 3}
FIELDS = {"fields": ["description"]}
# Questions, first those that read the event log in RAM, each with what it reads of the store.
QUESTIONS: dict[str, tuple[str, str, Any]] = {
    "popular": ("POST", "/v1/popular", KNOWN | FIELDS),
    "together": ("POST", "/v1/items/i1/together", {"limit": 3} | FIELDS),
    "rows": ("POST", "/v1/rows", KNOWN | FIELDS),
    "nobody's audience": ("GET", "/v1/items/i1/audience?limit=3&explain=2", None),
    "affinities": ("GET", "/v1/users/known/affinities?field=categories", None),
    "scenario": ("POST", "/v1/scenarios/home", {"user_id": "known"}),
    "score": ("POST", "/v1/score", {"user_id": "known", "item_ids": ["i1"], "explain": 2} | FIELDS),
    "recommend": ("POST", "/v1/recommend", KNOWN | FIELDS | {"explain": 2}),
    "search": ("POST", "/v1/search", KNOWN | FIELDS | {"query": "title"}),
    "highlights": ("POST", "/v1/search", {"query": "title", "highlight": True}),
    "list": ("POST", "/v1/search", {"limit": 3} | FIELDS),
    "attend": ("POST", "/v1/attend", {"query": {"item_id": "i1"}, "memory": {"user_id": "known"}}),
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
        filler = {"question": "popular", "limit": 3}
        http.put("/v1/scenarios/backup", json=filler).raise_for_status()
        saved = {"question": "recommend", "limit": 30, "fallback": "backup"}
        http.put("/v1/scenarios/home", json=saved).raise_for_status()
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


def breaks(proxy: DelayingProxy, fault: str) -> None:
    """Let the database hang, or be gone."""
    if fault == "stall":
        proxy.stall()
    else:
        proxy.refuse()
        proxy.cut()


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
    breaks(proxy, fault)
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


@pytest.mark.parametrize("fault", ["stall", "refuse and cut"])
def test_every_question_is_answered_without_the_database(site: Site, fault: str) -> None:
    """Answers lack what only the database has, and have the items that they had before."""
    http, proxy = site

    def answers() -> dict[str, Any]:
        found = {}
        for name, (method, path, body) in QUESTIONS.items():
            answer = http.request(method, path, **({} if body is None else {"json": body}))
            assert answer.status_code == 200, (name, answer.text)
            found[name] = answer.json()
        return found

    until(lambda: not any(answer["degraded"] for answer in answers().values()))
    before = answers()
    assert before["rows"]["rows"][0]["items"][0]["fields"] == {"description": ""}
    assert before["highlights"]["items"][0]["highlights"]["title"]
    assert all(before["attend"]["ids"])
    breaks(proxy, fault)
    try:
        without = answers()
    finally:
        proxy.flow()
    assert [name for name, answer in without.items() if not answer["degraded"]] == []
    assert "fields" not in without["rows"]["rows"][0]["items"][0]
    assert "highlights" not in without["highlights"]["items"][0]
    assert not any(without["attend"]["ids"])
    for name in ("popular", "together", "scenario", "recommend", "search", "highlights", "list"):
        ids = [[item["item_id"] for item in answer[name]["items"]] for answer in (before, without)]
        assert ids[0] == ids[1] != []
    assert without["scenario"]["scenario_version"] == before["scenario"]["scenario_version"]
    until(lambda: not any(answer["degraded"] for answer in answers().values()))


@pytest.mark.parametrize("fault", ["stall", "refuse and cut"])
def test_metrics_are_read_without_the_database(site: Site, fault: str) -> None:
    """Metrics lack what the database has, so that its outage can be watched."""
    http, proxy = site
    until(lambda: http.get("/health/ready").status_code == 200)
    assert "heed_events{" in http.get("/metrics").text
    breaks(proxy, fault)
    try:
        without = http.get("/metrics", timeout=SCRAPE)
    finally:
        proxy.flow()
    assert without.status_code == 200
    assert "heed_events{" not in without.text
    assert 'heed_ready{namespace="default"} 0' in without.text
    assert "heed_logged_events{" in without.text


def test_an_audience_needs_the_database_for_its_names(site: Site) -> None:
    """The users of an audience are refused by name, with a time to come back, and not left out."""
    http, proxy = site
    path = "/v1/items/i1/audience?exclude_seen=false&limit=3"
    until(lambda: http.get("/health/ready").status_code == 200)
    before = http.get(path).raise_for_status().json()
    assert [user["user_id"] for user in before["users"]] == ["known"]
    breaks(proxy, "refuse and cut")
    try:
        refused = http.get(path)
    finally:
        proxy.flow()
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
    until(lambda: http.get("/health/ready").status_code == 200)
    assert http.get(path).json()["users"] == before["users"]


@pytest.mark.parametrize("fault", ["stall", "refuse and cut"])
def test_an_outage_is_a_line_of_the_log_and_tells_strangers_nothing(
    postgres: PostgresDatabases, tmp_path: Path, fault: str
) -> None:
    """Work in the background says once that it waits, and once that it goes on."""
    url = postgres.create_database()
    port = int(url.rpartition(":")[2].partition("/")[0])
    with (
        DelayingProxy(port) as proxy,
        Server(tmp_path / "data", store=proxy.through(url), keys="required") as server,
        server.client() as http,
    ):
        before = len(server.log().splitlines())
        proxy_port = str(urlsplit(proxy.through(url)).port)
        breaks(proxy, fault)
        until(lambda: "it is tried" in server.log())
        time.sleep(4)  # ten tries a second would fill the log
        stranger = {"authorization": "Bearer heed_0123456789ab_" + "A" * 43}
        refused = http.get("/v1/items", headers=stranger)
        proxy.flow()
        until(lambda: "again, after" in server.log())
        lines = [json.loads(line) for line in server.log().splitlines()[before:]]
    assert refused.status_code == 503
    parts = urlsplit(url)
    named = (parts.hostname, parts.username, parts.path[1:], proxy_port, "connection")
    said = refused.text.replace(refused.json()["request_id"], "")  # it may have any digits
    assert not [word for word in named if str(word) in said]
    assert refused.json()["request_id"] in str(lines)
    background = [line for line in lines if "request_id" not in line]
    assert not [line for line in background if "exception" in line]
    failures = [line["event"] for line in background if line["level"] in ("warning", "error")]
    assert 1 <= len(failures) <= 4, failures
    assert all("\n" not in event for event in failures)
