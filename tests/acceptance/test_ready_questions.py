"""Ready questions over HTTP: popular items, items taken together, audiences, affinities, rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.server import Server

KINDS = ("popular", "trending", "newest", "rated")


@pytest.fixture(scope="module", params=[True, False], ids=["trained", "untrained"])
def http(
    request: pytest.FixtureRequest, world: tiny.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a server of this file's own: events of other tests would count, too."""
    data = world.copy(tmp_path_factory.mktemp("ready") / "data", trained=request.param)
    with Server(data) as server, server.client() as client:
        yield client
    assert "Traceback" not in server.log()


def popular(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The items of an answer."""
    answer = http.post("/v1/popular", json=body)
    assert answer.status_code == 200, answer.text
    assert "count" in answer.headers["Server-Timing"]
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


def test_popular_items_are_those_with_most_events(http: httpx.Client) -> None:
    """As of a time, items are ranked by their events until then; ties are in order of ids."""
    counts = Counter(event.item_id for event in tiny.events())
    order = sorted(counts, key=lambda item: (-counts[item], item))
    found = popular(http, at=tiny.AT, limit=1000)
    assert [(item["item_id"], item["events"]) for item in found] == [
        (item, counts[item]) for item in order
    ]
    jazz = {"field": "categories", "eq": "music"}
    some = popular(http, at=tiny.AT, filter=jazz, limit=3, fields=["attributes.number"])
    wanted = [item for item in order if item.startswith("music")][:3]
    assert [item["item_id"] for item in some] == wanted
    assert [item["fields"]["attributes.number"] for item in some] == [
        int(item[-2:]) for item in wanted
    ]


def test_an_acknowledged_event_counts(http: httpx.Client) -> None:
    """An event of a type of its own is counted by the next question, and no more once deleted."""
    event = {"user_id": "counted", "item_id": "space-03", "event_id": "counted", "type": "nod"}
    http.post("/v1/events", json={"events": [event]}).raise_for_status()
    assert [item["item_id"] for item in popular(http, type="nod")] == ["space-03"]
    assert http.delete("/v1/users/counted").json() == {"forgotten": 1}
    assert popular(http, type=["nod"]) == []


@pytest.mark.parametrize("by", KINDS)
def test_a_kind_of_popularity_is_the_reason(http: httpx.Client, by: str) -> None:
    body: dict[str, Any] = {"by": by, "at": tiny.AT, "limit": 4}
    if by == "trending":
        event = {"user_id": "surging", "item_id": "space-05", "type": "surge"}
        surge = [{**event, "timestamp": f"2026-06-01T00:0{n}:00Z"} for n in range(5)]
        http.post("/v1/events", json={"events": surge}).raise_for_status()
        body |= {"type": "surge", "at": "2026-06-01T01:00:00Z"}
    assert {item["reason"] for item in popular(http, **body)} == {by}


def test_items_taken_together_have_support_and_lift(http: httpx.Client) -> None:
    """What follows an item has its numbers, by either method; content fills up."""
    path = f"/v1/items/{tiny.item_id(0, 3)}/together"
    answer = http.get(path, params={"limit": 9})
    assert answer.status_code == 200, answer.text
    found = answer.json()["items"]
    assert len(found) == 9
    assert found[0]["reason"] == "after"
    for item in found:
        assert sum(item["parts"].values()) == pytest.approx(item["score"])
        assert ("support" in item) == ("lift" in item) == (item["reason"] == "after")
    assert http.post(path, json={"limit": 9}).json()["items"] == found
    even = {"filter": {"field": "categories", "eq": "even"}, "fields": ["categories"]}
    some = http.post(path, json=even).json()["items"]
    assert all("even" in item["fields"]["categories"] for item in some)
    assert http.get("/v1/items/nothing/together").status_code == 404
    assert http.get(path, params={"relation": "beside"}).status_code == 422


def test_a_home_page_says_why_each_row_is_there(http: httpx.Client) -> None:
    """Rows come with a sentence and its data."""
    body = {"user_id": "u1", "rows": 3, "limit": 4, "at": tiny.AT, "fields": ["categories"]}
    answer = http.post("/v1/rows", json=body)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["rows"]
    assert len(rows) == 3
    shown = [item["item_id"] for row in rows for item in row["items"]]
    assert len(shown) == len(set(shown))
    reason = rows[0]["reason"]
    title = http.get(f"/v1/items/{reason['item_id']}").json()["title"]
    assert (reason["kind"], reason["text"]) == ("because", f"Because you viewed {title}")
    history = http.get("/v1/users/u1/history").json()["events"]
    named = {event["event_id"]: event["item_id"] for event in history}
    assert {named[event] for event in reason["event_ids"]} == {reason["item_id"]}
    for row in rows:
        assert row["reason"]["text"]
        assert all(item["fields"]["categories"] for item in row["items"])


def test_every_list_names_an_item_without_markup(http: httpx.Client) -> None:
    """A title in HTML is read as its text, but for the item as it is stored."""
    written = {"item_id": "html", "title": "<i>Tom</i> &amp; Co", "description": "A <b>mug</b>."}
    http.post("/v1/items", json={"items": [written]}).raise_for_status()
    event = {"user_id": "html", "item_id": "html", "type": "nod"}
    http.post("/v1/events", json={"events": [event]}).raise_for_status()
    assert [item["title"] for item in popular(http, type="nod")] == ["Tom & Co"]
    one = {"path": "/v1/items/html", "body": {"plain": True}}
    (batched,) = http.post("/v1/batch", json={"requests": [one]}).json()["responses"]
    assert (batched["body"]["title"], batched["body"]["description"]) == ("Tom & Co", "A mug.")
    listed = http.get("/v1/items?plain=true&limit=1000").json()["items"]
    assert next(item for item in listed if item["item_id"] == "html") == batched["body"]
    assert http.get("/v1/items/html").json()["title"] == written["title"]
    assert http.delete("/v1/users/html").json() == {"forgotten": 1}
    http.delete("/v1/items/html").raise_for_status()


def test_events_of_an_item_are_those_of_its_users_histories(http: httpx.Client) -> None:
    """They are the newest ones of all users, of any type, with the number of all."""
    item = tiny.item_id(1, 4)
    told = {"user_id": "late", "item_id": item, "type": "dislike", "timestamp": tiny.AT}
    http.post("/v1/events", json={"events": [told]}).raise_for_status()
    wanted = [
        {name: event[name] for name in ("user_id", "type", "timestamp")}
        for user in http.get("/v1/users?limit=1000").json()["users"]
        for event in http.get(f"/v1/users/{user['user_id']}/history").json()["events"]
        if event["item_id"] == item
    ]
    every = http.get(f"/v1/items/{item}/events?limit=1000").json()
    times = [event["timestamp"] for event in every["events"]]
    assert times == sorted(times, reverse=True)
    assert sorted(every["events"], key=str) == sorted(wanted, key=str)
    newest = http.get(f"/v1/items/{item}/events?limit=2").json()
    assert newest == {"events": every["events"][:2], "total": len(wanted), "degraded": False}
    assert http.delete("/v1/users/late").json() == {"forgotten": 1}
    left = http.get(f"/v1/items/{item}/events?limit=1000").json()
    assert left["events"] == [event for event in every["events"] if event["user_id"] != "late"]
    assert http.get("/v1/items/nothing/events").status_code == 404
    for wrong in ("limit=0", "until=2026"):
        assert http.get(f"/v1/items/{item}/events?{wrong}").status_code == 422


def test_audiences_and_affinities(http: httpx.Client) -> None:
    """Users for an item have reasons, and values of a field masses; wrong parameters are named."""
    item = tiny.item_id(1, 4)
    params: dict[str, str | int] = {"limit": 3, "at": tiny.AT}
    audience = http.get(f"/v1/items/{item}/audience", params=params)
    assert audience.status_code == 200, audience.text
    found = audience.json()
    assert len(found["users"]) == 3
    for user in found["users"]:
        assert sum(user["parts"].values()) == pytest.approx(user["score"], abs=1e-4)
        assert user["explanation"]
    affinities = http.get("/v1/users/u1/affinities", params=params | {"field": "categories"})
    values = affinities.json()["values"]
    assert values[0]["mass"] >= values[-1]["mass"] > 0
    paths = (f"/v1/items/{item}/audience", "/v1/users/u1/affinities")
    for path, wrong in (
        (paths[0], {"limit": 0}),
        (paths[0], {"explain": 51}),
        (paths[1], {"field": "colour"}),
    ):
        refused = http.get(path, params=wrong)
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == f"/{next(iter(wrong))}"
    assert http.get("/v1/items/nothing/audience").status_code == 404
    assert http.get("/v1/users/nobody/affinities").json()["values"] == []
