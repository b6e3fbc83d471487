"""Search of one's own history over HTTP: what is answered, and saved in a scenario."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.questions.answers import FoundEventOut, FoundEventsOut
from tests.support.tiny import AT, item_id

MINE = [
    {"item_id": item_id(0, 1), "type": "watch", "timestamp": "2025-12-20T08:00:00Z"},
    {"item_id": item_id(0, 1), "type": "like", "timestamp": "2025-12-21T08:00:00Z"},
    {"item_id": item_id(1, 4), "type": "watch", "timestamp": "2025-12-22T08:00:00Z"},
    {"item_id": item_id(0, 6), "type": "watch", "timestamp": "2026-01-02T08:00:00Z"},  # after AT
]


@pytest.fixture
def asked(http: httpx.Client) -> dict[str, Any]:
    """A question about the history of a user of this test's own."""
    events = [{"user_id": "seeker", "event_id": f"s{n}", **each} for n, each in enumerate(MINE)]
    assert http.post("/v1/events", json={"events": events}).status_code == 200
    title = http.get(f"/v1/items/{item_id(0, 1)}").json()["title"]
    query = {"query": title.upper(), "fill": True}
    return {"memory": "history", "user_id": "seeker", "at": AT, **query}


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_events_are_answered_with_what_matched(http: httpx.Client, asked: dict[str, Any]) -> None:
    """Each event has its time, type, texts and parts, and the answer has the documented fields."""
    response = http.post("/v1/search", json=asked | {"highlight": True, "fields": ["categories"]})
    answer = response.json()
    assert answer.keys() <= FoundEventsOut.__annotations__.keys()
    first, second, last = answer["events"]
    assert [event["event_id"] for event in answer["events"]] == ["s1", "s0", "s2"]
    assert {name: first[name] for name in MINE[1]} == MINE[1]
    assert set(first["fields"]["categories"]) == {"space", "odd"}
    words = {part["text"] for part in first["highlights"]["title"] if part["match"]}
    assert words == set(first["title"].split())
    for event in (first, second, last):
        assert event.keys() == FoundEventOut.__annotations__.keys()
        assert sum(event["parts"].values()) == event["score"]
    assert first["parts"]["match"] == second["parts"]["match"] > last["parts"]["match"] + 1
    assert 0.5 > first["parts"]["recency"] > second["parts"]["recency"] > 0
    assert sum(event["weight"] for event in answer["events"]) == pytest.approx(1)
    assert {"store", "attend", "explain", "highlight"} <= {
        part.split(";")[0].strip() for part in response.headers["server-timing"].split(",")
    }
    assert len(post(http, "/v1/search", **asked, limit=1)["events"]) == 1
    catalogue = post(http, "/v1/search", **asked | {"memory": "catalogue"})
    assert catalogue == post(http, "/v1/search", **{k: asked[k] for k in asked if k != "memory"})
    assert "items" in catalogue


def test_a_typing_mistake_is_corrected(http: httpx.Client, asked: dict[str, Any]) -> None:
    """A misspelt word finds the events of the word that is meant, and the answer says so."""
    word = max(asked["query"].lower().split(), key=len)
    mistyped = word[:2] + word[3] + word[2] + word[4:]
    answer = post(http, "/v1/search", **asked | {"query": mistyped})
    assert answer["events"][0]["event_id"] == "s1"
    assert word in answer["corrections"][mistyped]


def test_a_scenario_fixes_which_memory_is_searched(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    """Neither memory stands for the other, and events fill up no list."""
    saved = {"memory": "history", "limit": 20}
    given = {name: asked[name] for name in asked.keys() - saved.keys()}
    http.put("/v1/scenarios/my-past", json={"question": "search", **saved})
    http.put("/v1/scenarios/all-of-it", json={"question": "search", "limit": 20})
    for name, memory in (("my-past", "catalogue"), ("all-of-it", "history")):
        refused = http.post(f"/v1/scenarios/{name}", json=given | {"memory": memory})
        assert [error["pointer"] for error in refused.json()["errors"]] == ["/memory"]
    wrong: list[dict[str, Any]] = [
        {"question": "search", "fallback": "my-past"},
        {"question": "search", "memory": "history", "fallback": "all-of-it"},
    ]
    for body in wrong:
        refused = http.put("/v1/scenarios/wrong", json=body)
        assert [error["pointer"] for error in refused.json()["errors"]] == ["/fallback"]
