"""Scenarios over HTTP: saved questions, what a request may narrow, fallbacks, versions."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.tiny import AT, item_id

ITEMS = {item.item_id: item for item in tiny.items()}
SPACE = {"field": "categories", "eq": "space"}
COARSE = {"mode": "coarse", "k": 5}
NOTHING = {"field": "categories", "eq": "nothing"}
EVEN = {"field": "categories", "eq": "even"}
RULE = {"name": "high numbers", "when": {"field": "attributes.number", "gt": 9}, "boost": 1.0}


def put(http: httpx.Client, name: str, **body: Any) -> dict[str, Any]:
    answer = http.put(f"/v1/scenarios/{name}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


@pytest.mark.parametrize("question", ["similar", "together"])
def test_questions_about_an_item_take_its_id_among_their_fields(
    http: httpx.Client, question: str
) -> None:
    """The item is the request's, or the scenario's."""
    plain = ask(http, f"/v1/items/{item_id(0, 3)}/{question}", limit=4)
    version = put(http, question, question=question, limit=4)["version"]
    answer = ask(http, f"/v1/scenarios/{question}", item_id=item_id(0, 3))
    assert answer == plain | {"scenario": question, "scenario_version": version}
    missing = http.post(f"/v1/scenarios/{question}", json={})
    assert [error["pointer"] for error in missing.json()["errors"]] == ["/item_id"]
    put(http, f"{question}-one", question=question, limit=4, item_id=item_id(0, 3))
    assert ids(ask(http, f"/v1/scenarios/{question}-one")) == ids(plain)
    other = http.post(f"/v1/scenarios/{question}-one", json={"item_id": item_id(0, 4)})
    assert [error["pointer"] for error in other.json()["errors"]] == ["/item_id"]


def test_fields_that_do_nothing_for_a_request_are_passed_over(http: httpx.Client) -> None:
    """Saved fields about a user do nothing for nobody, nor a user in a fallback that is a list."""
    put(http, "found", question="search", personal_weight=9, explain=2, retrieval=COARSE)
    assert ids(ask(http, "/v1/scenarios/found", query="moon"))
    assert ids(ask(http, "/v1/scenarios/found", limit=3))  # a list
    refused = http.post("/v1/scenarios/found", json={"query": "moon", "personal_weight": 9})
    assert [error["pointer"] for error in refused.json()["errors"]] == ["/personal_weight"]
    put(http, "listed", question="search", sort=[{"field": "title"}])
    put(http, "filled", question="recommend", filter=NOTHING, fallback="listed")
    filled = ask(http, "/v1/scenarios/filled", user_id="u1", at=AT, explain=2, limit=5)
    assert ids(filled) == ids(ask(http, "/v1/scenarios/listed", limit=5))


def test_a_request_narrows_what_is_saved(http: httpx.Client) -> None:
    """Each field of a request counts beside the saved one."""
    put(
        http, "narrowed", question="recommend", limit=12, filter=SPACE, rules=[RULE],
        exclude_seen=False, exclude=[item_id(0, 0)], explain=2,
        at_most=[{"field": "attributes.language", "count": 4}],
    )  # fmt: skip
    own = {"name": "even", "when": EVEN, "boost": 0.5}
    answer = ask(
        http, "/v1/scenarios/narrowed", user_id="u1", at=AT, limit=5, filter=EVEN, rules=[own],
        exclude=[item_id(0, 2)], at_most=[{"field": "attributes.language", "count": 3}], explain=1,
    )  # fmt: skip
    same = ask(
        http, "/v1/recommend", user_id="u1", at=AT, limit=5, filter={"all": [SPACE, EVEN]},
        rules=[RULE, own], exclude=[item_id(0, 0), item_id(0, 2)], exclude_seen=False,
        at_most=[{"field": "attributes.language", "count": 3}], explain=1,
    )  # fmt: skip
    assert answer["items"] == same["items"]
    assert len(answer["items"]) == 3
    open_ = ask(http, "/v1/scenarios/narrowed", user_id="u1", at=AT)
    assert all("space" in ITEMS[id_].categories for id_ in ids(open_))
    assert all("rules" in item["parts"] for item in open_["items"])


WIDER: list[tuple[dict[str, Any], str]] = [
    ({"limit": 6}, "/limit"),
    ({"explain": 3}, "/explain"),
    ({"exclude_seen": False}, "/exclude_seen"),
    ({"diversity": 0.1}, "/diversity"),
    ({"pin": []}, "/pin"),
    ({"rules": [RULE | {"boost": -1}]}, "/rules/0/name"),
    ({"at_most": [{"field": "tags", "count": 9}, {"field": "categories", "count": 3}]},
     "/at_most/1/count"),
    ({"temperature": 2.0}, "/temperature"),
    ({"filter": {"field": "colour", "eq": 1}}, "/filter/field"),
    ({"query": "moon"}, "/query"),
    ({"limit": "5"}, "/limit"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "pointer"), WIDER)
def test_a_request_that_would_widen_is_refused(
    http: httpx.Client, given: dict[str, Any], pointer: str
) -> None:
    """The error names the field of the request."""
    put(
        http, "fixed", question="recommend", limit=5, explain=2, exclude_seen=True, diversity=0.2,
        rules=[RULE], at_most=[{"field": "categories", "count": 2}], temperature=1.0,
        pin=[{"item_id": item_id(0, 0), "position": 1}],
    )  # fmt: skip
    answer = http.post("/v1/scenarios/fixed", json=given)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    again = {"user_id": "u1", "diversity": 0.2, "temperature": 1.0, "exclude_seen": True}
    # Every item is even or odd, of which there may be two each.
    assert len(ask(http, "/v1/scenarios/fixed", **again)["items"]) == 4


def test_visible_events_are_those_of_both(http: httpx.Client) -> None:
    """A request's conditions on events hold beside the saved ones."""
    put(
        http, "recent", question="recommend", limit=3, explain=50, exclude_seen=False,
        visible={"since": "2025-11-23T00:00:00Z", "types": ["view", "like"]},
    )  # fmt: skip
    given = {"user_id": "u2", "at": AT, "visible": {"until": "2025-11-26T00:00:00Z",
             "since": "2025-11-20T00:00:00Z", "types": ["view", "buy"]}}  # fmt: skip
    plain = ask(
        http, "/v1/recommend", user_id="u2", at=AT, limit=3, explain=50, exclude_seen=False,
        visible={"since": "2025-11-23T00:00:00Z", "until": "2025-11-26T00:00:00Z",
                 "types": ["view"]},
    )  # fmt: skip
    assert ask(http, "/v1/scenarios/recent", **given)["items"] == plain["items"]


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"question": "guess"}, "/question"),
    ({"question": "recommend", "limit": 0}, "/limit"),
    ({"question": "recommend", "filter": {"all": [{"field": "title", "eq": 1}]}},
     "/filter/all/0/eq"),
    ({"question": "recommend", "rules": [RULE, RULE]}, "/rules/1/name"),
    ({"question": "popular", "half_life": "1h", "by": "newest"}, "/half_life"),
    ({"question": "similar", "diversity": 1}, "/diversity"),
    ({"question": "similar", "item_id": ""}, "/item_id"),
    ({"question": "popular", "fallback": "missing"}, "/fallback"),
    ({"question": "popular", "fallback": "wrong"}, "/fallback"),
    ({"question": "rows", "fallback": "search"}, "/fallback"),
    ({"question": "popular", "fallback": "No Name"}, "/fallback"),
    ({}, "/question"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "pointer"), INVALID)
