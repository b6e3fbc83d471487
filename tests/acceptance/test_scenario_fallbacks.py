"""Every field of every question, in a scenario with a fallback, against plain loops.

The fields come from the schemas: one that has no value here fails the first test.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import httpx
import pytest

from service.http.routes.questions import saved_questions
from tests.support import tiny
from tests.support.server import Server
from tests.support.tiny import AT, item_id

ITEMS = {item.item_id: item for item in tiny.items()}
QUESTIONS = saved_questions()
LISTS = [name for name, question in QUESTIONS.items() if question.lists_items]
EARLY = "2025-11-25T00:00:00Z"  # in the middle of what u1 did
EVEN = {"field": "categories", "eq": "even"}
HIGH = {"name": "high", "when": {"field": "attributes.number", "gt": 9}, "boost": 2.0}
GERMAN = {"name": "high", "when": {"field": "attributes.language", "eq": "de"}, "boost": 1.0}
LAST = {"name": "last", "when": {"field": "attributes.number", "lt": 5}, "bury": True}
FEW = [item_id(0, 3), item_id(2, 4)]  # all that the scenario itself may answer
SHORT = {"limit": 9, "filter": {"field": "item_id", "in": FEW}}
ABOUT = item_id(1, 1)
SESSION = [{"item_id": item_id(3, 1)}, {"item_id": item_id(3, 2)}]

# By field: the request's value, and the value that a fallback has saved.
VALUES: dict[str, tuple[Any, Any]] = {
    "user_id": ("u1", "u2"),
    "history": (SESSION, SESSION[:1]),
    "visible": ({"types": ["view", "like"]}, {"since": "2025-11-20T00:00:00Z"}),
    "retrieval": ({"mode": "exact"}, {"mode": "coarse", "k": 3}),
    "temperature": (2.0, 0.5),
    "hard": (True, False),
    "exclude_self": (True, False),
    "at": (EARLY, "2025-11-22T00:00:00Z"),
    "explain": (1, 2),
    "explain_effects": (True, False),
    "explain_exact": (True, False),
    "limit": (6, 3),
    "filter": (EVEN, {"field": "attributes.number", "lt": 12}),
    "exclude_seen": (True, False),
    "exclude": ([item_id(0, 0), FEW[0]], [item_id(1, 0), item_id(1, 2)]),
    "diversity": (0.5, 0.1),
    "rules": ([HIGH, LAST], [GERMAN]),
    "pin": (
        [{"item_id": FEW[1], "position": 5}],
        [{"item_id": item_id(3, 9), "position": 2}],
    ),
    "at_most": (
        [{"field": "attributes.language", "count": 3}, {"field": "categories", "count": 4}],
        [{"field": "categories", "count": 2}],
    ),
    "explore": (0.5, 0.2),
    "seed": (1, 2),
    "facets": ([{"field": "categories"}], [{"field": "tags"}]),
    "fields": (["categories"], ["tags"]),
    "memory": ("catalogue", "catalogue"),
    "query": ("moon soup", "castle"),
    "personal_weight": (5.0, 1.0),
    "fill": (True, False),
    "min_score": (10.0, 1.0),
    "highlight": (True, False),
    "sort": ([{"field": "title"}], [{"field": "published_at"}]),
    "offset": (0, 0),
    "cursor": (None, None),
    "space": ("content", "both"),
    "by": ("newest", "rated"),
    "window": ("1000d", "900d"),
    "half_life": ("100d", "50d"),
    "type": ("view", "like"),
    "relation": ("basket", "after"),
    "item_id": (ABOUT, item_id(2, 2)),
}
# Fields in which the least value, both values, or the request's value holds.
LEAST = {"limit", "explain"}
OF_REQUEST = {"at", "fields", "facets"}


def fields_of(kind: str) -> list[str]:
    question = QUESTIONS[kind]
    return [*question.schema.model_fields, *([question.about] if question.about else [])]


def test_every_field_of_every_list_has_values() -> None:
    """No field of a question that answers a list can be forgotten here."""
    assert {name for kind in LISTS for name in fields_of(kind)} == VALUES.keys()


def send(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, json=body)


def plain(http: httpx.Client, kind: str, fields: dict[str, Any]) -> httpx.Response:
    """Ask a question at its own route."""
    body = dict(fields)
    if QUESTIONS[kind].about is not None:
        return send(http, f"/v1/items/{body.pop('item_id')}/{kind}", body)
    return send(http, f"/v1/{kind}", body)


def requested(kind: str, field: str) -> dict[str, Any]:
    """Return a request of a kind that has a value for a field."""
    usual: dict[str, Any] = {"user_id": "u1", "at": AT, "item_id": ABOUT, "query": "moon"}
    if field in {"sort", "offset", "cursor"}:
        usual = {"sort": VALUES["sort"][0]}  # a list, which knows no user
    if field.startswith("explain"):
        usual |= {"explain": 1}
    return {name: value for name, value in usual.items() if name in fields_of(kind)}


def values_of(item: str, field: str) -> list[Any]:
    """Return the values of an item that count for a quota."""
    if field == "categories":
        return list(ITEMS[item].categories)
    return [ITEMS[item].attributes[field.removeprefix("attributes.")]]


def seen_by(http: httpx.Client, request: dict[str, Any]) -> set[str]:
    """Return the items of a request's events, until its time."""
    seen = {event["item_id"] for event in request.get("history", ())}
    if "user_id" in request:
        found = http.get(f"/v1/users/{request['user_id']}/history", params={"limit": 1000})
        until = request.get("at", "9999")
        seen |= {
            event["item_id"] for event in found.json()["events"] if event["timestamp"] <= until
        }
    return seen


