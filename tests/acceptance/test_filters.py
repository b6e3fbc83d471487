"""Filters, facets, lists and fields over HTTP, compared with loops over the stored items."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from service.domain.records import Item
from tests.support import tiny
from tests.support.server import Server
from tests.support.tiny import AT, DAY, NOON

ITEMS = {item.item_id: item for item in tiny.items()}
# English space and music items of even number, published in the ten days before noon.
FILTER = {
    "all": [
        {"field": "categories", "in": ["space", "music"]},
        {"any": [{"field": "categories", "eq": "even"}, {"field": "attributes.number", "gt": 99}]},
        {"none": [{"field": "attributes.language", "eq": "de"}]},
        {"field": "published_at", "gte": "2025-12-22T12:00:00Z"},
        {"field": "attributes.number", "gte": 1, "lte": 8},
    ]
}


def is_wanted(item: Item) -> bool:
    number = item.attributes["number"]
    return (
        bool({"space", "music"} & {*item.categories})
        and "even" in item.categories
        and item.attributes["language"] != "de"
        and (item.published_at or 0) >= NOON - 10 * DAY
        and 1 <= number <= 8
    )


WANTED = {id_ for id_, item in ITEMS.items() if is_wanted(item)}
LANGUAGE = {"field": "attributes.language"}
TEXT = "its values are text"
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/recommend", {"user_id": "u0", "exclude_seen": False, "at": AT}),
    ("/v1/search", {"query": "moon guitar melody", "fill": True}),
    ("/v1/search", {}),
    ("/v1/items/cooking-00/similar", {}),
]


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


@pytest.mark.parametrize(("path", "body"), QUESTIONS)
def test_every_question_takes_the_filter(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Each answers exactly the items that pass."""
    answer = ask(http, path, **body, filter=FILTER, limit=100)
    assert len(WANTED) == 8
    assert {*ids(answer)} == WANTED
    assert "warnings" not in answer