def test_what_is_saved_is_a_valid_question(
    http: httpx.Client, body: dict[str, Any], pointer: str
) -> None:
    """A scenario is refused when it is saved, with a pointer, and nothing is stored."""
    answer = http.put("/v1/scenarios/wrong", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
    assert http.get("/v1/scenarios/wrong").status_code == 404


def test_a_fallback_fills_an_answer_up(http: httpx.Client) -> None:
    """Items that are there already come once; those of the fallback say so."""
    put(http, "anything", question="popular", limit=50)
    put(
        http, "narrow", question="recommend", limit=6, fallback="anything", exclude_seen=False,
        filter={"field": "item_id", "in": [item_id(1, 1), item_id(2, 2)]},
    )  # fmt: skip
    answer = ask(http, "/v1/scenarios/narrow", user_id="u1", at=AT)
    assert {*ids(answer)[:2]} == {item_id(1, 1), item_id(2, 2)}
    assert len({*ids(answer)}) == 6
    assert [item.get("scenario") for item in answer["items"]] == [None] * 2 + ["anything"] * 4
    popular = ids(ask(http, "/v1/popular", limit=6, at=AT))
    popular = [id_ for id_ in popular if id_ not in ids(answer)[:2]]
    assert ids(answer)[2:] == popular[:4]
    full = ask(http, "/v1/scenarios/narrow", user_id="u1", at=AT, limit=2)
    assert not any("scenario" in item for item in full["items"])
    # The request's own filter holds for what fills up, too.
    evens = ask(http, "/v1/scenarios/narrow", user_id="u1", at=AT, filter=EVEN)
    assert all("even" in ITEMS[id_].categories for id_ in ids(evens))


def test_a_fallback_answers_for_what_is_not_there(http: httpx.Client) -> None:
    """An unknown item has no similar ones; the fallback answers instead of a 404."""
    put(http, "all-liked", question="popular", limit=4)
    put(http, "like-it", question="similar", limit=3, fallback="all-liked")
    answer = ask(http, "/v1/scenarios/like-it", item_id="no such item", filter=SPACE)
    assert len(answer["items"]) == 3
    assert {item["scenario"] for item in answer["items"]} == {"all-liked"}
    put(http, "like-it", question="similar", limit=3)
    assert http.post("/v1/scenarios/like-it", json={"item_id": "no such item"}).status_code == 404


def test_scenarios_are_listed_read_and_deleted(http: httpx.Client) -> None:
    """A change is a version and is in use at once; what was in use before can be put again."""
    first = put(http, "kept", question="popular", limit=2)
    assert put(http, "kept", question="popular", limit=2) == first
    second = put(http, "kept", question="popular", limit=3)
    assert second["version"] == first["version"] + 1
    assert http.get("/v1/scenarios/kept").json() == second
    assert len(ask(http, "/v1/scenarios/kept")["items"]) == 3
    versions = http.get("/v1/scenarios/kept/versions", params={"limit": 1}).json()
    assert versions["versions"] == [second]
    older = http.get(
        "/v1/scenarios/kept/versions", params={"cursor": versions["cursor"]}
    ).json()  # fmt: skip
    assert older["versions"][0] == first
    put(http, "kept", **first["scenario"])
    assert len(ask(http, "/v1/scenarios/kept")["items"]) == 2
    names = [each["name"] for each in http.get("/v1/scenarios").json()["scenarios"]]
    assert names == sorted(names)
    assert "kept" in names
    assert http.delete("/v1/scenarios/kept").status_code == 204
    assert http.delete("/v1/scenarios/kept").status_code == 404
    assert http.get("/v1/scenarios/kept").status_code == 404
    assert http.post("/v1/scenarios/kept", json={}).status_code == 404
    gone = http.get("/v1/scenarios/kept/versions").json()["versions"][0]
    assert gone["scenario"] is None
    assert http.get("/v1/scenarios/never/versions").status_code == 404
