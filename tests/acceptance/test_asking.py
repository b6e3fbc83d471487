"""Recommend, search and similar over HTTP: visibility of writes, filters, order and histories."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from models.text.encoders import StaticEncoder
from tests.support import tiny
from tests.support.server import Server
from tests.support.tiny import AT, DAY, EACH, GENRES, NOON, item_id

LATELY = "2025-12-28T12:00:00Z"  # four days before noon
SPACE_OR_ODD = {"space", "odd"}
WORLD = {item.item_id: item for item in tiny.items()}
SPACE = [{"item_id": item_id(0, n), "timestamp": f"2026-01-01T11:0{n}:00Z"} for n in (2, 3, 5)]
COOKING = [{"item_id": item_id(1, n), "timestamp": f"2026-01-01T11:0{n}:00Z"} for n in (2, 3, 5)]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the JSON body of a POST request, which must succeed with 200."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(answer: dict[str, Any]) -> list[str]:
    """The items of an answer, in its order."""
    return [item["item_id"] for item in answer["items"]]


def similar(http: httpx.Client, name: str) -> list[str]:
    """Return the ids of all items similar to one item."""
    answer = http.get(f"/v1/items/{name}/similar", params={"limit": 1000})
    assert answer.status_code == 200, answer.text
    return ids(answer.json())


@pytest.fixture
def fresh(http: httpx.Client) -> Iterator[dict[str, Any]]:
    """Yield an item that is not stored yet, and delete it after the test."""
    yield {
        "item_id": "fresh",
        "title": "supernova nebula quasar",
        "description": "all about the moon and the stars",
        "tags": ["telescope"],
        "categories": ["space", "new"],
    }
    http.delete("/v1/items/fresh")


# ------------------------------------------------------------------ at once


def offered(http: httpx.Client) -> dict[str, bool]:
    """Report for each route whether its answer contains the fresh item."""
    everything = {"limit": 1000}
    return {
        "recommend": "fresh" in ids(post(http, "/v1/recommend", history=SPACE, **everything)),
        "popular": "fresh" in ids(post(http, "/v1/recommend", **everything)),
        "search": "fresh"
        in ids(post(http, "/v1/search", query="rocket comet", fill=True, **everything)),
        "similar": "fresh" in similar(http, SPACE[0]["item_id"]),
    }


def test_a_new_item_is_offered_at_once_until_it_is_hidden_or_deleted(
    http: httpx.Client, fresh: dict[str, Any]
) -> None:
    """Answers reflect an acknowledged write at once: item added, hidden, shown again, deleted."""
    for body, seen in ((fresh, True), (fresh | {"hidden": True}, False), (fresh, True)):
        assert post(http, "/v1/items", items=[body]) == {"stored": 1}
        assert set(offered(http).values()) == {seen}, body
        assert http.get("/v1/items/fresh").json()["hidden"] is not seen
    assert http.delete("/v1/items/fresh").status_code == 204
    assert set(offered(http).values()) == {False}
    assert http.get("/v1/items/fresh").status_code == 404


def test_new_item_is_placed_by_its_text(http: httpx.Client, fresh: dict[str, Any]) -> None:
    post(http, "/v1/items", items=[fresh])
    assert ids(post(http, "/v1/search", query=fresh["title"], limit=3))[0] == "fresh"
    genres = [name.split("-")[0] for name in similar(http, "fresh")[:5]]
    assert genres.count("space") >= 4
    by = {
        who: post(http, "/v1/score", history=history, item_ids=["fresh"], at=AT)["items"][0]
        for who, history in (("space", SPACE), ("cooking", COOKING))
    }
    assert by["space"]["score"] > by["cooking"]["score"]


def test_changed_item_takes_effect_at_once(http: httpx.Client, fresh: dict[str, Any]) -> None:
    """Search and filters use the text and categories of the last write."""
    post(http, "/v1/items", items=[fresh])
    changed = fresh | {"title": "garlic bread", "description": "", "tags": [],
                       "categories": ["cooking"]}  # fmt: skip
    post(http, "/v1/items", items=[changed])
    assert ids(post(http, "/v1/search", query="garlic bread", limit=1)) == ["fresh"]
    for category, seen in (("new", False), ("cooking", True)):
        wanted = {"categories": {"any": [category]}}
        found = post(http, "/v1/recommend", history=SPACE, filter=wanted, limit=1000)
        assert ("fresh" in ids(found)) is seen


def test_event_on_an_unknown_item_counts_once_the_item_is_stored(
    http: httpx.Client, fresh: dict[str, Any]
) -> None:
    event = {"user_id": "early", "item_id": "fresh", "event_id": "early"}
    post(http, "/v1/events", events=[event])
    asked = {"user_id": "early", "item_ids": [item_id(0, 1)], "explain": 5}
    before = post(http, "/v1/score", **asked)["items"][0]
    assert (before["reason"], before["explanation"]) == ("popular", [])
    post(http, "/v1/items", items=[fresh])
    after = post(http, "/v1/score", **asked)["items"][0]
    assert [reason["event_id"] for reason in after["explanation"]] == ["early"]
    assert after["explanation"][0]["title"] == fresh["title"]
    assert "fresh" not in ids(post(http, "/v1/recommend", user_id="early", limit=1000))


def test_questions_never_see_a_partial_change(server: Server) -> None:
    """Concurrent reads succeed, include every stored item and exclude every deleted one.

    What was deleted before a question was asked is in no answer to it; what was stored is found.
    """
    there: set[str] = set()  # acknowledged, and not to be deleted yet
    gone: set[str] = set()
    writing = True

    async def write(http: httpx.AsyncClient) -> None:
        nonlocal writing
        for number in range(60):
            name = f"passing-{number}"
            item = {"item_id": name, "title": "rocket orbit", "categories": ["passing"]}
            (await http.post("/v1/items", json={"items": [item]})).raise_for_status()
            there.add(name)
            if number >= 5:
                old = f"passing-{number - 5}"
                there.discard(old)
                (await http.delete(f"/v1/items/{old}")).raise_for_status()
                gone.add(old)
            await asyncio.sleep(0)
        writing = False
        for name in sorted(there):
            there.discard(name)
            (await http.delete(f"/v1/items/{name}")).raise_for_status()

    async def read(http: httpx.AsyncClient, seed: int) -> None:
        random = np.random.default_rng(seed)
        wanted = {"limit": 1000, "filter": {"categories": {"any": ["passing"]}}}
        ways: list[tuple[str, dict[str, Any]]] = [
            ("/v1/recommend", {"user_id": "u0", **wanted}),
            ("/v1/recommend", {"diversity": 0.3, **wanted}),
            ("/v1/search", {"query": "rocket", "user_id": "u1", "fill": True, **wanted}),
            ("/v1/attend", {"memory": {"catalogue": True}, "query": {"text": "a"}, "limit": 1000}),
        ]
        while writing:
            path, body = ways[int(random.integers(len(ways)))]
            must, must_not = set(there), set(gone)
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            names = set(found["ids"]) if "ids" in found else set(ids(found))
            assert must & there <= names  # of those, the rest went while it was answered
            assert not must_not & names

    async def run() -> None:
        async with server.connect() as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(write(http))
            for seed in range(4):
                tasks.create_task(read(http, seed))

    asyncio.run(run())
    assert len(gone) == 55


def test_an_item_may_bring_its_own_embedding(http: httpx.Client) -> None:
    """An item without text is found by its embedding; one of another dimension is refused."""
    vector = StaticEncoder().encode(["volcano eruption"])[0].tolist()
    short = http.post("/v1/items", json={"items": [{"item_id": "mute", "embedding": [1.0]}]})
    assert short.status_code == 422
    assert short.json()["errors"][0]["pointer"] == "/items/0/embedding"
    post(http, "/v1/items", items=[{"item_id": "mute", "embedding": vector}])
    found = post(http, "/v1/search", query="volcano eruption", limit=1)
    assert ids(found) == ["mute"]
    assert found["items"][0]["matched"] == {"embedding": pytest.approx(1)}
    http.delete("/v1/items/mute").raise_for_status()


# ------------------------------------------------------------------ what may be offered


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        ({"categories": {"any": ["space", "odd"]}}, lambda i: SPACE_OR_ODD & set(i.categories)),
        ({"categories": {"all": ["space", "odd"]}}, lambda i: set(i.categories) >= SPACE_OR_ODD),
        ({"categories": {"none": ["even"]}}, lambda i: "even" not in i.categories),
        ({"attributes": {"language": "de"}}, lambda i: i.attributes["language"] == "de"),
        ({"attributes": {"number": [1, 2, 99]}}, lambda i: i.attributes["number"] in {1, 2}),
        (
            {"categories": {"any": ["space"]}, "attributes": {"language": "en", "number": 4}},
            lambda i: i.item_id == "space-04",
        ),
        ({"published": {"since": LATELY}}, lambda i: i.published_at >= NOON - 4 * DAY),
        ({"published": {"until": LATELY}}, lambda i: i.published_at < NOON - 4 * DAY),
        ({"categories": {"any": ["nothing"]}}, lambda i: False),
        ({"attributes": {"number": "4"}}, lambda i: False),
        ({"attributes": {"absent": None}}, lambda i: False),
    ],
)  # fmt: skip
def test_answers_contain_exactly_the_items_that_pass_the_filter(
    http: httpx.Client, wanted: dict[str, Any], passes: Any
) -> None:
    expected = {name for name, item in WORLD.items() if passes(item)}
    asked = {"filter": wanted, "limit": 1000}
    for history in (SPACE, []):
        found = post(http, "/v1/recommend", history=history, exclude_seen=False, **asked)
        assert set(ids(found)) == expected
    # A search answers with all that has any weight, and at this temperature everything has.
    found = post(http, "/v1/search", query="rocket", temperature=100.0, fill=True, **asked)
    assert set(ids(found)) == expected
    if list(wanted) == ["categories"]:
        seed = item_id(2, 0)
        answer = http.get(
            f"/v1/items/{seed}/similar",
            params={
                "limit": 1000,
                **{f"categories_{name}": some for name, some in wanted["categories"].items()},
            },
        )
        assert set(ids(answer.json())) == expected - {seed}


def test_seen_and_excluded_items_are_not_recommended(http: httpx.Client) -> None:
    seen = {event["item_id"] for event in SPACE}
    everything = {"history": SPACE, "limit": 1000}
    assert set(ids(post(http, "/v1/recommend", **everything))) == WORLD.keys() - seen
    again = post(http, "/v1/recommend", exclude_seen=False, exclude=["space-02"], **everything)
    assert set(ids(again)) == WORLD.keys() - {"space-02"}
    # What the window hides from attention was seen all the same.
    hidden = post(http, "/v1/recommend", visible={"types": ["none"]}, **everything)
    assert set(ids(hidden)) == WORLD.keys() - seen
    assert hidden["items"][0]["reason"] == "popular"


# ------------------------------------------------------------------ in which order


def test_recommend_ranks_by_the_scores_of_score(http: httpx.Client) -> None:
    """Recommendations are the ten items with the highest scores of /v1/score, in order."""
    every = list(WORLD)
    scored = {
        item["item_id"]: item["score"]
        for item in post(http, "/v1/score", user_id="u1", item_ids=every, at=AT)["items"]
    }
    found = post(http, "/v1/recommend", user_id="u1", limit=10, exclude_seen=False, at=AT)
    values = [item["score"] for item in found["items"]]
    assert values == sorted(values, reverse=True)
    assert values == pytest.approx(sorted(scored.values(), reverse=True)[:10], abs=1e-5)
    for item in found["items"]:
        assert item["score"] == pytest.approx(scored[item["item_id"]], abs=1e-5)
        assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-4)
        assert item["reason"] == (
            "content" if found["model_version"] == "untrained" else "personal"
        )


def test_recommendations_follow_the_genre_of_a_history(http: httpx.Client) -> None:
    """Most of what users are recommended is of the genre that they walk through."""
    hits = 0
    for user in range(8):
        body = {"user_id": f"u{user}", "limit": 5, "exclude_seen": False}
        genre = GENRES[user % len(GENRES)]
        hits += sum(name.startswith(genre) for name in ids(post(http, "/v1/recommend", **body)))
    assert hits >= 24


def spread(names: list[str]) -> float:
    """Return one minus the mean cosine between the texts of the items."""
    texts = [" ".join((WORLD[name].title, WORLD[name].description)) for name in names]
    unit = StaticEncoder().encode(texts)
    cosines = unit @ unit.T
    return float(1 - cosines[~np.eye(len(names), dtype=bool)].mean())


def test_diversity_trades_score_for_variety(http: httpx.Client) -> None:
    """Diversity keeps the best item first and makes items less similar; 0 changes nothing."""
    asked = {"user_id": "u0", "limit": 8, "exclude_seen": False, "at": AT}
    plain = post(http, "/v1/recommend", **asked)
    zero, half, full = (
        ids(post(http, "/v1/recommend", diversity=value, **asked)) for value in (0.0, 0.5, 1.0)
    )
    assert zero == ids(plain)
    assert half[0] == full[0] == zero[0]
    assert len(set(full)) == 8
    assert spread(zero) < spread(full)
    assert {name.split("-")[0] for name in full} == set(GENRES)
    nothing = post(http, "/v1/recommend", diversity=0.5, filter={"categories": {"any": ["none"]}})
    assert nothing["items"] == []


def test_search_ranks_the_matching_title_first(http: httpx.Client) -> None:
    """A title as query ranks its item first, matched by title; weights sum to 1."""
    for item in list(WORLD.values())[::7]:
        words = set(item.title.split())
        same = {name for name, other in WORLD.items() if set(other.title.split()) == words}
        best = post(http, "/v1/search", query=item.title, limit=1)["items"][0]
        assert best["item_id"] in same
        assert max(best["matched"], key=best["matched"].get) == "title"
        every = {"limit": 1000, "temperature": 10.0, "fill": True}
        found = post(http, "/v1/search", query=item.title, **every)["items"]
        assert sum(each["weight"] for each in found) == pytest.approx(1, abs=1e-4)
        for each in found:
            assert sum(each["matched"].values()) == pytest.approx(1, abs=1e-4)
        values = [each["score"] for each in found]
        assert values == sorted(values, reverse=True)


def test_history_shifts_the_weights_of_a_vague_search(http: httpx.Client) -> None:
    """A vague query gives a genre more weight for a history of that genre."""

    def share(history: list[dict[str, Any]], genre: str) -> float:
        asked = {"query": "all about", "history": history, "limit": 1000, "at": AT}
        found = post(http, "/v1/search", temperature=10.0, **asked)
        held = [i["weight"] for i in found["items"] if i["item_id"].startswith(genre)]
        return float(sum(held))

    assert share(SPACE, "space") > 1.2 * share(COOKING, "space")
    assert share(COOKING, "cooking") > 1.2 * share(SPACE, "cooking")


def test_similar_items_are_of_the_genre_and_never_the_item_itself(http: httpx.Client) -> None:
    """Four of the five most similar items share the genre, and the item itself is not listed."""
    for genre in range(len(GENRES)):
        found = similar(http, item_id(genre, 1))
        assert len(found) == len(WORLD) - 1
        assert item_id(genre, 1) not in found
        assert sum(name.startswith(GENRES[genre]) for name in found[:5]) >= 4


# ------------------------------------------------------------------ whose history


def test_inline_history_scores_as_stored_events(http: httpx.Client) -> None:
    stored = [event | {"user_id": "stored"} for event in SPACE + COOKING]
    partly = [event | {"user_id": "partly"} for event in COOKING]
    assert http.post("/v1/events", json={"events": stored + partly}).status_code == 200
    asked = {"item_ids": [item_id(0, 6), item_id(1, 6)], "at": AT, "explain": 10}
    # Events of equal times stand in the order of arrival, the session's after the stored ones.
    whole = post(http, "/v1/score", user_id="stored", **asked)["items"]
    inline = post(http, "/v1/score", history=SPACE + COOKING, **asked)["items"]
    for one, other in zip(whole, inline, strict=True):
        assert one["parts"] == pytest.approx(other["parts"], abs=1e-5)
        assert {reason["event_id"] for reason in other["explanation"]} == {None}
        assert len(one["explanation"]) == len(other["explanation"]) == 6
    overlaid = post(http, "/v1/score", user_id="partly", history=SPACE, **asked)["items"]
    swapped = post(http, "/v1/score", history=COOKING + SPACE, **asked)["items"]
    for one, other in zip(overlaid, swapped, strict=True):
        assert one["parts"] == pytest.approx(other["parts"], abs=1e-5)
        assert sum(reason["event_id"] is None for reason in one["explanation"]) == 3
    page = http.get("/v1/users/partly/history").json()
    assert len(page["events"]) == 3


def test_visible_scores_as_a_history_of_the_visible_events(http: httpx.Client) -> None:
    asked = {"item_ids": [item_id(0, 6), item_id(1, 6)], "at": AT}
    typed = [{**event, "type": "view"} for event in SPACE]
    typed += [{**event, "type": "buy"} for event in COOKING]
    for visible, left in (
        ({"types": ["buy"]}, typed[3:]),
        ({"categories": ["space"]}, typed[:3]),
        ({"since": "2026-01-01T11:03:00Z"}, [typed[n] for n in (1, 2, 4, 5)]),
        ({"until": "2026-01-01T11:03:00Z"}, [typed[n] for n in (0, 3)]),
        ({"types": ["buy"], "until": "2026-01-01T11:03:00Z"}, typed[3:4]),
        ({"since": "2026-01-01T12:00:00Z"}, []),
    ):
        shown = post(http, "/v1/score", history=typed, visible=visible, **asked)["items"]
        alone = post(http, "/v1/score", history=left, **asked)["items"]
        for one, other in zip(shown, alone, strict=True):
            assert one["parts"] == pytest.approx(other["parts"], abs=1e-5)
            assert one["reason"] == other["reason"]


def test_coarse_attends_the_rows_that_are_retrieved(http: httpx.Client) -> None:
    """With k of all rows `coarse` answers as `exact`; with fewer it states number and mass."""
    asked = {"user_id": "u2", "item_ids": list(WORLD)[::5], "at": AT, "explain": 50}
    exact = post(http, "/v1/score", **asked)
    rows = exact["memory_rows"]
    assert (exact["retrieval"], exact["rows_scanned"]) == ("exact", rows)
    whole = post(http, "/v1/score", retrieval={"mode": "coarse", "k": rows}, **asked)
    few = post(http, "/v1/score", retrieval={"mode": "coarse", "k": 4}, **asked)
    assert (few["retrieval"], few["rows_scanned"], few["memory_rows"]) == ("coarse", 4, rows)
    for one, other, less in zip(exact["items"], whole["items"], few["items"], strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        assert other["mass"] == pytest.approx(1, abs=1e-5)
        assert 0 < less["mass"] < 1
        for item in (one, other, less):
            told = [*item["explanation"], item["remainder"]]
            total = sum(each["contribution"] for each in told) + item["parts"]["prior"]
            assert total == pytest.approx(item["score"], abs=1e-4)
            assert sum(each["events"] for each in told) == rows


def test_an_explanation_and_its_remainder_sum_to_the_score(http: httpx.Client) -> None:
    """However few events are named, the remainder counts the others, in every question."""
    for k in (2, 6):
        asked = {"user_id": "u2", "at": AT, "retrieval": {"mode": "coarse", "k": k}}
        items = [
            *post(http, "/v1/score", item_ids=list(WORLD)[::9], explain=1, **asked)["items"],
            *post(http, "/v1/recommend", limit=3, explain=2, **asked)["items"],
            *(item for row in post(http, "/v1/rows", **asked)["rows"] for item in row["items"]),
        ]
        users = http.get(
            f"/v1/items/{item_id(0, 3)}/audience",
            params={"explain": 2, "retrieval": "coarse", "k": k, "at": AT},
        ).json()["users"]
        explained = [each for each in (*items, *users) if "explanation" in each]
        assert len(explained) > 8
        for each in explained:
            parts = each["parts"]
            told = sum(reason["contribution"] for reason in each["explanation"])
            told += each["remainder"]["contribution"]
            rest = sum(parts.get(name, 0) for name in ("prior", "rules", "reference"))
            assert told + rest == pytest.approx(each["score"], abs=1e-4)


def test_hard_attention_is_the_limit_of_low_temperatures(http: httpx.Client) -> None:
    """Scores at temperature 1e-6 equal those of hard attention."""
    asked = {"user_id": "u4", "item_ids": [item_id(0, 1), item_id(3, 8)], "at": AT}
    hard = post(http, "/v1/score", hard=True, **asked)["items"]
    cold = post(http, "/v1/score", temperature=1e-6, **asked)["items"]
    for one, other in zip(hard, cold, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)


def test_limits_and_unknown_targets_are_refused(http: httpx.Client) -> None:
    """More than 1,000 targets are refused with 422, an unknown target with 404 and its id."""
    many = http.post("/v1/score", json={"item_ids": [item_id(0, 1)] * 1001})
    assert (many.status_code, many.json()["errors"][0]["pointer"]) == (422, "/item_ids")
    assert len(post(http, "/v1/score", item_ids=[item_id(0, 1)] * 1000)["items"]) == 1000
    unknown = http.post("/v1/score", json={"item_ids": [item_id(0, 1), "what"]})
    assert unknown.status_code == 404
    assert "what" in unknown.json()["detail"]
    assert http.get("/v1/items/what/similar").status_code == 404


def test_item_list_is_complete_across_pages(http: httpx.Client) -> None:
    found: list[str] = []
    cursor = None
    while True:
        page = http.get("/v1/items", params={"limit": 7, **({"cursor": cursor} if cursor else {})})
        found += ids(page.json())
        cursor = page.json()["cursor"]
        if cursor is None:
            break
    assert found == sorted(WORLD)
    assert len(found) == EACH * len(GENRES)