@pytest.mark.parametrize(("path", "body"), QUESTIONS)
def test_facets_count_what_passes(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Counts are those of the items that may be answered, of a search those that match."""
    facets = [{"field": "categories", "limit": 2}, {"field": "attributes.number"}]
    answer = ask(http, path, **body, filter=FILTER, facets=facets, limit=1)
    by_category, by_number = answer["facets"]
    assert len(answer["items"]) == 1
    if body.get("query"):
        assert 1 <= answer["total"] <= len(WANTED)
        return
    counts = Counter(name for id_ in WANTED for name in ITEMS[id_].categories)
    assert by_category == {
        "field": "categories",
        "values": [{"value": name, "count": counts[name]} for name in ("even", "music")],
        "other": counts["space"],
    }
    assert (by_number["min"], by_number["max"], answer["total"]) == (2, 8, 8)


def test_recommend_counts_without_what_was_seen(http: httpx.Client) -> None:
    """Items that are left out are not counted either."""
    excluded = ["space-00", "space-01"]
    body = {"user_id": "u0", "exclude": excluded, "facets": [{"field": "categories", "limit": 9}]}
    seen = {e.item_id for e in tiny.events() if e.user_id == "u0"} | {*excluded}
    answer = ask(http, "/v1/recommend", **body)
    assert answer["total"] == len(ITEMS) - len(seen)
    spaces = next(v for v in answer["facets"][0]["values"] if v["value"] == "space")
    left = [id_ for id_ in ITEMS if id_.startswith("space") and id_ not in seen]
    assert spaces["count"] == len(left)


@pytest.mark.parametrize("query", ["", " ", "moon"])
def test_lists_have_the_order_of_their_fields(http: httpx.Client, query: str) -> None:
    """Pages by cursor and by offset are those of one sorted list, of all items or of matches."""
    sort = [{"field": "attributes.language"}, {"field": "attributes.number", "order": "desc"}]
    body: dict[str, Any] = {"query": query, "sort": sort, "limit": 7}
    pages, cursor = [], None
    while True:
        answer = ask(http, "/v1/search", **body, **({"cursor": cursor} if cursor else {}))
        pages += ids(answer)
        cursor = answer.get("cursor")
        if cursor is None:
            break
    listed = [ITEMS[id_] for id_ in pages]
    assert listed == sorted(
        listed, key=lambda i: (i.attributes["language"], -i.attributes["number"], i.item_id)
    )
    assert answer["total"] == len(pages) == len({*pages})
    texts = {id_: f"{item.title} {item.description} {item.tags}" for id_, item in ITEMS.items()}
    having = {id_ for id_, text in texts.items() if query.strip() in text}
    assert having <= {*pages}
    assert ids(ask(http, "/v1/search", **body, offset=3)) == pages[3:10]
    assert all("score" not in item for item in answer["items"])


def test_an_empty_query_lists_the_newest_first(http: httpx.Client) -> None:
    """Without anything, all items are listed, and a deep page is empty."""
    answer = ask(http, "/v1/search", limit=1000)
    newest = sorted(ITEMS.values(), key=lambda item: (-(item.published_at or 0), item.item_id))
    assert ids(answer) == [item.item_id for item in newest]
    assert "cursor" not in answer
    assert ask(http, "/v1/search", offset=1000)["items"] == []


def test_a_cursor_of_another_order_is_refused(http: httpx.Client) -> None:
    """A cursor belongs to one order of fields, and is nothing that a client can make."""
    cursor = ask(http, "/v1/search", limit=1)["cursor"]
    for wrong in (
        {"cursor": cursor, "sort": [{"field": "title"}]},
        {"cursor": "e30="},
        {"cursor": "é"},
    ):
        answer = http.post("/v1/search", json=wrong)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == "/cursor"


@pytest.mark.parametrize(
    ("path", "body"),
    [*QUESTIONS, ("/v1/score", {"item_ids": ["space-03"]})],
)
def test_fields_come_beside_the_score(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Each item carries the fields that were asked for, as far as it has them."""
    names = ["categories", "attributes.number", "attributes.none", "published_at", "description"]
    for item in ask(http, path, **body, fields=names)["items"]:
        stored = ITEMS[item["item_id"]]
        assert item["fields"] == {
            "categories": list(stored.categories),
            "attributes.number": stored.attributes["number"],
            "published_at": http.get(f"/v1/items/{stored.item_id}").json()["published_at"],
            "description": stored.description,
        }


@pytest.mark.parametrize(
    ("filter_", "warning"),
    [
        (
            {"all": [{"field": "categories", "in": ["space", "spcae"]}]},
            ("/filter/all/0/in/1", "no item has the category 'spcae'; did you mean 'space'?"),
        ),
        (
            {"categories": {"any": ["Space"]}},
            ("/filter/categories/any/0", "no item has the category 'Space'; did you mean 'space'?"),
        ),
        (
            {"attributes": {"langauge": "en"}},
            (
                "/filter/attributes/langauge",
                "no item has the attribute 'langauge'; did you mean 'language'?",
            ),
        ),
        (
            {"none": [{"field": "attributes.number", "eq": "3"}]},
            (
                "/filter/none/0/eq",
                "no item has the value of attributes.number '3'; its values are numbers",
            ),
        ),
        (
            {"field": "attributes.nothing", "exists": True},
            ("/filter/field", "no item has the attribute 'nothing'"),
        ),
        (
            {"any": [{"field": "attributes.number", "eq": 1}, LANGUAGE | {"in": [1, 2.5]}]},
            ("/filter/any/1/in", f"no item has numbers in {LANGUAGE['field']}; {TEXT}"),
        ),
        (
            LANGUAGE | {"eq": 7},
            ("/filter/eq", f"no item has numbers in {LANGUAGE['field']}; {TEXT}"),
        ),
        (
            LANGUAGE | {"within_km": {"lat": 1, "lon": 1, "km": 1}},
            ("/filter/within_km", f"no item has places in {LANGUAGE['field']}; {TEXT}"),
        ),
        (
            {"field": "attributes.number", "gte": 1, "contains": "5"},
            (
                "/filter/contains",
                "no item has text in attributes.number; its values are numbers",
            ),
        ),
        (
            {"field": "attributes.number", "lt": "5"},
            ("/filter/lt", "no item has text in attributes.number; its values are numbers"),
        ),
    ],
)
def test_values_that_no_item_has_are_warned_of(
    http: httpx.Client, filter_: dict[str, Any], warning: tuple[str, str]
) -> None:
    """The answer names the place in the filter, and the nearest value that there is."""
    answer = ask(http, "/v1/search", filter=filter_)
    assert answer["warnings"] == [{"pointer": warning[0], "detail": warning[1]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [*QUESTIONS, ("/v1/popular", {}), ("/v1/rows", {"user_id": "u1"}),
     ("/v1/search", {"query": "moon"}), ("/v1/items/space-01/similar", {}),
     ("/v1/search", {"query": "moon", "memory": "history", "user_id": "u1"}),
     ("/v1/items/space-01/together", {})],
)  # fmt: skip
def test_a_comparison_with_a_type_that_no_item_has_is_warned_of(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """A number below which no text is would be an empty answer without a word, in each question."""
    wanted, detail = LANGUAGE | {"lt": 5}, f"no item has numbers in {LANGUAGE['field']}; {TEXT}"
    warning = {"pointer": "/filter/lt", "detail": detail}
    assert warning in ask(http, path, **body, filter=wanted)["warnings"]
    if "memory" in body or (path == "/v1/search" and not body):
        return  # without rules
    rules = [{"name": "cheap", "when": wanted, "boost": 1}]
    warnings = ask(http, path, **body, rules=rules)["warnings"]
    assert {"pointer": "/rules/0/when/lt", "detail": detail} in warnings


def test_attributes_that_are_counted_or_sorted_by_are_warned_of(http: httpx.Client) -> None:
    """A misspelt attribute in facets or sort is named, as one in a filter is."""
    wrong = "attributes.numbre"
    body = {"facets": [{"field": wrong}], "sort": [{"field": "title"}, {"field": wrong}]}
    warnings = ask(http, "/v1/search", **body)["warnings"]
    assert [warning["pointer"] for warning in warnings] == ["/facets/0/field", "/sort/1/field"]
    assert "did you mean 'number'?" in warnings[0]["detail"]


def test_a_filter_follows_writes(http: httpx.Client) -> None:
    """An item that is written, changed and deleted passes filters accordingly at once."""
    wanted = {"field": "attributes.place", "within_km": {"lat": 52.5, "lon": 13.4, "km": 30}}
    item = {
        "item_id": "berlin",
        "hidden": False,
        "attributes": {"place": {"lat": 52.4, "lon": 13.1}},
    }
    try:
        http.post("/v1/items", json={"items": [item]}).raise_for_status()
        assert ids(ask(http, "/v1/search", filter=wanted)) == ["berlin"]
        moved = item | {"attributes": {"place": {"lat": 48.1, "lon": 11.6}}}
        http.post("/v1/items", json={"items": [moved]}).raise_for_status()
        assert ids(ask(http, "/v1/search", filter=wanted)) == []
    finally:
        http.delete("/v1/items/berlin").raise_for_status()
    assert ask(http, "/v1/search", filter=wanted)["warnings"][0]["pointer"] == "/filter/field"


def test_null_is_a_value_of_an_attribute(untrained: Server) -> None:
    """POST keeps it, where a patch removes the member; `eq: null` is met where it is stored."""
    attributes = {"null-1": {"a": {"b": None}}, "null-2": {"a": None, "c": 1}}
    body = {"items": [{"item_id": name, "attributes": a} for name, a in attributes.items()]}
    with untrained.client() as http:
        try:
            http.post("/v1/items", json=body).raise_for_status()
            for name, expected in attributes.items():
                assert http.get(f"/v1/items/{name}").json()["attributes"] == expected
            answer = ask(http, "/v1/search", filter={"field": "attributes.a", "eq": None})
            assert ids(answer) == ["null-2"]
            http.patch("/v1/items/null-2", json={"attributes": {"c": None}}).raise_for_status()
            assert http.get("/v1/items/null-2").json()["attributes"] == {"a": None}
        finally:
            for name in attributes:
                http.delete(f"/v1/items/{name}")
