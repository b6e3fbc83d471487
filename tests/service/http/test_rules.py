"""Validation of requests: wrong input is refused and named before it reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.support.http_fake import Client, serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(max_targets=3) as client:
        client.engine.raises = AssertionError("the engine was asked")
        yield client


def event(**fields: Any) -> dict[str, Any]:
    return {"events": [{"user_id": "u", "item_id": "i", **fields}]}


def item(**fields: Any) -> dict[str, Any]:
    return {"items": [{"item_id": "i", **fields}]}


def score(**fields: Any) -> dict[str, Any]:
    return {"item_ids": ["i"], **fields}


def attend(memory: Any, query: Any = None, **fields: Any) -> dict[str, Any]:
    return {"memory": memory, "query": query or {"vector": [1, 2]}, **fields}


def rows(**fields: Any) -> dict[str, Any]:
    return {"keys": [[1, 2], [3, 4]], "values": [[1], [2]], **fields}


WHEN = {"field": "attributes.a", "gte": 1}
RULE: dict[str, Any] = {"name": "new", "when": {"field": "tags", "eq": "new"}, "boost": 1}
PIN = {"item_id": "i", "position": 1}
OF_EVENTS: list[dict[str, Any]] = [
    *({"visible": {"types": ["view"]}}, {"at": "2026-01-01T00:00:00Z"}),
    *({"exclude_self": True}, {"personal_weight": 1}, {"explain": 1}),
    *({"explain_effects": True}, {"explain_exact": True}),
]
OF_LISTS: list[dict[str, Any]] = [
    *({"temperature": 2}, {"hard": True}, {"user_id": "u"}, {"history": [{"item_id": "i"}]})
]
MINE: dict[str, Any] = {"query": "a", "memory": "history", "user_id": "u"}
NOT_OF_EVENTS: dict[str, Any] = {
    "sort": [{"field": "title"}],
    "facets": [{"field": "tags"}],
    "rules": [RULE],
    "pin": [PIN],
    "at_most": [{"field": "tags", "count": 1}],
    "cursor": "c",
    "offset": 1,
    "explain": 1,
    **dict.fromkeys(("explain_effects", "explain_exact", "exclude_self"), True),
    "personal_weight": 1.0,
}
BAD = [
    # ids
    ("/v1/events", event(user_id=""), "/events/0/user_id"),
    ("/v1/events", event(user_id="a\0b"), "/events/0/user_id"),
    ("/v1/events", event(user_id="é" * 129), "/events/0/user_id"),
    ("/v1/events", event(user_id=7), "/events/0/user_id"),
    ("/v1/events", event(user_id=None), "/events/0/user_id"),
    ("/v1/events", event(item_id={}), "/events/0/item_id"),
    ("/v1/events", event(event_id=[]), "/events/0/event_id"),
    ("/v1/events", event(type=""), "/events/0/type"),
    ("/v1/events", event(type="t" * 65), "/events/0/type"),
    # numbers
    ("/v1/events", event(weight=0), "/events/0/weight"),
    ("/v1/events", event(weight=-1), "/events/0/weight"),
    ("/v1/events", event(weight=1e-320), "/events/0/weight"),
    ("/v1/events", event(weight=1e300), "/events/0/weight"),
    ("/v1/events", event(weight="1"), "/events/0/weight"),
    ("/v1/events", event(weight=True), "/events/0/weight"),
    # times
    ("/v1/events", event(timestamp="2026-01-31T09:30:00"), "/events/0/timestamp"),
    ("/v1/events", event(timestamp="2026-01-31"), "/events/0/timestamp"),
    ("/v1/events", event(timestamp="2026-02-30T09:30:00Z"), "/events/0/timestamp"),
    ("/v1/events", event(timestamp="2026-W05-6T09:30:00Z"), "/events/0/timestamp"),
    ("/v1/events", event(timestamp="0001-01-01T00:00:00+01:00"), "/events/0/timestamp"),
    ("/v1/events", event(timestamp=1_769_851_800), "/events/0/timestamp"),
    ("/v1/events", event(timestamp="٢٠٢٦-01-31T09:30:00Z"), "/events/0/timestamp"),
    # vectors
    ("/v1/events", event(key=[1, 2, 3]), "/events/0/key"),
    ("/v1/events", event(value=[]), "/events/0/value"),
    ("/v1/events", event(key=[1, 2, 3, "4"]), "/events/0/key/3"),
    ("/v1/events", event(key=[1, True, 3, 4]), "/events/0/key/1"),
    ("/v1/events", event(key=[1, None, 3, 4]), "/events/0/key/1"),
    ("/v1/events", event(key=[1, 2, 3, 1e39]), "/events/0/key"),
    ("/v1/events", event(key="AAAA"), "/events/0/key"),
    # shapes
    ("/v1/events", {"events": {}}, "/events"),
    ("/v1/events", {"events": [[]]}, "/events/0"),
    ("/v1/events", {}, "/events"),
    ("/v1/events", [], ""),
    ("/v1/events", None, ""),
    ("/v1/events", event(wieght=1), "/events/0/wieght"),
    ("/v1/events", {"events": [], "a/b~c": 1}, "/a~1b~0c"),
    # items
    ("/v1/items", item(title=1), "/items/0/title"),
    ("/v1/items", item(tags="x"), "/items/0/tags"),
    ("/v1/items", item(tags=["x", ""]), "/items/0/tags/1"),
    ("/v1/items", item(hidden=1), "/items/0/hidden"),
    ("/v1/items", item(hidden="true"), "/items/0/hidden"),
    ("/v1/items", item(embedding=[1]), "/items/0/embedding"),
    ("/v1/items", item(published_at="yesterday"), "/items/0/published_at"),
    ("/v1/items", item(attributes=[]), "/items/0/attributes"),
    ("/v1/items", {"items": [{"item_id": "i"}] * 1001}, "/items"),
    # questions
    ("/v1/score", {}, "/item_ids"),
    ("/v1/score", score(item_ids=["i"] * 4), "/item_ids"),
    ("/v1/score", score(item_ids="i"), "/item_ids"),
    ("/v1/score", score(item_ids=["i", 1]), "/item_ids/1"),
    ("/v1/score", score(retrieval={"k": 0}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"k": -1}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"k": 10**9}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"k": 1.5}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"k": "10"}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"k": True}), "/retrieval/k"),
    ("/v1/score", score(retrieval={"probes": 0}), "/retrieval/probes"),
    ("/v1/score", score(retrieval={"mode": "fast"}), "/retrieval/mode"),
    ("/v1/score", score(temperature=0), "/temperature"),
    ("/v1/score", score(temperature=-1), "/temperature"),
    ("/v1/score", score(temperature=1e-300), "/temperature"),
    ("/v1/score", score(hard="yes"), "/hard"),
    ("/v1/score", score(explain=51), "/explain"),
    ("/v1/score", score(explain=-1), "/explain"),
    ("/v1/score", score(explain_exact="yes"), "/explain_exact"),
    ("/v1/score", score(item_ids=["i"] * 3, explain=34, explain_exact=True), "/explain_exact"),
    ("/v1/recommend", {"limit": 101, "explain": 1, "explain_exact": True}, "/explain_exact"),
    ("/v1/recommend", {"explain": 6, "explain_exact": True}, "/explain_exact"),
    ("/v1/search", {"query": "a", "explain": 6, "explain_exact": True}, "/explain_exact"),
    ("/v1/score", score(explain_effects="yes"), "/explain_effects"),
    ("/v1/recommend", {"limit": 101, "explain": 1, "explain_effects": True}, "/explain_effects"),
    (
        "/v1/search",
        {"query": "a", "limit": 101, "explain": 1, "explain_effects": True},
        "/explain_effects",
    ),
    ("/v1/score", score(at="now"), "/at"),
    ("/v1/score", score(history=[{"item_id": "i", "user_id": "u"}]), "/history/0/user_id"),
    ("/v1/score", score(history=[{"type": "view"}]), "/history/0/item_id"),
    ("/v1/score", score(visible={"types": "view"}), "/visible/types"),
    ("/v1/score", score(visible={"after": None}), "/visible/after"),
    ("/v1/recommend", {"limit": 0}, "/limit"),
    ("/v1/recommend", {"limit": 10**9}, "/limit"),
    ("/v1/recommend", {"diversity": 1.01}, "/diversity"),
    ("/v1/recommend", {"filter": {"categories": ["a"]}}, "/filter/categories"),
    ("/v1/recommend", {"filter": {"attributes": {"a/b": [[]]}}}, "/filter/attributes/a~1b"),
    ("/v1/recommend", {"filter": {"published": {"since": 1}}}, "/filter/published/since"),
    ("/v1/search", {"query": "q" * 20_001}, "/query"),
    # a history
    ("/v1/search", {"query": "a", "memory": "mine"}, "/memory"),
    ("/v1/search", {"query": "a", "memory": "history"}, "/user_id"),
    ("/v1/search", {"query": " ", "memory": "history", "user_id": "u"}, "/query"),
    *(("/v1/search", MINE | {name: value}, f"/{name}") for name, value in NOT_OF_EVENTS.items()),
    ("/v1/search", MINE | {"retrieval": {"max_error": 1}}, "/retrieval/max_error"),
    ("/v1/search", MINE | {"retrieval": {"moment_order": 1}}, "/retrieval/moment_order"),
    # steering
    ("/v1/recommend", {"rules": [{"name": "r", "when": WHEN}]}, "/rules/0"),
    ("/v1/recommend", {"rules": [RULE | {"bury": True}]}, "/rules/0/bury"),
    ("/v1/recommend", {"rules": [RULE | {"boost": "1"}]}, "/rules/0/boost"),
    ("/v1/recommend", {"rules": [RULE | {"boost": 1e9}]}, "/rules/0/boost"),
    ("/v1/recommend", {"rules": [RULE | {"name": ""}]}, "/rules/0/name"),
    ("/v1/recommend", {"rules": [{"name": "r", "boost": 1}]}, "/rules/0/when"),
    (
        "/v1/recommend",
        {"rules": [RULE | {"when": {"all": [{"field": "title", "eq": 1}]}}]},
        "/rules/0/when/all/0/eq",
    ),
    ("/v1/recommend", {"pin": [PIN, PIN | {"item_id": "y"}]}, "/pin/1/position"),
    ("/v1/recommend", {"at_most": [{"field": "tags", "count": 1}] * 2}, "/at_most/1/field"),
    ("/v1/recommend", {"explore": 1.1}, "/explore"),
    ("/v1/recommend", {"seed": -1}, "/seed"),
    ("/v1/search", {"rules": [RULE]}, "/rules"),
    ("/v1/search", {"query": "a", "sort": [{"field": "title"}], "rules": [RULE]}, "/rules"),
    ("/v1/search", {"sort": [{"field": "title"}], "pin": [PIN]}, "/pin"),
    ("/v1/search", {"query": "a", "rules": [RULE, RULE]}, "/rules/1/name"),
    ("/v1/search", {"query": "a", "rules": [{"name": "a", "when": {}}]}, "/rules/0"),
    ("/v1/search", {"query": "a", "pin": [PIN, PIN]}, "/pin/1/item_id"),
    (
        "/v1/search",
        {"query": "a", "at_most": [{"field": "item_id", "count": 1}]},
        "/at_most/0/field",
    ),
    ("/v1/search", {"query": "a", "explore": 0.1}, "/explore"),
    ("/v1/items/i/similar", {"rules": [RULE, RULE]}, "/rules/1/name"),
    ("/v1/items/i/similar", {"rules": [{**RULE, "when": {"field": "x"}}]}, "/rules/0/when/field"),
    ("/v1/items/i/similar", {"at_most": [{"field": "tags", "count": 0}]}, "/at_most/0/count"),
    ("/v1/items/i/similar", {"at": "2026-01-01T00:00:00Z"}, "/at"),
    ("/v1/items/i/together", {"rules": [{**RULE, "bury": True}]}, "/rules/0/bury"),
    ("/v1/items/i/together", {"facets": [{"field": "item_id"}]}, "/facets/0/field"),
    ("/v1/items/i/together", {"pin": [{"item_id": "a", "position": 0}]}, "/pin/0/position"),
    ("/v1/items/i/together", {"explore": 0.1}, "/explore"),
    ("/v1/rows", {"facets": [{"field": "colour"}]}, "/facets/0/field"),
    ("/v1/rows", {"pin": [PIN]}, "/pin"),
    ("/v1/score", score(filter={"field": "tags", "eq": "a"}), "/filter"),
    ("/v1/score", score(at_most=[{"field": "tags", "count": 1}]), "/at_most"),
    # lists
    ("/v1/search", {"offset": 1, "cursor": "x"}, "/offset"),
    ("/v1/search", {"offset": 100_001}, "/offset"),
    ("/v1/search", {"sort": [{"field": "price"}]}, "/sort/0/field"),
    ("/v1/search", {"sort": [{"field": "title", "order": "up"}]}, "/sort/0/order"),
    ("/v1/search", {"sort": [{"field": "title"}] * 6}, "/sort"),
    ("/v1/search", {"facets": [{"field": "item_id"}]}, "/facets/0/field"),
    ("/v1/search", {"facets": [{"field": "tags", "limit": 0}]}, "/facets/0/limit"),
    ("/v1/search", {"facets": [{"field": "tags"}] * 21}, "/facets"),
    ("/v1/search", {"fields": ["titel"]}, "/fields/0"),
    ("/v1/search", {"fields": ["tags"] * 51}, "/fields"),
    # ready questions
    ("/v1/popular", {"by": "best"}, "/by"),
    ("/v1/popular", {"window": "7 days"}, "/window"),
    ("/v1/popular", {"window": "0d"}, "/window"),
    ("/v1/popular", {"by": "rated", "half_life": "1d"}, "/half_life"),
    ("/v1/popular", {"by": "newest", "type": "view"}, "/type"),
    ("/v1/popular", {"by": "trending", "window": "1h"}, "/window"),
    ("/v1/popular", {"by": "trending", "half_life": "9w"}, "/half_life"),
    ("/v1/popular", {"exclude_seen": True}, "/exclude_seen"),
    ("/v1/rows", {"rows": 0}, "/rows"),
    ("/v1/rows", {"limit": 51}, "/limit"),
    ("/v1/rows", {"explain": 1}, "/explain"),
    # fields that would do nothing
    ("/v1/score", score(retrieval={"k": 3}), "/retrieval/k"),
    ("/v1/recommend", {"retrieval": {"mode": "exact", "probes": 3}}, "/retrieval/probes"),
    ("/v1/rows", {"retrieval": {"mode": "coarse", "max_error": 0.1}}, "/retrieval/max_error"),
    ("/v1/items/i/similar", {"retrieval": {"max_error": 0.1}}, "/retrieval/max_error"),
    ("/v1/search", {"query": "a", "retrieval": {"max_error": 0.1}}, "/retrieval/max_error"),
    ("/v1/attend", attend(rows(), retrieval={"max_error": 0.1}), "/retrieval/max_error"),
    (
        "/v1/attend",
        attend(rows(), scorer="additive", retrieval={"mode": "coarse", "probes": 2}),
        "/retrieval/probes",
    ),
    ("/v1/attend", attend(rows(), exclude_self=True), "/exclude_self"),
    ("/v1/attend", attend({"user_id": "u"}, {"text": "a"}, exclude_self=True), "/exclude_self"),
    ("/v1/popular", {"retrieval": {}}, "/retrieval"),
    ("/v1/items/i/together", {"retrieval": {}}, "/retrieval"),
    *(
        ("/v1/search", {**body, **field}, f"/{next(iter(field))}")
        for body, fields in (
            ({"query": "a"}, OF_EVENTS),
            ({}, [*OF_EVENTS, *OF_LISTS, {"highlight": True}, {"retrieval": {"mode": "coarse"}}]),
            ({"query": "a", "sort": [{"field": "title"}]}, [*OF_EVENTS, *OF_LISTS]),
        )
        for field in fields
    ),
    # attend
    ("/v1/attend", attend({}), "/memory"),
    ("/v1/attend", attend(rows(user_id="u")), "/memory"),
    ("/v1/attend", attend({"keys": [[1, 2]]}), "/memory"),
    ("/v1/attend", attend({"catalogue": False}), "/memory/catalogue"),
    ("/v1/attend", attend(rows(keys=[[1, 2], [3]])), "/memory/keys/1"),
    ("/v1/attend", attend(rows(keys=[[], []])), "/memory/keys/0"),
    ("/v1/attend", attend(rows(keys=[[1, 2], [3, True]])), "/memory/keys/1/1"),
    ("/v1/attend", attend(rows(keys=[1, 2])), "/memory/keys/0"),
    ("/v1/attend", attend(rows(values=[[1]])), "/memory/values"),
    ("/v1/attend", attend(rows(values=[[1e300], [1]])), "/memory/values"),
    ("/v1/attend", attend(rows(bias=[1])), "/memory/bias"),
    ("/v1/attend", attend(rows(visible=[True])), "/memory/visible"),
    ("/v1/attend", attend(rows(visible=[1, 0])), "/memory/visible/0"),
    ("/v1/attend", attend(rows(), {"vector": [1, 2], "text": "a"}), "/query"),
    ("/v1/attend", attend(rows(), {"nothing": 1}), "/query/nothing"),
    ("/v1/attend", attend(rows(), heads=0), "/heads"),
    ("/v1/attend", attend(rows(), scorer="euclid"), "/scorer"),
    ("/v1/attend", attend(rows(), limit=0), "/limit"),
    ("/v1/users/u/merge", {"from": ""}, "/from"),
    ("/v1/users/u/merge", {"source": "a"}, "/from"),
    ("/v1/models/train", {"options": {"epochs": [1]}}, "/options/epochs"),
]


@pytest.mark.parametrize(("path", "body", "pointer"), BAD)
def test_bad_input_is_refused_and_named(client: Client, path: str, body: Any, pointer: str) -> None:
    """Wrong input is 422 problem+json, and the offending field is named by its pointer."""
    answer = client.post(path, json=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert pointer in [error["pointer"] for error in problem["errors"]]
    assert all(error["in"] == "body" and error["detail"] for error in problem["errors"])
    pointers = [error["pointer"] for error in problem["errors"]]
    assert len(pointers) == len(set(pointers))


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        '"\\ud800"',
        '"\\udc00\\ud800"',
        "{",
        "",
        "'x'",
        "[1,]",
        "\ufeff1",
        "1 2",
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_no_json_is_refused(client: Client, text: str) -> None:
    """NaN, infinity, lone surrogates and malformed or deep JSON are 422."""
    for body in (text, f'{{"events": [{{"user_id": "u", "item_id": "i", "weight": {text}}}]}}'):
        answer = client.raw("/v1/events", body)
        assert (answer.status_code, answer.json()["errors"][0]["in"]) == (422, "body")


def test_bytes_that_are_no_utf8_are_refused(client: Client) -> None:
    """A body that is not UTF-8 is 422."""
    assert client.raw("/v1/search", b'{"query": "caf\xe9"}').status_code == 422


def test_both_dimensions_are_named(client: Client) -> None:
    detail = client.post("/v1/events", json=event(key=[1, 2, 3])).json()["detail"]
    assert "3 dimensions" in detail
    assert "set to 4" in detail


@pytest.mark.parametrize(
    ("weight", "detail"),
    [
        (0, "must be above 0 (got 0); leave out an event that counts for nothing"),
        (-3, "must be above 0 (got -3); an event of type dislike says that a user does not want"),
    ],
)
def test_a_weight_that_is_not_above_zero_is_explained(
    client: Client, weight: float, detail: str
) -> None:
    """The error names the value, and says what to send instead."""
    assert detail in client.post("/v1/events", json=event(weight=weight)).json()["detail"]


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"timestamp": "2026-01-31"}, "such as 2000-12-31T22:12:40Z (got '2026-01-31')"),
        ({"timestamp": "2026-02-30T09:30:00Z"}, "month (got '2026-02-30T09:30:00Z')"),
        ({"timestamp": 1_769_851_800}, "2026-01-31T09:30:00Z (got 1769851800)"),
        ({"weight": "heavy"}, "must be a number (got 'heavy')"),
        ({"item_id": True}, "must be a string (got true)"),
        ({"item_id": None}, "must be a string (got null)"),
        ({"wieght": 1}, "is not a field here; check its spelling, or see /docs"),
    ],
)
def test_a_wrong_value_is_shown(client: Client, fields: dict[str, Any], got: str) -> None:
    """The error has the value that was given, so that it is found in a batch."""
    (error,) = client.post("/v1/events", json=event(**fields)).json()["errors"]
    assert error["detail"].endswith(got)


def test_attributes_are_bounded(client: Client) -> None:
    """Attributes that are nested too deeply are refused at the depth limit."""
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    answer = client.post("/v1/items", json=item(attributes=deep))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith("/items/0/attributes/a/a/a")


JSON = {"content-type": "application/json"}
WIDE = {f"n{n}": {"lat": 1, "lon": n} for n in range(20_000)}


@pytest.mark.parametrize(
    ("fields", "pointer", "detail"),
    [
        ({"attributes": WIDE}, "/attributes", "more than 1,000 names"),
        ({"attributes": {"a": [WIDE]}}, "/attributes", "more than 1,000 names"),
        ({"attributes": {"a": {"b" * 2_000: 1}}}, "/attributes/a", "name of 2,000 characters"),
        ({"tags": ["a"] * 1_001}, "/tags", "at most 1000 items"),
        ({"categories": ["a"] * 1_001}, "/categories", "at most 1000 items"),
        ({"interests": ["a"] * 1_001}, "/interests", "at most 1000 items"),
    ],
)
def test_wide_records_are_refused(
    client: Client, fields: dict[str, Any], pointer: str, detail: str
) -> None:
    """Each name of attributes is a column of the catalogue; a list in them may be long."""
    is_user = fields.keys() & {"attributes", "interests"}
    answers = [client.put("/v1/users/u", json=fields)] if is_user else []
    if "interests" not in fields:
        answers.append(client.patch("/v1/items/i", json=fields))
        answer = client.post("/v1/items", json=item(**fields))
        assert answer.json()["errors"][0]["pointer"] == f"/items/0{pointer}"
        answers.append(answer)
    for answer in answers:
        (error,) = answer.json()["errors"]
        assert answer.status_code == 422
        assert error["pointer"].endswith(pointer)
        assert detail in error["detail"]


@pytest.mark.parametrize("number", [2**63, 2**64, 10**30, -(2**63) - 1, -(2**70)])
def test_integers_beyond_64_bits_are_refused(client: Client, number: int) -> None:
    """They are named, and never rounded; floats of their size are allowed."""
    attributes = {"a": [{"b": number}]}
    where = {"field": "attributes.a", "eq": number}
    for path, body, pointer in (
        ("/v1/items", item(attributes=attributes), "/items/0/attributes/a/0/b"),
        ("/v1/search", {"query": "a", "filter": where}, "/filter/eq"),
        (
            "/v1/search",
            {"query": "a", "filter": {**where, "eq": 1, "in": [number]}},
            "/filter/in/0",
        ),
        ("/v1/search", {"query": "a", "filter": {"attributes": {"a": number}}}, "/filter/attri"),
        ("/v1/items", {"items": [{"item_id": number}]}, "/items/0/item_id"),
        ("/v1/models/train", {"options": {"seed": number}}, "/options/seed"),
    ):
        answer = client.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["pointer"].startswith(pointer)
        assert "64 bits" in error["detail"] or pointer.endswith("item_id")


def test_many_validation_errors_are_truncated(client: Client) -> None:
    """The errors of a response are limited to 20, with the number of the others."""
    answer = client.post("/v1/events", json={"events": [{}] * 10_000})
    problem = answer.json()
    assert (answer.status_code, len(problem["errors"])) == (422, 20)
    assert "19999 more" in problem["detail"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/items?limit=0", "/limit"),
        ("/v1/items?limit=1001", "/limit"),
        ("/v1/items?limit=true", "/limit"),
        ("/v1/items?limt=5", "/limt"),
        ("/v1/items?cursor=nonsense", "/cursor"),
        ("/v1/users/u/history?cursor=%00", "/cursor"),
        ("/v1/items/i/similar?categories_any=", "/categories_any/0"),
        ("/v1/items/i/similar?space=text", "/space"),
        ("/v1/items/i/similar?k=3", "/k"),
        ("/v1/items/i/similar?max_error=0.1", "/max_error"),
        ("/v1/items/i/audience?retrieval=exact&probes=3", "/probes"),
        ("/v1/users/u/affinities?max_error=0.1", "/max_error"),
    ],
)
def test_bad_query_parameters_are_named(client: Client, path: str, name: str) -> None:
    """Wrong or unknown query parameters are 422 too, and said to be in the query."""
    answer = client.get(path)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert (error["in"], error["pointer"]) == ("query", name)


@pytest.mark.parametrize("body", [b"", orjson.dumps(event())])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None]
)
@pytest.mark.parametrize("path", ["/v1/events", "/v1/models/train", "/v1/models/v1/activate"])
def test_posts_are_json(client: Client, path: str, kind: str | None, body: bytes) -> None:
    """A POST of another media type than JSON is 415, even with an empty body."""
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == 415
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_empty_body_may_be_json() -> None:
    """Training and activation accept an empty body of type JSON."""
    with serving() as client:
        assert client.raw("/v1/models/train", b"").status_code == 202
        assert client.raw("/v1/models/v1/activate", b"").status_code == 200


def test_json_may_say_its_charset(client: Client) -> None:
    """Parameters of the JSON media type are ignored."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = client.post("/v1/score", content=b"{}", headers=headers)
    assert answer.json()["errors"][0]["pointer"] == "/item_ids"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/v1/items/a/b", 404, None),
        ("GET", "/v1/items/", 404, None),
        ("GET", "/v1/%FF", 404, None),
        ("PUT", "/v1/items", 405, "GET, HEAD, POST"),
        ("POST", "/v1/items/a", 405, "GET, HEAD, PATCH, DELETE"),
        ("DELETE", "/v1/score", 405, "POST"),
        ("BREW", "/v1/users/u", 405, "GET, HEAD, PUT, DELETE"),
    ],
)
def test_wrong_paths_and_methods_are_problems(
    client: Client, method: str, path: str, status: int, allow: str | None
) -> None:
    """404 and 405 are problem+json, and 405 has all allowed methods."""
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers.get("allow") == allow


@pytest.mark.parametrize(
    ("end", "detail"),
    [(', "no": 1}', "/no"), (', "limit": 1', "JSON"), (f', "limit": {2**64}}}', "/limit")],
)
def test_large_bodies_are_checked_as_small_ones(client: Client, end: str, detail: str) -> None:
    """A body that is validated beside the event loop has the same errors as any other."""
    ids = ",".join(f'"item {number}"' for number in range(9_000))
    bad = client.raw("/v1/recommend", f'{{"exclude": [{ids}]{end}')
    assert bad.status_code == 422
    (error,) = bad.json()["errors"]
    assert error["in"] == "body"
    assert detail in (error["pointer"] or error["detail"])
