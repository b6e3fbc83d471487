"""Search over HTTP: retrieval of keys, re-ranking by a memory, and explanations."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from models.ranking.matches import DEFAULTS
from models.text.bm25 import TITLE_WEIGHT
from models.text.encoders import StaticEncoder
from tests.support import reference, tiny
from tests.support.server import Server
from tests.support.tiny import AT, item_id

QUERY = "rocket garlic castle"
FIELDS = ("title", "description", "tags", "categories")
EVERY = {"query": QUERY, "limit": 1000, "fill": True}
SESSION = [
    {"item_id": item_id(genre, n), "type": kind, "timestamp": f"2026-01-01T11:{10 * genre + n}:00Z"}
    for genre, n, kind in ((1, 2, "view"), (1, 5, "buy"), (2, 3, "view"), (3, 1, "view"))
]


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the JSON body of a POST request, which must succeed with 200."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def search(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """All items that the query finds, for a user or a history as of `AT`."""
    when = {"at": AT} if {"user_id", "history"} & more.keys() else {}
    return ask(http, "/v1/search", **EVERY | when | more)


class Keys:
    """Every field key of the catalogue with its logit, in float64, from the items' texts."""

    def __init__(self, http: httpx.Client, temperature: float = 1.0) -> None:
        items = http.get("/v1/items", params={"limit": 1000}).json()["items"]
        encoder = StaticEncoder()
        asked = encoder.encode([QUERY])[0].astype(np.float64).tolist()
        self.owners: list[str] = []
        self.fields: list[str] = []
        self.cosines: list[float] = []
        self.logits: list[float] = []
        texts: list[str] = []
        words: dict[str, list[str]] = {}  # no two of this catalogue's have one stem
        for item in items:
            own = words.setdefault(item["item_id"], [])
            for name in FIELDS:
                text = item[name] if isinstance(item[name], str) else ", ".join(item[name])
                own += re.findall(r"\w+", text) * (TITLE_WEIGHT if name == "title" else 1)
                if text:
                    self.owners.append(item["item_id"])
                    self.fields.append(name)
                    texts.append(text)
        vectors = encoder.encode(texts).astype(np.float16).astype(np.float64)
        alike = (vectors[:, None] == vectors).all(2).sum(1)  # the order of words is not encoded
        scores = reference.bm25(list(words.values()), QUERY.split())
        self.bm25 = dict(zip(words, scores, strict=True))
        best = max(scores)
        for vector, count, name, owner in zip(
            vectors.tolist(), alike, self.fields, self.owners, strict=True
        ):
            self.cosines.append(reference.cosine(asked, vector))
            score = self.cosines[-1] + DEFAULTS.lexical * self.bm25[owner] / best
            logit = score / (DEFAULTS.temperature * temperature)
            self.logits.append(logit + DEFAULTS.fields.get(name, 0.0) - math.log(count))

    def nearest(self, least: int) -> set[int]:
        """Return the `least` keys of largest cosine, with ties of the last."""
        ranked = sorted(self.cosines, reverse=True)
        return {at for at, cosine in enumerate(self.cosines) if cosine > ranked[least - 1] - 1e-4}

    def weights(self, kept: set[int], *, hard: bool = False) -> dict[str, float]:
        """Return the total softmax weight of each item over the given keys."""
        places = sorted(kept)
        found: dict[str, float] = {}
        each = reference.softmax([self.logits[at] for at in places], 1.0, hard)
        for at, weight in zip(places, each, strict=True):
            found[self.owners[at]] = found.get(self.owners[at], 0.0) + weight
        return found


# ------------------------------------------------------------------ how keys are found


@pytest.mark.parametrize("retrieval", [{}, {"mode": "exact"}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 6.0])
def test_exact_search_is_the_softmax_over_every_field(
    http: httpx.Client, retrieval: dict[str, Any], temperature: float
) -> None:
    keys = Keys(http, temperature)
    found = search(http, retrieval=retrieval, temperature=temperature)
    weights = keys.weights(set(range(len(keys.logits))))
    assert {item["item_id"] for item in found["items"]} == weights.keys()
    for item in found["items"]:
        assert item["weight"] == pytest.approx(weights[item["item_id"]], rel=1e-3)
        assert "mass" not in item
    assert (found["retrieval"], found["keys_attended"], found["mass"]) == (
        "exact",
        len(keys.logits),
        1,
    )


