"""Rules, pins, quotas and exploration over HTTP, on the small world."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.steered_order import unit
from tests.support.tiny import AT, item_id

ITEMS = {item.item_id: item for item in tiny.items()}
MUSIC = {"field": "categories", "eq": "music"}
ODD = {"field": "categories", "eq": "odd"}
RULES = [
    {"name": "music week", "when": MUSIC, "boost": 1.5},
    {"name": "fewer odd ones", "when": ODD, "boost": -0.25},
    {"name": "late", "when": {"field": "attributes.number", "gt": 12}, "bury": True},
]
USER = {"user_id": "u1", "at": AT, "exclude_seen": False}


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def test_rules_are_a_part_of_the_score_and_are_named(http: httpx.Client) -> None:
    """The parts add up; the rules of each item are those whose filter it passes."""
    plain = ask(http, "/v1/recommend", **USER, limit=100)
    ruled = ask(http, "/v1/recommend", **USER, limit=100, rules=RULES)
    before = {item["item_id"]: item["score"] for item in plain["items"]}
    assert {*ids(ruled)} == {*before} == {*ITEMS}
    added = unit(before.values())
    for item in ruled["items"]:
        record = ITEMS[item["item_id"]]
        boost = 1.5 * ("music" in record.categories) - 0.25 * ("odd" in record.categories)
        assert item["parts"]["rules"] == pytest.approx(boost * added, rel=1e-4)
        assert item["score"] == pytest.approx(sum(item["parts"].values()), abs=1e-4)
        assert item["score"] == pytest.approx(before[item["item_id"]] + boost * added, abs=1e-4)
        assert boost == sum(rule.get("boost", 0) for rule in item.get("rules", []))
        names = {rule["name"] for rule in item.get("rules", [])}
        expected = {"music week": "music" in record.categories, "fewer odd ones": "odd" in
                    record.categories, "late": record.attributes["number"] > 12}  # fmt: skip
        assert names == {name for name, holds in expected.items() if holds}
        assert (item.get("moved") == "buried") == expected["late"]
    late = [item.get("moved") == "buried" for item in ruled["items"]]
    assert late == sorted(late)
    for moved in (True, False):
        scores = [i["score"] for i, own in zip(ruled["items"], late, strict=True) if own is moved]
        assert scores == sorted(scores, reverse=True)


def test_the_score_of_a_question_is_the_score_of_its_targets(http: httpx.Client) -> None:
    """/v1/score with the same rules gives the scores of /v1/recommend, and names the rules."""
    ruled = ask(http, "/v1/recommend", **USER, limit=10, rules=RULES)
    scored = ask(
        http, "/v1/score", user_id="u1", at=AT, item_ids=ids(ruled), rules=RULES, explain=50,
    )  # fmt: skip
    for found, item in zip(ruled["items"], scored["items"], strict=True):
        assert item["score"] == pytest.approx(found["score"], abs=1e-4)
        assert item["parts"] == pytest.approx(found["parts"], abs=1e-4)
        assert item.get("rules") == found.get("rules")
        events = sum(reason["contribution"] for reason in item["explanation"])
        added = item["parts"]["prior"] + item["parts"]["rules"]
        assert events + added == pytest.approx(item["score"], abs=1e-3)


def test_pins_stand_where_they_are_put(http: httpx.Client) -> None:
    """Pinned items stand at their positions, once; the others are in their order around them."""
    plain = ids(ask(http, "/v1/recommend", **USER, limit=10))
    last = ids(ask(http, "/v1/recommend", **USER, limit=60))[-1]
    pins = [{"item_id": last, "position": 3}, {"item_id": plain[0], "position": 5}]
    pinned = ask(http, "/v1/recommend", **USER, limit=10, pin=pins)
    rest = [id_ for id_ in ids(pinned) if id_ not in {last, plain[0]}]
    assert ids(pinned)[2] == last
    assert ids(pinned)[4] == plain[0]
    assert rest == plain[1:9]
    assert [at for at, item in enumerate(pinned["items"]) if item.get("moved") == "pinned"] == [
        2,
        4,
    ]
    assert "warnings" not in pinned


def test_pins_that_cannot_be_shown_are_warned_of(http: httpx.Client) -> None:
    """An unknown item, one that the filter or the question leaves out, and one behind the limit."""
    space = [item_id(0, number) for number in range(4)]
    pins = [
        {"item_id": "no such item", "position": 1},
        {"item_id": item_id(1, 1), "position": 2},
        {"item_id": space[0], "position": 3},
        {"item_id": space[1], "position": 50},
        {"item_id": space[2], "position": 4},
    ]
    answer = ask(
        http, "/v1/recommend", **USER, limit=5, pin=pins, exclude=[space[0]],
        filter={"field": "categories", "eq": "space"},
    )  # fmt: skip
    said = {warning["pointer"]: warning["detail"] for warning in answer["warnings"]}
    assert said == {
        "/pin/0": "item 'no such item' is not in the catalogue",
        "/pin/1": f"item {item_id(1, 1)!r} does not pass the filter",
        "/pin/2": f"item {space[0]!r} is excluded",
        "/pin/3": f"item {space[1]!r} stands behind the limit of 5",
    }
    assert ids(answer)[3] == space[2]
    assert len(answer["items"]) == 5


def test_at_most_so_many_items_share_a_value(http: httpx.Client) -> None:
    """Both quotas hold, and an answer is filled from further down the ranking."""
    quotas = [{"field": "categories", "count": 6}, {"field": "attributes.language", "count": 5}]
    answer = ask(http, "/v1/recommend", **USER, limit=10, at_most=quotas, diversity=0.3)
    shared = Counter(name for id_ in ids(answer) for name in ITEMS[id_].categories)
    spoken = Counter(ITEMS[id_].attributes["language"] for id_ in ids(answer))
    assert max(shared.values()) <= 6
    assert spoken == {"en": 5, "de": 5}


def test_values_that_no_item_has_are_warned_of(http: httpx.Client) -> None:
    """Filters of rules and fields of quotas are looked at as filters are, in every question."""
    rules = [{"name": "typo", "when": {"field": "categories", "eq": "musik"}, "boost": 1}]
    quotas = [{"field": "attributes.colour", "count": 1}]
    answer = ask(http, "/v1/recommend", **USER, rules=rules, at_most=quotas)
    assert [warning["pointer"] for warning in answer["warnings"]] == [
        "/rules/0/when/eq",
        "/at_most/0/field",
    ]
    scored = ask(http, "/v1/score", user_id="u1", item_ids=[item_id(0, 0)], rules=rules)
    assert "did you mean 'music'?" in scored["warnings"][0]["detail"]


def test_exploration_names_its_seed_and_propensities(http: httpx.Client) -> None:
    question = USER | {"limit": 10, "explore": 0.3}
    first = ask(http, "/v1/recommend", **question)
    again = ask(http, "/v1/recommend", **question, seed=first["seed"])
    assert again == first
    explored = [item for item in first["items"] if item.get("moved") == "explored"]
    assert all(0 < item["propensity"] <= 1 for item in first["items"])
    assert all(item["propensity"] == 1 for item in first["items"] if item not in explored)
    plain = ask(http, "/v1/recommend", **USER, limit=10)
    assert "seed" not in plain
    assert not any("propensity" in item for item in plain["items"])


STEERED: list[tuple[str, dict[str, Any]]] = [
    ("recommend", USER),
    ("search", {"query": "moon", "user_id": "u1", "at": AT}),
    ("similar", {"item_id": item_id(0, 1)}),
    ("popular", {"at": AT}),
    ("together", {"item_id": item_id(0, 1), "at": AT}),
    ("rows", {"user_id": "u1", "at": AT}),
]


@pytest.mark.parametrize(("name", "question"), STEERED)
def test_every_question_is_steered(http: httpx.Client, name: str, question: dict[str, Any]) -> None:
    """Rules, quotas, facets and fields hold in each list of items."""
    steering = {
        "rules": RULES,
        "at_most": [{"field": "categories", "count": 3}],
        "facets": [{"field": "categories"}],
        "fields": ["categories"],
        "limit": 6,
    }
    body = {field: value for field, value in question.items() if field != "item_id"} | steering
    about = question.get("item_id")
    path = f"/v1/items/{about}/{name}" if about else f"/v1/{name}"
    alone = ask(http, path, **body)
    rows = alone.get("rows", [alone])
    assert alone["total"] > 0
    for row in rows:
        shared = Counter(label for item in row["items"] for label in item["fields"]["categories"])
        assert 0 < max(shared.values()) <= 3
        for item in row["items"]:
            assert sum(item["parts"].values()) == pytest.approx(item["score"], rel=1e-4, abs=1e-4)
            assert "rules" in item["parts"]


# ---------------------------------------------------------------------------- hidden items


def test_hidden_items_are_not_named_in_reasons(http: httpx.Client) -> None:
    """Events on hidden and deleted items are no reasons, and all still add up."""
    items = [
        {"item_id": f"shy-{number}", "title": f"secret {number} comet", "categories": ["shy"]}
        for number in range(3)
    ]
    assert http.post("/v1/items", json={"items": items}).status_code == 200
    events = [
        {"user_id": "discreet", "event_id": f"d-{number}", "item_id": id_, "timestamp": AT}
        for number, id_ in enumerate(["shy-0", item_id(0, 3), "shy-1", "shy-2", item_id(0, 4)])
    ]
    assert http.post("/v1/events", json={"events": events}).status_code == 200
    question = {"user_id": "discreet", "at": AT, "explain": 50}
    target = {"item_ids": [item_id(0, 5), item_id(2, 5)]}
    open_ = ask(http, "/v1/score", **question, **target)
    assert http.patch("/v1/items/shy-0", json={"hidden": True}).status_code == 200
    assert http.patch("/v1/items/shy-1", json={"hidden": True}).status_code == 200
    assert http.delete("/v1/items/shy-2").status_code == 204
    closed = ask(http, "/v1/score", **question, **target)
    for before, after in zip(open_["items"], closed["items"], strict=True):
        assert len(before["explanation"]) == 5
        assert {r["item_id"] for r in after["explanation"]} == {item_id(0, 3), item_id(0, 4)}
        assert after["remainder"]["events"] == 2  # the deleted item is not attended
        total = sum(r["contribution"] for r in after["explanation"]) + after["parts"]["prior"]
        total += after["remainder"]["contribution"]
        assert total == pytest.approx(after["score"], abs=1e-3)
    found = ask(http, "/v1/recommend", **question, limit=10)
    pinned = ask(http, "/v1/recommend", pin=[{"item_id": "shy-0", "position": 1}], limit=3)
    assert "shy" not in str(found)
    assert pinned["warnings"] == [{"pointer": "/pin/0", "detail": "item 'shy-0' is hidden"}]
    assert "shy" not in str(pinned["items"])


# ---------------------------------------------------------------------------- visible and at

EVENTS = {"since": "2025-11-23T00:00:00Z", "until": "2025-11-26T00:00:00Z"}
ATTENDING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/score", {"item_ids": [item_id(0, 1), item_id(2, 2)], "explain": 50}),
    ("/v1/recommend", {"limit": 2, "explain": 50, "exclude_seen": False}),
    ("/v1/search", {"query": "moon", "limit": 2, "explain": 50}),
]


@pytest.mark.parametrize(("path", "body"), ATTENDING)
def test_visible_means_the_same_in_every_question(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """The reasons are those events alone that are visible, which are the rows that are attended."""
    whole = ask(http, path, user_id="u2", **body, at=AT)
    question = {"user_id": "u2", "visible": EVENTS, "at": AT}
    part = ask(http, path, **question, **body)
    attended = ask(
        http, "/v1/attend", memory={"user_id": "u2"}, query={"item_id": item_id(0, 1)},
        visible=EVENTS, at=AT,
    )  # fmt: skip
    assert 0 < len(attended["ids"]) < 12
    for item in part["items"]:
        assert {r["event_id"] for r in item["explanation"]} == {*attended["ids"]}
        times = [r["timestamp"] for r in item["explanation"]]
        assert all(EVENTS["since"] <= time < EVENTS["until"] for time in times)
    assert all(len(item["explanation"]) > len(attended["ids"]) for item in whole["items"])


@pytest.mark.parametrize(("path", "body"), ATTENDING)
def test_events_after_at_are_no_reasons(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """The reasons of a user are those of another whose later events were deleted."""
    times = ("2025-12-03T00:00:00Z", "2025-12-05T00:00:00Z")
    users = [f"{kind}-{path.rsplit('/', 1)[1]}" for kind in ("going-on", "ended")]
    events = [
        {"user_id": user, "event_id": f"{user}-{n}", "item_id": item_id(n, 5), "timestamp": time}
        for user in users
        for n, time in enumerate(times)
    ]
    http.post("/v1/events", json={"events": events}).raise_for_status()
    http.delete(f"/v1/users/{users[1]}/history/{users[1]}-1").raise_for_status()
    asked = {"at": "2025-12-04T00:00:00Z", **body}
    found, wanted = (ask(http, path, user_id=user, **asked) for user in users)
    assert found["items"]
    for one, other in zip(found["items"], wanted["items"], strict=True):
        assert one["item_id"] == other["item_id"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        (reason,), (same,) = one["explanation"], other["explanation"]
        assert reason["timestamp"] == same["timestamp"] == times[0]
