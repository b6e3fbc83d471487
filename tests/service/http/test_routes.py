"""Each route through the real app: requests reach the engine, and results the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.domain.errors import (
    Conflict,
    Corrupt,
    HeedError,
    ModelRejected,
    StoreFull,
    StoreUnreachable,
    Unavailable,
)
from service.domain.records import Scenario, User
from tests.support.http_fake import Client, serving

ITEM = {
    "item_id": "a",
    "title": "A",
    "description": "first",
    "tags": ["x"],
    "categories": ["talk", "short"],
    "attributes": {"year": 2026, "nested": {"deep": [1, 2.5, None, True, "é"]}},
    "embedding": [1.0, 2.0, 3.0, 4.5],
    "hidden": True,
    "published_at": "2026-01-31T09:30:00.123456Z",
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(max_targets=3) as client:
        yield client


@pytest.fixture(autouse=True)
def fresh(client: Client) -> None:
    client.engine.__init__()  # type: ignore[misc]


def test_item_round_trip(client: Client) -> None:
    """An item read back equals the stored item and can be stored again."""
    assert client.post("/v1/items", json={"items": [ITEM]}).json() == {"stored": 1}
    answer = client.get("/v1/items/a")
    assert answer.status_code == 200
    assert answer.json() == ITEM
    assert client.post("/v1/items", json={"items": [answer.json()]}).status_code == 200
    assert client.engine.items["a"].published_at == 1_769_851_800_123_456


def test_an_item_is_patched(client: Client) -> None:
    """A merge patch changes what it names, null restores defaults, and 404 is for unknown items."""
    client.post("/v1/items", json={"items": [ITEM]})
    patch = {"attributes": {"year": None, "nested": {"deep": [1]}, "stock": 7}, "tags": None}
    answer = client.patch(
        "/v1/items/a",
        content=orjson.dumps(patch),
        headers={"content-type": "application/merge-patch+json"},
    )
    attributes = {"nested": {"deep": [1]}, "stock": 7}
    assert (answer.status_code, answer.json()) == (
        200,
        ITEM | {"attributes": attributes, "tags": []},
    )
    assert client.patch("/v1/items/a", json={}).json() == answer.json()
    assert client.patch("/v1/items/b", json={}).status_code == 404
    assert client.engine.items.keys() == {"a"}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"title": 7}, "/title"),
        ({"item_id": "b"}, "/item_id"),
        ({"embedding": [1]}, "/embedding"),
        ({"attributes": {"a": 2**63}}, "/attributes/a"),
    ],
)
def test_a_wrong_patch_names_its_field(client: Client, body: Any, pointer: str) -> None:
    """A field of a wrong type, and the id, which the path has, are refused; nothing changes."""
    client.post("/v1/items", json={"items": [ITEM]})
    answer = client.patch("/v1/items/a", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == pointer
    assert client.get("/v1/items/a").json() == ITEM


def test_items_are_updated_in_bulk(client: Client) -> None:
    """With `update` items keep the fields that the request leaves out; new ones are named."""
    client.post("/v1/items", json={"items": [ITEM]})
    items = [{"item_id": "a", "attributes": {"stock": 7}}, {"item_id": "b", "title": "B"}]
    answer = client.post("/v1/items", json={"items": items, "update": True})
    assert answer.json() == {"stored": 2, "created": ["b"]}
    again = client.post("/v1/items", json={"items": items, "update": True})
    assert again.json() == {"stored": 2, "created": []}
    changed: Any = ITEM["attributes"]
    assert client.get("/v1/items/a").json() == ITEM | {"attributes": changed | {"stock": 7}}
    assert client.get("/v1/items/b").json()["title"] == "B"


def test_empty_lists_are_no_error(client: Client) -> None:
    """Empty lists of items, events and targets are accepted."""
    assert client.post("/v1/items", json={"items": []}).json() == {"stored": 0}
    assert client.post("/v1/events", json={"events": []}).json() == {"stored": 0, "duplicates": 0}
    assert client.post("/v1/score", json={"item_ids": []}).json()["items"] == []


def test_events_go_in_and_come_out_newest_first(client: Client) -> None:
    """Events keep every field, duplicates are counted, and the history is newest first."""
    first = {
        "event_id": "e1",
        "user_id": "u",
        "item_id": "a",
        "type": "watch",
        "weight": 2.5,
        "timestamp": "2026-01-31T10:30:00+01:00",
        "key": [1, 2, 3, 4],
        "value": [0.5, 0, 0, 0],
    }
    second = {"user_id": "u", "item_id": "b"}
    client.post("/v1/items", json={"items": [{"item_id": "a"}, {"item_id": "b"}]})
    answer = client.post("/v1/events", json={"events": [first, first, second]})
    assert answer.json() == {"stored": 2, "duplicates": 1}
    events = client.get("/v1/users/u/history").json()["events"]
    assert [event["item_id"] for event in events] == ["b", "a"]
    assert (events[0]["type"], events[0]["weight"]) == ("view", 1.0)
    assert events[1] == first | {"timestamp": "2026-01-31T09:30:00Z"}
    assert client.delete("/v1/users/u/history/e1").status_code == 204
    assert client.delete("/v1/users/u/history/e1").status_code == 404
    assert len(client.get("/v1/users/u/history").json()["events"]) == 1


def test_users_are_listed_by_prefix_with_counts(client: Client) -> None:
    """Users are found by the beginning of their id, and counted if that is asked for."""
    names = ["ann", "anna", "anna", "bob", "Ann"]
    events = [{"user_id": name, "item_id": "a"} for name in names]
    client.post("/v1/events", json={"events": events})
    client.engine.users = {name: User(name) for name in names}
    found = client.get("/v1/users", params={"prefix": "ann", "counts": True}).json()["users"]
    assert [(user["user_id"], user["events"]) for user in found] == [("ann", 1), ("anna", 2)]
    assert "events" not in client.get("/v1/users").json()["users"][0]
    refused = client.get("/v1/users", params={"prefix": "a\x00"})
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/prefix")


def test_profiles_merge_and_forgetting(client: Client) -> None:
    """Profiles are stored and read, histories merged, and users deleted; self-merge is 422."""
    profile = {"attributes": {"country": "NL"}, "interests": ["talk", "a"]}
    assert client.put("/v1/users/u", json=profile).json() == {"user_id": "u", **profile}
    assert client.get("/v1/users/u").json() == {"user_id": "u", **profile}
    client.post("/v1/events", json={"events": [{"user_id": "anonymous", "item_id": "a"}]})
    assert client.post("/v1/users/u/merge", json={"from": "anonymous"}).json() == {"moved": 1}
    assert client.delete("/v1/users/u").json() == {"forgotten": 1}
    assert client.get("/v1/users/u").status_code == 404
    itself = client.post("/v1/users/u/merge", json={"from": "u"})
    assert (itself.status_code, itself.json()["errors"][0]["pointer"]) == (422, "/from")


@pytest.mark.parametrize(
    "condition", [{"visible": {"types": ["like"]}}, {"at": "1970-01-01T00:00:03Z"}]
)
def test_a_search_of_nobody_has_no_conditions_on_events(
    client: Client, condition: dict[str, Any]
) -> None:
    """A search refuses `visible` and `at`, unless it has a user or a history."""
    answer = client.post("/v1/search", json={"query": "a"} | condition)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == f"/{next(iter(condition))}"
    assert "needs a `user_id` or a `history`" in error["detail"]
    askers: list[dict[str, Any]] = [{"user_id": "u"}, {"history": []}]
    for who in askers:
        assert client.post("/v1/search", json={"query": "a"} | condition | who).status_code == 200


def test_the_number_of_items_with_effects_is_limited(client: Client) -> None:
    """Effects of 100 items may be estimated; without `explain` nothing is, of however many."""
    how = {"explain": 50, "explain_effects": True}
    assert client.post("/v1/recommend", json=how | {"limit": 100}).status_code == 200
    assert client.post("/v1/recommend", json=how | {"limit": 1000, "explain": 0}).status_code == 200
    detail = client.post("/v1/recommend", json=how | {"limit": 1000}).json()["detail"]
    assert "1000 items; 100 are allowed" in detail


def test_training_and_models(client: Client) -> None:
    """Training starts one job at a time, and versions are listed and activated."""
    started = client.post("/v1/models/train", json={})
    assert (started.status_code, started.headers["location"]) == (202, "/v1/jobs/job-1")
    again = client.post("/v1/models/train", json={"options": {"epochs": 2, "fast": True}})
    assert again.status_code == 409
    assert client.get("/v1/jobs/job-1").json()["progress"]["step"] == 1
    assert client.get("/v1/jobs/job-2").status_code == 404
    cancelled = client.post("/v1/jobs/job-1/cancel", json={})
    assert (cancelled.status_code, cancelled.json()["job_id"]) == (202, "job-1")
    assert client.post("/v1/jobs/job-2/cancel", json={}).status_code == 404
    assert client.get("/v1/models").json()["models"][0]["version"] == "v1"
    assert client.post("/v1/models/v1/activate", json={}).json()["model_version"] == "v1"
    assert client.post("/v1/models/v2/activate", json={}).status_code == 404


@pytest.mark.parametrize("version", ["..%2F..%2Fetc", "V1", "a.b", "-a", "a" * 65, "v1%0A", "é"])
def test_names_that_could_be_paths_never_reach_the_engine(client: Client, version: str) -> None:
    """An invalid version or job name is 422 and does not reach the engine."""
    client.engine.raises = AssertionError("the engine was asked")
    assert client.post(f"/v1/models/{version}/activate", json={}).status_code == 422
    assert client.get(f"/v1/jobs/{version}").status_code == 422
    assert client.post(f"/v1/jobs/{version}/cancel", json={}).status_code == 422


@pytest.mark.parametrize(
    ("error", "status", "title", "retry"),
    [
        (Conflict("e-1 has another body"), 409, "Conflict", None),
        (ModelRejected("NaN weights"), 409, "Model Rejected", None),
        (Unavailable("the store is away", 2.4), 503, "Unavailable", "3"),
        (StoreFull("no room"), 507, "Store Full", "1"),
        (Corrupt("items.db fails its checksum"), 500, "Corrupt", None),
    ],
)
def test_domain_errors_become_problems(
    client: Client, error: HeedError, status: int, title: str, retry: str | None
) -> None:
    """Each domain error becomes a problem with its status, title, sentence and Retry-After."""
    client.engine.raises = error
    answer = client.post("/v1/events", json={"events": []})
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, body["status"], body["title"]) == (status, status, title)
    assert body["type"] == f"urn:heed:problem:{title.lower().replace(' ', '-')}"
    assert body["detail"].startswith(error.told)
    assert (error.detail in body["detail"]) == (status == 409)
    assert body["request_id"] == answer.headers["x-request-id"]
    assert answer.headers.get("retry-after") == retry


ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
    lambda text: len(text.encode()) <= 256 and text not in {".", ".."}  # clients resolve dots
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(user=ids, item=ids, event=ids)
def test_ids_round_trip_byte_for_byte(client: Client, user: str, item: str, event: str) -> None:
    """Any id comes back exactly, from bodies and from paths, whatever it holds."""
    client.engine.__init__()  # type: ignore[misc]
    client.post("/v1/items", json={"items": [{"item_id": item}]})
    in_path = {k: quote(v, safe="") for k, v in {"u": user, "i": item, "e": event}.items()}
    assert client.get(f"/v1/items/{in_path['i']}").json()["item_id"] == item
    assert client.get(f"/v1/items/{in_path['i']}/similar").status_code == 200
    assert client.engine.about[-1] == item
    client.post(
        "/v1/events", json={"events": [{"user_id": user, "item_id": item, "event_id": event}]}
    )
    (stored,) = client.get(f"/v1/users/{in_path['u']}/history").json()["events"]
    assert (stored["user_id"], stored["item_id"], stored["event_id"]) == (user, item, event)
    path = f"/v1/users/{in_path['u']}/history/{in_path['e']}"
    assert client.delete(path).status_code == 204


@pytest.mark.parametrize(
    ("path", "item_id"),
    [
        ("a%2Fb", "a/b"),
        ("a%2fsimilar", "a/similar"),
        ("%2F", "/"),
        ("100%25", "100%"),
        ("%252F", "%2F"),
        ("a%3Fb%23c", "a?b#c"),
        ("a+b%20c", "a+b c"),
        ("%C3%A9", "é"),
        ("a%0A", "a\n"),
        ("%7B%7D", "{}"),
    ],
)
def test_percent_encoding_in_paths(client: Client, path: str, item_id: str) -> None:
    """Percent-encoded ids in paths are decoded once, slashes included."""
    client.post("/v1/items", json={"items": [{"item_id": item_id}]})
    answer = client.get(f"/v1/items/{path}")
    assert (answer.status_code, answer.json().get("item_id")) == (200, item_id)
    assert client.get(f"/%761/items/{path}").status_code == 200  # v may be encoded too


@pytest.mark.parametrize("path", ["a%00b", "%FF", "%ED%A0%80", quote("é" * 129), "a" * 257])
def test_what_is_no_id_is_refused_in_paths(client: Client, path: str) -> None:
    """An invalid id in a path is 422 and names the parameter."""
    answer = client.get(f"/v1/items/{path}")
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["in"], error["pointer"]) == ("path", "/item_id")


def test_an_unknown_fallback_is_done_without_while_the_store_is_away(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scenario with items of its own is answered, degraded; one without any is refused."""
    body = {"question": "recommend", "limit": 3, "fallback": "backup"}
    client.engine.saved["home"] = [Scenario("home", 1, 0, body)]
    about = {"question": "similar", "item_id": "none", "limit": 3, "fallback": "backup"}
    client.engine.saved["like"] = [Scenario("like", 1, 0, about)]
    read = client.engine.scenario

    async def scenario(name: str) -> Scenario | None:
        if name == "backup":
            raise StoreUnreachable("away")
        return await read(name)

    monkeypatch.setattr(client.engine, "scenario", scenario)
    client.post("/v1/items", json={"items": [ITEM]})
    answer = client.post("/v1/scenarios/home", json={"user_id": "u"})
    assert answer.status_code == 200
    assert answer.json()["degraded"]
    assert [item["item_id"] for item in answer.json()["items"]] == ["a"]
    assert client.post("/v1/scenarios/like", json={}).status_code == 503


def test_fallbacks_that_are_remembered_in_a_circle_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of different times may fall back to each other while the store is away."""
    for name, other in (("a", "b"), ("b", "a")):
        body = {"question": "recommend", "limit": 3, "fallback": other}
        client.engine.saved[name] = [Scenario(name, 1, 0, body)]
        client.engine.items = {}
        client.post(f"/v1/scenarios/{name}", json={"user_id": "u"})

    async def away(name: str) -> Scenario | None:
        raise StoreUnreachable("away")

    monkeypatch.setattr(client.engine, "scenario", away)
    answer = client.post("/v1/scenarios/a", json={"user_id": "u"})
    assert (answer.status_code, answer.json()["degraded"]) == (200, True)