@pytest.mark.parametrize("least", [1, 4, 23])
@pytest.mark.parametrize("hard", [False, True])
def test_coarse_search_is_the_softmax_over_the_items_of_the_nearest_fields(
    http: httpx.Client, least: int, hard: bool
) -> None:
    keys = Keys(http)
    nearest = keys.nearest(least)
    named = {keys.owners[at] for at in nearest}
    named |= {owner for owner, score in keys.bm25.items() if score > 0}
    kept = {at for at, owner in enumerate(keys.owners) if owner in named}
    whole = keys.weights(set(range(len(keys.logits))), hard=hard)
    found = search(http, retrieval={"mode": "coarse", "k": len(nearest)}, hard=hard)
    weights = {name: weight for name, weight in keys.weights(kept, hard=hard).items() if weight}
    assert {item["item_id"] for item in found["items"]} == weights.keys()
    for item in found["items"]:
        assert item["weight"] == pytest.approx(weights[item["item_id"]], rel=1e-3)
    assert (found["retrieval"], found["keys_attended"]) == ("coarse", len(kept))
    assert found["mass"] == pytest.approx(sum(whole[name] for name in named), rel=1e-3)


def test_coarse_search_with_room_for_every_key_is_exact(http: httpx.Client) -> None:
    """Coarse search with k of at least all keys equals exact search, with or without a user."""
    askers: list[dict[str, Any]] = [{}, {"user_id": "u3"}, {"history": SESSION}]
    for who in askers:
        exact = search(http, **who, retrieval={"mode": "exact"})
        whole = search(http, **who, retrieval={"mode": "coarse", "k": 1000})
        assert (exact["retrieval"], whole["retrieval"]) == ("exact", "coarse")
        assert [item["item_id"] for item in whole["items"]] == [
            item["item_id"] for item in exact["items"]
        ]
        for one, other in zip(whole["items"], exact["items"], strict=True):
            for name in ("score", "weight", "matched"):
                assert one[name] == pytest.approx(other[name], rel=1e-4)
        assert (whole["keys_attended"], whole["mass"]) == (exact["keys_attended"], exact["mass"])


def test_auto_retrieval_follows_max_exact_rows(world: tiny.World, tmp_path: Path) -> None:
    """Auto search is coarse above `max_exact_rows` allowed keys, and exact up to that number."""
    few = {"filter": {"categories": {"all": ["space", "odd"]}}}
    with (
        Server(world.copy(tmp_path / "data"), max_exact_rows=50) as server,
        server.client() as http,
    ):
        assert search(http)["retrieval"] == "coarse"
        assert search(http, retrieval={"mode": "exact"})["retrieval"] == "exact"
        narrow = search(http, **few)
        assert (narrow["retrieval"], narrow["keys_attended"]) == ("exact", 4 * 7)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("a", 5),
        ("rocket " * 2_500, 5),
        ("\U0001f680\U0001f680", 0),
        ("שלום עולם", 0),
        ('"', 0),
        ("*", 0),
    ],
)
def test_any_query_text_is_answered(http: httpx.Client, query: str, found: int) -> None:
    """A query that nothing of the catalogue is near to returns nothing, any other is answered."""
    answer = search(http, query=query, limit=5)
    assert len(answer["items"]) == found


def test_pages_of_a_search_follow_cursors(http: httpx.Client) -> None:
    """Pages by cursor are the whole answer, for a user too; other cursors are refused."""
    askers: list[dict[str, Any]] = [{}, {"user_id": "u3"}]
    for who in askers:
        whole = search(http, **who)["items"]
        pages: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = search(http, limit=7, **who, **cursor)
            pages += page["items"]
            if "cursor" not in page:
                break
            cursor = {"cursor": page["cursor"]}
        assert [item["item_id"] for item in pages] == [item["item_id"] for item in whole]
        assert [item["score"] for item in pages] == pytest.approx(
            [item["score"] for item in whole], abs=1e-4
        )
    refused: list[tuple[str, dict[str, Any]]] = [
        ("/cursor", {"cursor": "bm9uZQ=="}),
        ("/offset", {"offset": 9_500, "limit": 1_000}),
        ("/min_score", {"fill": True, "min_score": 1.0}),
        ("/fill", {"fill": True, "sort": [{"field": "title"}]}),
    ]
    for pointer, wrong in refused:
        answer = http.post("/v1/search", json={"query": QUERY} | wrong)
        assert answer.status_code == 422, wrong
        assert answer.json()["errors"][0]["pointer"] == pointer


def test_typo_returns_the_results_of_the_corrected_word(http: httpx.Client) -> None:
    """A mistyped or unfinished word gives the results of the correction, which is reported."""
    right, wrong = search(http, query="castle", limit=5), search(http, query="catsle", limit=5)
    assert wrong["corrections"] == {"catsle": ["castle"]}
    assert wrong["items"] == right["items"]
    typing = search(http, query="cast", limit=5)
    assert typing["corrections"] == {"cast": ["castle"]}
    assert typing["items"] == right["items"]


