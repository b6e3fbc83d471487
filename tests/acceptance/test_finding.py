"""Stock codes, compounds, prefixes, misspellings and nonsense, searched for over HTTP."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import Server

THINGS = [
    "LANTERN",
    "KETTLE",
    "BASKET",
    "CUSHION",
    "MIRROR",
    "DOORMAT",
    "CANDLE",
    "GARLAND",
    "TEAPOT",
    "PICTURE",
]
COLOURS = ["RED", "IVORY", "BLUE", "CREAM", "GREEN", "PINK", "SILVER", "BLACK"]
SIZES = ["SMALL", "LARGE", "MEDIUM", "VINTAGE"]
NAMED: list[dict[str, Any]] = [
    {"item_id": "22423", "title": "REGENCY CAKESTAND 3 TIER"},
    {"item_id": "21843", "title": "RETROSPOT CAKE STAND"},
    {"item_id": "book-1", "title": "Gardens", "attributes": {"ISBN": "978-3-16-148410-0"}},
    {"item_id": "drill", "title": "Cordless drill", "attributes": {"maker_no": "BX-900/7"}},
    {"item_id": "wool", "title": "Hand cream", "description": "made of lanolin"},
    {"item_id": "nameless-77"},
    {"item_id": "hidden-1", "title": "SECRET", "hidden": True, "attributes": {"sku": "ZZ-1"}},
]


def generated() -> list[dict[str, Any]]:
    """320 products in capitals with stock codes, and some with more to find them by."""
    made = [
        {"item_id": f"{85_000 + at}{letter}", "title": f"{size} {colour} {thing}"}
        for at, (thing, colour, size) in enumerate(itertools.product(THINGS, COLOURS, SIZES))
        for letter in random.Random(at).choice(["A", "B", ""]) or [""]
    ]
    return [*made, *NAMED]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with the generated catalogue."""
    data: Path = tmp_path_factory.mktemp("finding") / "data"
    with Server(data, keyword_fields="isbn, sku, Maker No") as server, server.client() as client:
        client.post("/v1/items", json={"items": generated()}).raise_for_status()
        yield client


def search(http: httpx.Client, query: str, **more: Any) -> dict[str, Any]:
    """Return the answer to a search, which must succeed."""
    answer = http.post("/v1/search", json={"query": query, "limit": 5} | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(answer: dict[str, Any]) -> list[str]:
    """The items of an answer, in its order."""
    return [item["item_id"] for item in answer["items"]]


def test_two_hundred_items_are_first_by_their_codes(http: httpx.Client) -> None:
    """Each code finds its item first, in any case, and by the code alone."""
    codes = [item["item_id"] for item in generated() if item["item_id"][0] == "8"]
    for code in random.Random(0).sample(codes, 200):
        for typed in (code, code.lower(), f" {code[:3]}-{code[3:]}"):
            found = search(http, typed)
            assert ids(found)[0] == code
            assert found["items"][0]["matched"] == {"item_id": 1.0}
            assert not {"corrections", "did_you_mean", "warnings"} & found.keys()


def test_attributes_match_as_keywords(http: httpx.Client) -> None:
    """Named attributes match whatever their separators, before words; nameless items by id."""
    for typed in ("9783161484100", "978 3 16 148410 0", "978-3-16"):
        found = search(http, typed)
        assert ids(found)[0] == "book-1"
        assert found["items"][0]["matched"] == {"attributes.ISBN": 1.0}
    assert ids(search(http, "bx9007 red lantern"))[0] == "drill"
    assert ids(search(http, "NAMELESS 77"))[0] == "nameless-77"
    assert ids(search(http, "zz1")) == []
    assert ids(search(http, "22423", filter={"field": "title", "eq": "Gardens"})) == []


def test_compounds_are_split_and_joined(http: httpx.Client) -> None:
    """ "cake stand" finds CAKESTAND and "cakestand" CAKE STAND, and so do other words."""
    for typed in ("cake stand", "cakestand"):
        assert {"22423", "21843"} <= set(ids(search(http, typed)))
    assert all("DOORMAT" in item["title"] for item in search(http, "door mat")["items"][:3])


def test_star_sees_every_field(http: httpx.Client) -> None:
    """A star finds words of titles and of descriptions, and keywords."""
    found = set(ids(search(http, "lan*", limit=100)))
    assert "wool" in found
    assert {item["item_id"] for item in generated() if "LANTERN" in item.get("title", "")} <= found
    assert ids(search(http, "bx*")) == ["drill"]


def test_nonsense_finds_nothing_and_says_so(http: httpx.Client) -> None:
    """Of 100 strings none finds anything, and each answer says so; lists and facets agree."""
    rng = random.Random(7)
    for _ in range(100):
        words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(6, 12)))
                 for _ in range(rng.randint(1, 3))]  # fmt: skip
        found = search(http, " ".join(words))
        assert found["items"] == []
        (warning,) = found["warnings"]
        assert warning["pointer"] == "/query"
        assert " ".join(words) in warning["detail"]
    assert "corrections" not in found
    facets = [{"field": "title"}]
    assert search(http, "xqvzkwj", facets=facets)["total"] == 0
    listed = search(http, "xqvzkwj", sort=[{"field": "title"}])
    assert (listed["items"], listed["total"]) == ([], 0)
    assert listed["warnings"][0]["pointer"] == "/query"


def test_titles_lose_nothing(http: httpx.Client) -> None:
    """Every title of the catalogue finds its item among the first five."""
    for item in generated()[::7]:
        if "title" in item and not item.get("hidden"):
            assert item["item_id"] in ids(search(http, item["title"]))


def test_spelling_is_told_or_offered(http: httpx.Client) -> None:
    """An unknown word is replaced, and told; a short or a quoted one is offered a correction."""
    found = search(http, "green lanetrn")
    assert found["corrections"] == {"lanetrn": ["lantern"]}
    assert "did_you_mean" not in found
    assert all("LANTERN" in item["title"] for item in found["items"][:3])
    offered = search(http, '"lanetrn"')
    assert (offered["items"], offered["did_you_mean"]) == ([], '"lantern"')
    short = search(http, "rde ")
    assert (short["items"], short["did_you_mean"]) == ([], "red")
    assert "corrections" not in short
    assert ids(search(http, short["did_you_mean"]))
