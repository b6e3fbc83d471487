"""The filter language on the wire: what each form means, and where each error points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from models.catalogue.item_filter import EVERYTHING, Condition, Group, conditions
from models.catalogue.item_filter import ItemFilter as Filter
from service.questions.parts import MAX_CONDITIONS, MAX_DEPTH, MAX_VALUES, FilterIn
from tests.support.http_fake import Client, serving


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as served:
        yield served


def nested(depth: int) -> dict[str, Any]:
    """One condition, so many filters deep."""
    innermost: dict[str, Any] = {"field": "title", "eq": "a"}
    for _ in range(depth - 1):
        innermost = {"all": [innermost]}
    return innermost


A = Condition("attributes.a", {"eq": 1})
MEANINGS: list[tuple[dict[str, Any], Filter]] = [
    ({}, EVERYTHING),
    ({"field": "attributes.a", "eq": 1}, A),
    ({"field": "attributes.a", "eq": None}, Condition("attributes.a", {"eq": None})),
    (
        {"field": "attributes.a.b", "gte": 1, "lt": 2.5},
        Condition("attributes.a.b", {"gte": 1, "lt": 2.5}),
    ),
    (
        {"field": "published_at", "in": ["1970-01-01T00:00:01Z"], "exists": True},
        Condition("published_at", {"in": [1_000_000], "exists": True}),
    ),
    (
        {"field": "attributes.a", "within_km": {"lat": 1, "lon": 2, "km": 3}},
        Condition("attributes.a", {"within_km": (1, 2, 3)}),
    ),
    (
        {"any": [{"field": "attributes.a", "eq": 1}], "none": []},
        Group("all", (Group("any", (A,)), Group("none"))),
    ),
    (
        {"none": [{"attributes": {"a": 1}}]},
        Group("none", (A,)),
    ),
    (
        {
            "attributes": {"a": 1, "b/c": [True, None]},
            "published": {"until": "1970-01-01T00:00:01Z"},
        },
        Group(
            "all",
            (
                A,
                Condition("attributes.b/c", {"in": [True, None]}),
                Condition("published_at", {"lt": 1_000_000}),
            ),
        ),
    ),
]


@pytest.mark.parametrize(("written", "meant"), MEANINGS)
def test_filters_mean_conditions(client: Client, written: dict[str, Any], meant: Filter) -> None:
    """Every question hands the same value to the engine, whichever form it was written in."""
    client.post("/v1/items", json={"items": [{"item_id": "a"}]})
    for path in ("/v1/recommend", "/v1/search", "/v1/items/a/similar"):
        answer = client.post(path, json={"filter": written})
        assert answer.status_code == 200, answer.text
        assert client.engine.asked[-1].filter == meant


def test_conditions_know_their_places() -> None:
    """Pointers name the operands, of the short form where they were written."""
    written = {
        "all": [{"any": [{"field": "tags", "in": ["x"]}]}],
        "categories": {"all": ["y"]},
        "attributes": {"b/c": 1},
    }
    group = FilterIn.model_validate(written).conditions()
    places = [
        [at + pointer for pointer in one.pointers.values()]
        for one, at in conditions(group, "/filter")
    ]
    assert places == [
        ["/filter/all/0/any/0/field", "/filter/all/0/any/0/in"],
        ["/filter/categories/all/0"],
        ["/filter/attributes/b~1c", "/filter/attributes/b~1c"],
    ]


NAMES = "item_id, title, categories, tags, published_at and attributes.NAME"
TIME = "must be a time such as 2026-01-31T09:30:00Z"
ERRORS: list[tuple[Any, str, str]] = [
    ([], "", "must be a JSON object"),
    ({"all": {}}, "/all", "must be a JSON array"),
    ({"all": [1]}, "/all/0", "must be a JSON object"),
    ({"al": []}, "/al", "is not a field here; check its spelling, or see /docs"),
    ({"field": "title"}, "", "needs a comparison beside `field`: one of eq, in, gt"),
    ({"all": [{"eq": 1}]}, "/all/0/field", "is required beside `eq`"),
    ({"field": None, "eq": 1}, "/field", "is required beside `eq`"),
    ({"field": 3, "eq": 1}, "/field", "must be a string"),
    ({"field": "colour", "eq": 1}, "/field", f"must be one of {NAMES}"),
    ({"field": "attributes.", "eq": 1}, "/field", f"must be one of {NAMES}"),
    ({"field": "attributes." + "a" * 990, "eq": 1}, "/field", "must have at most 1000 characters"),
    ({"field": "title", "eq": "a", "any": []}, "/any", "must stand in an object of its own"),
    (
        {"any": [{"field": "attributes.a", "equals": 1}]},
        "/any/0/equals",
        "is not a field here; check its spelling, or see /docs",
    ),
    (
        {"all": [{"field": "tags", "eq": "a"}, {"field": "attributes.a", "gte": [1]}]},
        "/all/1/gte",
        "must be a number or a string",
    ),
    ({"field": "attributes.a", "gte": True}, "/gte", "must be a number or a string"),
    ({"field": "attributes.a", "gte": 1, "lt": "b"}, "/lt", "a number or a string as `gte` is"),
    ({"field": "attributes.a", "eq": {}}, "/eq", "must be a string, number, boolean or null"),
    ({"field": "attributes.a", "eq": 1 << 63}, "/eq", "integers must fit in 64 bits"),
    ({"field": "attributes.a", "in": 1}, "/in", "must be a JSON array"),
    ({"field": "attributes.a", "in": [1, []]}, "/in/1", "must be a string, number, boolean or"),
    ({"field": "attributes.a", "in": [1] * 1_001}, "/in", "at most 1000 items"),
    ({"field": "attributes.a", "exists": 1}, "/exists", "must be true or false"),
    ({"field": "attributes.a", "exists": False, "eq": 1}, "/exists", "must be true beside"),
    ({"field": "attributes.a", "contains": 1}, "/contains", "must be a string"),
    ({"field": "title", "eq": 1}, "/eq", "must be a string"),
    ({"field": "tags", "in": ["a", 1]}, "/in/1", "must be a string"),
    ({"field": "categories", "gt": 1}, "/gt", "must be a string"),
    ({"field": "categories", "eq": None}, "/eq", "must be a string"),
    ({"field": "published_at", "gte": "2026"}, "/gte", TIME),
    ({"field": "published_at", "in": ["2026-01-01T00:00:00Z", 5]}, "/in/1", TIME),
    (
        {"field": "published_at", "contains": "2026"},
        "/contains",
        "is none of published_at, which takes eq, in, gt, gte, lt, lte, exists",
    ),
    (
        {"field": "tags", "within_km": {"lat": 1, "lon": 1, "km": 1}},
        "/within_km",
        "is none of tags, which takes",
    ),
    ({"field": "attributes.a", "within_km": {"lat": 1, "lon": 1}}, "/within_km/km", "is required"),
    (
        {"field": "attributes.a", "within_km": {"lat": 91, "lon": 1, "km": 1}},
        "/within_km/lat",
        "must be less than or equal to 90",
    ),
    ({"categories": {"any": [1]}}, "/categories/any/0", "must be a string"),
    ({"none": [{"attributes": {"a": {}}}]}, "/none/0/attributes/a", "must be a string, number"),
    (nested(MAX_DEPTH + 1), "/all/0" * MAX_DEPTH, f"is nested too deep: {MAX_DEPTH} filters deep"),
    (nested(200), "/all/0" * MAX_DEPTH, "is nested too deep"),
    (
        {"any": [{"field": "title", "eq": "a"}] * MAX_CONDITIONS},
        "",
        f"has too many conditions: {MAX_CONDITIONS} are allowed",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("written", "pointer", "detail"), ERRORS)
def test_a_malformed_filter_is_refused_where_it_is_wrong(
    client: Client, written: Any, pointer: str, detail: str
) -> None:
    """The answer is a 422 that points at the exact place and says what is allowed there."""
    asked = len(client.engine.asked)
    for path in ("/v1/recommend", "/v1/search", "/v1/items/a/similar"):
        answer = client.post(path, json={"filter": written})
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert (error["in"], error["pointer"]) == ("body", f"/filter{pointer}")
        assert detail in error["detail"]
    assert len(client.engine.asked) == asked


def test_the_widest_filter_is_accepted(client: Client) -> None:
    """At the bounds of depth and number a filter is still answered."""
    wide = {"any": [{"field": "title", "eq": "a"}] * (MAX_CONDITIONS - 1)}
    for written in (nested(MAX_DEPTH), wide):
        assert client.post("/v1/recommend", json={"filter": written}).status_code == 200


CONDITION = {"field": "title", "eq": "a"}


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"filter": {"any": [CONDITION] * MAX_CONDITIONS}}, "/filter"),
        ({"filter": {"attributes": {str(n): 1 for n in range(MAX_CONDITIONS)}}}, "/filter"),
        ({"filter": {"categories": {"all": ["a"] * MAX_CONDITIONS}}}, "/filter"),
        ({"filter": {"categories": {"any": ["a"] * (MAX_VALUES + 1)}}}, "/filter/categories/any"),
        ({"filter": {"attributes": {"a": [1] * (MAX_VALUES + 1)}}}, "/filter/attributes/a"),
        (
            {"rules": [{"name": str(n), "when": {"any": [CONDITION] * 5}} for n in range(40)]},
            "/rules",
        ),
    ],
)
def test_conditions_are_bounded_as_a_whole(
    client: Client, body: dict[str, Any], pointer: str
) -> None:
    """Conditions count in every form, and those of all rules of a question together."""
    answer = client.post("/v1/recommend", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]


def test_the_values_of_an_attribute_are_one_condition_whatever_its_name(client: Client) -> None:
    """An attribute may be called as a group of conditions is."""
    for name in ("all", "any", "b"):
        values = [f"v{n}" for n in range(MAX_CONDITIONS + 1)]
        answer = client.post("/v1/recommend", json={"filter": {"attributes": {name: values}}})
        assert answer.status_code == 200, answer.text