def test_phrase_restricts_the_results(http: httpx.Client) -> None:
    """A quoted phrase restricts results and weights to items whose title contains it."""
    items = http.get("/v1/items", params={"limit": 1000}).json()["items"]
    one = items[7]["title"].split()[:2]
    having = {item["item_id"] for item in items if " ".join(one) in item["title"]}
    found = search(http, query=f'"{" ".join(one)}"')
    assert {item["item_id"] for item in found["items"]} == having
    assert sum(item["weight"] for item in found["items"]) == pytest.approx(1, abs=1e-4)


def test_highlight_marks_the_words_of_the_query(http: httpx.Client) -> None:
    found = search(http, query="rockets", limit=3, highlight=True)["items"]
    assert any(part["match"] for item in found for part in item["highlights"]["title"])
    for item in found:
        assert "".join(part["text"] for part in item["highlights"]["title"]) == item["title"]
        for parts in item["highlights"].values():
            assert {part["text"] for part in parts if part["match"]} <= {"rocket"}
    assert "highlights" not in search(http, query="rockets", limit=3)["items"][0]


# ------------------------------------------------------------------ whose search it is


@pytest.mark.parametrize("who", [{"user_id": "u3"}, {"user_id": "u3", "history": SESSION}])
def test_a_memory_adds_its_standardised_score(http: httpx.Client, who: dict[str, Any]) -> None:
    """A user's search adds twice the standardised scores of /v1/score to the plain log weights."""
    plain = {item["item_id"]: item["score"] for item in search(http)["items"]}
    scored = ask(http, "/v1/score", **who, item_ids=list(plain), at=AT)["items"]
    values = np.array([item["score"] for item in scored])
    standard = (values - values.mean()) / values.std()
    expected = {
        item["item_id"]: plain[item["item_id"]] + 2 * added
        for item, added in zip(scored, standard.tolist(), strict=True)
    }
    found = search(http, **who)["items"]
    assert {item["item_id"]: item["score"] for item in found} == pytest.approx(expected, abs=1e-3)
    assert [item["item_id"] for item in found] == sorted(expected, key=lambda id_: -expected[id_])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 3.0},
        {"hard": True},
        {"exclude_self": True},
        {"visible": {"types": ["view"], "since": "2025-11-25T00:00:00Z"}},
        {"at": "2031-01-01T12:00:00Z"},
        {"retrieval": {"mode": "coarse", "k": 3}},
        {"retrieval": {"mode": "exact"}},
        {"explain": 2},
    ],
)
@pytest.mark.parametrize("who", [{"user_id": "u3"}, {"user_id": "u3", "history": SESSION}])
def test_search_explanations_equal_those_of_score(
    http: httpx.Client, who: dict[str, Any], how: dict[str, Any]
) -> None:
    """Search gives each item the explanation and mass of /v1/score."""
    asked = {"at": AT, "explain": 50, "explain_effects": True} | who | how
    found = search(http, limit=100, **asked)["items"]
    scored = ask(http, "/v1/score", item_ids=[item["item_id"] for item in found], **asked)["items"]
    assert found
    told = 0
    for item, other in zip(found, scored, strict=True):
        assert item["mass"] == pytest.approx(other["mass"], abs=1e-5)
        assert len(item["explanation"]) == len(other["explanation"])
        for reason, same in zip(item["explanation"], other["explanation"], strict=True):
            numbers = {"weight", "contribution", "effect"}
            assert {k: reason[k] for k in reason if k not in numbers} == {
                k: same[k] for k in same if k not in numbers
            }
            for name in numbers:
                assert reason[name] == pytest.approx(same[name], abs=1e-4)
            told += 1
    assert told


def test_coarse_search_retrieves_from_both_memories(http: httpx.Client) -> None:
    """Coarse search retrieves keys of the catalogue and of the user, and states both masses."""
    found = search(http, user_id="u3", temperature=4.0, retrieval={"mode": "coarse", "k": 4})
    assert (found["retrieval"], found["rows_scanned"]) == ("coarse", 4)
    assert 0 < found["mass"] < 1
    assert all(0 < item["mass"] < 1 for item in found["items"])


def test_explanations_are_absent_without_a_memory(http: httpx.Client) -> None:
    """`explain` adds empty explanations for an empty memory."""
    plain = search(http)
    nobodies: list[dict[str, Any]] = [{"user_id": "nobody yet"}, {"history": []}]
    for who in nobodies:
        empty = search(http, explain=5, **who)
        assert [item.pop("explanation") for item in empty["items"]] == [[]] * len(plain["items"])
        assert empty == plain
        assert search(http, **who) == plain