def by_default(kind: str) -> bool:
    """Return whether a question leaves seen items out unless it says otherwise."""
    return kind == "recommend"


def filler_fields(kind: str, saved: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a fallback is asked with, without what only leaves items out."""
    asked = dict(saved)
    for name, value in request.items():
        if name not in fields_of(kind) or name in {"exclude", "exclude_seen", "at_most", "pin"}:
            continue
        if name not in saved or name in OF_REQUEST:
            asked[name] = value
        elif name in LEAST:
            asked[name] = min(value, saved[name])
        elif name == "filter":
            asked[name] = {"all": [saved[name], value]}
        elif name == "visible":
            asked[name] = saved[name] | value
        elif name == "rules":
            asked[name] = [*saved[name], *({**rule, "name": f"{rule['name']}'"} for rule in value)]
    return asked


def expected_fillers(
    http: httpx.Client,
    kind: str,
    saved: dict[str, Any],
    request: dict[str, Any],
    before: list[str],
    limit: int,
    *,
    hides_seen: bool,
) -> list[str]:
    """Return the items that fill an answer up, taken by a loop from the fallback's plain list."""
    asked = filler_fields(kind, saved, request)
    out, seen = {*before, *request.get("exclude", ())}, set[str]()
    if request.get("exclude_seen") or (hides_seen and saved.get("exclude_seen", by_default(kind))):
        seen = seen_by(http, request)
    if by_default(kind) and "rules" in asked:  # what is seen counts for the unit of boosts
        asked["exclude"] = sorted(seen)
    else:
        out |= seen
    hidden = {"none": [{"field": "item_id", "in": sorted(out)}]}
    most = {each["field"]: each["count"] for each in saved.get("at_most", ())}
    for each in request.get("at_most", ()):
        most[each["field"]] = min(each["count"], most.get(each["field"], each["count"]))
    room = min(limit - len(before), saved.get("limit", limit))
    asked |= {"limit": 100, "filter": {"all": [asked.pop("filter", {}), hidden]}}
    asked.pop("at_most", None)
    if asked.get("explain"):
        asked["limit"] = 60  # effects of so many can be estimated
    asked.pop("explain_exact", None)
    answer = plain(http, kind, asked)
    while answer.status_code == 422:  # a field of the request that does nothing in the fallback
        name = answer.json()["errors"][0]["pointer"].split("/")[1]
        assert name in asked, answer.text
        asked.pop(name)
        answer = plain(http, kind, asked)
    if answer.status_code == 404:
        return []
    counts = Counter(
        (field, value) for item in before for field in most for value in values_of(item, field)
    )
    pins = {pin["item_id"] for pin in asked.get("pin", ())}
    chosen: list[str] = []
    listed = [item["item_id"] for item in answer.json()["items"]]
    for item in [*(item for item in listed if item in pins), *listed]:
        own = [(field, value) for field in most for value in values_of(item, field)]
        is_free = all(counts[field, value] < most[field] for field, value in own)
        if item in chosen or not (is_free or item in pins) or len(chosen) == room:
            continue
        chosen.append(item)
        counts.update(own)
    return sorted(chosen, key=listed.index)


CASES = [*itertools.product(LISTS, LISTS)]


@pytest.mark.parametrize(("kind", "filler"), CASES, ids=lambda name: name)
def test_each_field_holds_for_the_whole_answer(trained: Server, kind: str, filler: str) -> None:
    """A request's field holds in the fallback as in a loop, saved there or not."""
    with trained.client() as http:
        for field in fields_of(kind):
            for saves in (False, True):
                if not saves or field in fields_of(filler):
                    check(http, kind, filler, field, saves=saves)


def check(http: httpx.Client, kind: str, filler: str, field: str, *, saves: bool) -> None:
    """Compare the answer to a request with one field more with that of loops."""
    request = requested(kind, field) | {field: VALUES[field][0]}
    saved: dict[str, Any] = {}
    if QUESTIONS[filler].about and not QUESTIONS[kind].about:
        saved["item_id"] = ABOUT
    if saves:
        saved[field] = VALUES[field][1]
    put(http, "filler", {"question": filler, **saved})
    put(http, "begun", {"question": kind, **SHORT, "fallback": "filler"})
    answer = send(http, "/v1/scenarios/begun", request)
    case = f"{kind} {request}, filled up by {filler} {saved}: {answer.text[:500]}"
    assert answer.status_code == 200, case
    items = answer.json()["items"]
    own = [item["item_id"] for item in items if "scenario" not in item]
    added = [item["item_id"] for item in items if "scenario" in item]
    limit = request.get("limit", SHORT["limit"])

    merged = request | {"limit": limit}
    merged["filter"] = {"all": [SHORT["filter"], request.get("filter", {})]}
    main = plain(http, kind, merged)
    assert main.status_code == 200, (case, main.text)
    alone = [item["item_id"] for item in main.json()["items"]]
    assert own == alone, case
    if field != "explore":  # its draws depend on the number of places
        given = {name: value for name, value in request.items() if name != "explore"}
        hides_seen = request.get("exclude_seen", by_default(kind))
        right = expected_fillers(http, filler, saved, given, alone, limit, hides_seen=hides_seen)
        assert added == right, (case, right)
    check_whole(http, request, items, limit, case)


def check_whole(
    http: httpx.Client,
    request: dict[str, Any],
    items: list[dict[str, Any]],
    limit: int,
    case: str,
) -> None:
    """Check what a request narrows over all items of an answer."""
    ids = [item["item_id"] for item in items]
    assert len(ids) == len({*ids}) <= limit, case
    assert not {*ids} & {*request.get("exclude", ())}, case
    if request.get("exclude_seen"):
        assert not {*ids} & seen_by(http, request), case
    if "filter" in request:
        assert all("even" in ITEMS[each].categories for each in ids), case
    for each in request.get("at_most", ()):
        counts = Counter(value for item in ids for value in values_of(item, each["field"]))
        assert max(counts.values(), default=0) <= each["count"], case
    for pin in request.get("pin", ()):
        if pin["item_id"] in ids:
            assert ids.index(pin["item_id"]) == min(pin["position"], len(ids)) - 1, case
    if "explain" in request:
        assert all(len(item.get("explanation", ())) <= request["explain"] for item in items), case
    if "rules" in request:
        moved = [item.get("moved") == "buried" for item in items]
        assert moved == sorted(moved), case


def put(http: httpx.Client, name: str, body: dict[str, Any]) -> None:
    answer = http.put(f"/v1/scenarios/{name}", json=body)
    assert answer.status_code == 200, answer.text


def seen_items(http: httpx.Client) -> list[str]:
    """Return what u1 has seen, the newest first."""
    history = http.get("/v1/users/u1/history", params={"limit": 1000}).json()["events"]
    return [*dict.fromkeys(event["item_id"] for event in history)]


def test_neither_pins_nor_the_time_of_a_fallback_show_seen_items(trained: Server) -> None:
    """Items that the requester has seen by the time of the request stay out, unless wanted."""
    with trained.client() as http:
        seen = seen_items(http)
        pins = [{"item_id": seen[0], "position": 1}]
        for own in ({"question": "popular"}, {"question": "search"}, {"question": "recommend"}):
            pinned = {} if own["question"] == "search" else {"pin": pins}
            timed = {} if own["question"] == "search" else {"at": EARLY}
            put(http, "filler", {**own, **pinned, **timed})
            put(http, "begun", {"question": "recommend", "fallback": "filler", **SHORT})
            request = {"user_id": "u1", "limit": 9}
            answer = send(http, "/v1/scenarios/begun", request | {"exclude_seen": True}).json()
            assert len(answer["items"]) == 9
            assert not {item["item_id"] for item in answer["items"]} & {*seen}
            shown = send(http, "/v1/scenarios/begun", request | {"exclude_seen": False}).json()
            assert {item["item_id"] for item in shown["items"]} & {*seen}
        put(http, "pinned", {"question": "recommend", "pin": pins, "limit": 5})
        shown = send(http, "/v1/scenarios/pinned", {"user_id": "u1"}).json()
        assert shown["items"][0]["item_id"] == seen[0]
        unseen = send(http, "/v1/scenarios/pinned", {"user_id": "u1", "exclude_seen": True}).json()
        assert unseen["items"][0]["item_id"] != seen[0]
        assert [each["pointer"] for each in unseen["warnings"]] == ["/pin/0"]


def test_a_chain_of_fallbacks_is_narrowed_as_a_whole(trained: Server) -> None:
    """A field reaches the last of several fallbacks, past one that does not have it."""
    with trained.client() as http:
        limits = [{"field": "categories", "count": 3}]
        put(http, "chain-3", {"question": "popular", "at_most": limits})
        some = {"field": "item_id", "in": [item_id(1, 3), item_id(1, 5), item_id(0, 2)]}
        second = {"question": "similar", "filter": some, "item_id": ABOUT}
        put(http, "chain-2", {**second, "fallback": "chain-3"})
        put(http, "chain-1", {"question": "recommend", **SHORT, "fallback": "chain-2"})
        excluded = [item_id(0, 2), item_id(3, 0)]
        for rule in ({}, {"rules": [LAST]}):
            answer = send(http, "/v1/scenarios/chain-1", {"exclude": excluded, **rule}).json()
            ids = [item["item_id"] for item in answer["items"]]
            assert len({*ids}) == len(ids)
            assert not {*ids} & {*excluded}
            places = [item.get("scenario") for item in answer["items"]]
            assert {*places} == {None, "chain-2", "chain-3"}
            # The quota of the last holds for its items, those before them counted.
            counts = Counter(name for item in ids for name in ITEMS[item].categories)
            last = [
                item["item_id"] for item in answer["items"] if item.get("scenario") == "chain-3"
            ]
            assert all(counts[name] <= 3 for item in last for name in ITEMS[item].categories)


def test_a_fallback_that_cannot_fill_up_leaves_the_answer(trained: Server) -> None:
    """It may answer rows, or not know the item; a later page of a list is not filled up."""
    with trained.client() as http:
        put(http, "filler", {"question": "popular"})
        put(http, "begun", {"question": "recommend", **SHORT, "fallback": "filler"})
        put(http, "filler", {"question": "rows"})
        answer = send(http, "/v1/scenarios/begun", {}).json()
        assert ({item["item_id"] for item in answer["items"]}, answer["degraded"]) == (
            {*FEW},
            False,
        )
        put(http, "filler", {"question": "similar", "item_id": "no such item"})
        answer = send(http, "/v1/scenarios/begun", {}).json()
        assert {item["item_id"] for item in answer["items"]} == {*FEW}
        put(http, "begun", {"question": "similar", "fallback": "filler"})
        assert send(http, "/v1/scenarios/begun", {"item_id": "nor this"}).status_code == 404
        put(http, "filler", {"question": "popular", "half_life": "6h"})
        put(http, "begun", {"question": "search", "fallback": "filler", **SHORT})
        first = send(http, "/v1/scenarios/begun", {}).json()
        assert "filler" in {item.get("scenario") for item in first["items"]}
        page = send(http, "/v1/scenarios/begun", {"offset": 1}).json()
        assert ["scenario" in item for item in page["items"]] == [False]


def test_a_fallback_about_an_item_needs_one(trained: Server) -> None:
    """A question that never knows the item of its fallback is not saved."""
    with trained.client() as http:
        put(http, "filler", {"question": "together"})
        body = {"question": "popular", "fallback": "filler"}
        answer = http.put("/v1/scenarios/needy", json=body)
        assert answer.status_code == 422
        assert [error["pointer"] for error in answer.json()["errors"]] == ["/fallback"]
        put(http, "needy", body | {"question": "similar"})
