"""The rows of a home page: their items, their reasons, and what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.catalogue.item_filter import EVERYTHING, Condition
from models.catalogue.item_filter import ItemFilter as Filter
from service.domain.records import Event, Item, User
from service.engine.engine import Engine
from tests.support import asking, tiny
from tests.support.tiny import DAY, NOON, SECOND, item_id

ITEMS = {item.item_id: item for item in tiny.items()}
AT = NOON - 33 * DAY  # some days into the history of the small world


async def ask(engine: Engine, user_id: str | None = "u1", **fields: Any) -> Any:
    """The rows of a user's page."""
    requester = fields.pop("requester", None) or asking.who(user_id=user_id, at=AT)
    query = asking.rows(requester, **{"limit": 4} | fields)
    return await asking.ask(engine, query)


async def plant_rise(engine: Engine) -> None:
    """Have some items of all genres taken by many just before the time of the pages."""
    await engine.store.append(
        [
            Event(f"crowd{user}", item_id(genre, number), timestamp=AT - 60 * SECOND)
            for genre in range(4)
            for number in (12, 13, 14)
            for user in range(4)
        ]
    )


def ids(answer: Any) -> list[str]:
    """All items of a page."""
    return [item["item_id"] for row in answer.rows for item in row.items]


async def test_no_item_comes_twice_and_every_row_has_its_reason(engine: Engine) -> None:
    """Every user's page has rows with reasons that hold, without items that they know."""
    kinds = set()
    await plant_rise(engine)
    for user in range(8):
        events, _ = await engine.store.page(f"u{user}", limit=100)
        by_id = {event.event_id: event for event in events}
        known = {event.item_id for event in events if (event.timestamp or 0) <= AT}
        answer = await ask(engine, f"u{user}")
        assert 3 <= len(answer.rows) <= 6
        assert len(ids(answer)) == len(set(ids(answer)))
        for row in answer.rows:
            assert 3 <= len(row.items) <= 4
            kinds.add(row.reason.kind)
            if row.reason.kind != "again":
                assert known.isdisjoint(item["item_id"] for item in row.items)
            if row.reason.kind != "because":
                continue
            cause = row.reason.item_id
            assert cause in known
            assert row.reason.event_ids
            assert {by_id[event].item_id for event in row.reason.event_ids} == {cause}
            (item,) = await engine.store.get_items([str(cause)])
            assert item is not None
            assert row.reason.text == f"Because you viewed {item.title}"
            for each in row.items:
                assert each["explanation"]
                for reason in each["explanation"]:
                    assert reason.row.item_id == cause
                    assert reason.contribution > 0
    assert {"because", "trending"} <= kinds


async def test_scores_of_a_row_are_those_of_score(engine: Engine) -> None:
    """Items that are due to an item have the scores and parts of a request for their scores."""
    row = (await ask(engine)).rows[0]
    assert row.reason.kind == "because"
    names = tuple(item["item_id"] for item in row.items)
    query = asking.score(asking.who(user_id="u1", at=AT), names)
    scored = await asking.ask(engine, query)
    for item, other in zip(row.items, scored.items, strict=True):
        assert item["score"] == pytest.approx(other["score"], abs=1e-4)
        assert item["parts"] == pytest.approx(other["parts"], abs=1e-4)
    scores = [item["score"] for item in row.items]
    assert scores == sorted(scores, reverse=True)


async def test_filters_hidden_items_and_exclusions_hold_in_every_row(engine: Engine) -> None:
    before = await ask(engine)
    cause, first = before.rows[0].reason.item_id, ids(before)[0]
    assert cause is not None
    (item,) = await engine.store.get_items([cause])
    assert item is not None
    await engine.live.catalogue.put_items(
        [Item(cause, item.title, item.description, item.tags, item.categories, hidden=True)]
    )
    answer = await ask(engine, exclude=frozenset({first}))
    assert first not in ids(answer)
    assert cause not in ids(answer)
    assert cause not in [row.reason.item_id for row in answer.rows]
    even = Condition("categories", {"eq": "even"})
    some = await ask(engine, filter=even, fields=("categories",), limit=3)
    assert some.rows
    for row in some.rows:
        for each in row.items:
            assert "even" in each["fields"]["categories"]


async def test_rules_and_quotas_hold_in_every_row(engine: Engine) -> None:
    """Boosted items have their rule and part, buried ones are absent, quotas hold in each row."""
    rules = (
        asking.rule("even", Condition("categories", {"eq": "even"}), 4.0),
        asking.rule("german", Condition("attributes.language", {"eq": "de"})),
        asking.rule("low", Condition("attributes.number", {"lt": 6}), -2.0),
    )
    plain = await ask(engine, fields=("categories",))
    assert any("odd" in item["fields"]["categories"] for item in _items(plain))
    fields = ("categories", "attributes.number", "attributes.language")
    steered = await ask(engine, rules=rules, fields=fields)
    assert _items(steered)
    for item in _items(steered):
        assert item["fields"]["attributes.language"] == "en"
        low = item["fields"]["attributes.number"] < 6
        names = ["even", "low"] if low else ["even"]
        assert [rule["name"] for rule in item["rules"]] == names
        assert [rule["boost"] for rule in item["rules"]] == ([4.0, -2.0] if low else [4.0])
        assert sum(item["parts"].values()) == pytest.approx(item["score"], abs=1e-4)
    quotas = (asking.quota("categories", 2),)
    varied = await ask(engine, at_most=quotas, fields=("categories",))
    assert varied.rows
    for row in varied.rows:
        counts = Counter(name for item in row.items for name in item["fields"]["categories"])
        assert max(counts.values()) <= 2


def _items(answer: Any) -> list[Any]:
    return [item for row in answer.rows for item in row.items]


def deviation(answer: Any) -> float:
    """The standard deviation of the scores of an answer."""
    return float(np.std([item["score"] for item in answer.items]))


async def test_a_boost_is_in_deviations_of_each_rows_scores(engine: Engine) -> None:
    """A unit is the deviation of the best hundred scores of the row's ranking."""
    rules = (asking.rule("even", Condition("categories", {"eq": "even"}), 1.5),)
    await plant_rise(engine)
    often = [Event("u1", item_id(2, n), timestamp=AT - t * DAY) for n in (1, 3, 6) for t in (1, 2)]
    await engine.store.append(often)
    requester, kinds = asking.who(user_id="u1", at=AT), set()
    personal = asking.recommend(requester, limit=100, exclude_seen=False)
    units = {"personal": deviation(await asking.ask(engine, personal))}
    for row in (await ask(engine, rows=5, rules=rules)).rows:
        kind = row.reason.kind
        kinds.add(kind)
        unit = units["personal"]
        if kind in ("trending", "newest", "popular"):
            wanted: Filter = EVERYTHING
            if row.reason.categories:
                wanted = Condition("categories", {"in": [*row.reason.categories]})
            query = asking.popular(requester, kind, limit=100, filter=wanted)
            unit = deviation(await asking.ask(engine, query))
        assert unit > 0
        for item in row.items:
            even = "even" in ITEMS[item["item_id"]].categories
            boost = item["parts"]["rules"]
            assert boost == pytest.approx(1.5 * unit * even, rel=1e-3, abs=1e-6)
            assert item.get("rules", []) == ([{"name": "even", "boost": 1.5}] if even else [])
            assert sum(item["parts"].values()) == pytest.approx(item["score"], rel=1e-6)
    assert {"because", "trending"} <= kinds


@pytest.mark.parametrize("kind", ["dislike", "return"])
async def test_nothing_is_offered_because_of_what_was_disliked_or_sent_back(
    engine: Engine, kind: str
) -> None:
    """A dislike or a return is no reason of a row, does not come again and is not popular."""
    back, kept = [item_id(2, n) for n in range(4)], item_id(0, 3)
    events = [Event("picky", i, timestamp=AT - DAY * n) for n, i in enumerate([kept, *back], 2)]
    events += [Event("picky", item, type=kind, timestamp=AT - DAY) for item in back]
    await engine.store.append(events)
    page = await ask(engine, "picky", rows=8)
    reasons = [row.reason for row in page.rows]
    assert "again" not in {reason.kind for reason in reasons}
    for row in page.rows:
        for item in row.items if row.reason.kind == "because" else ():
            assert kind not in {each.row.type for each in item["explanation"]}
    assert any(reason.kind == "because" for reason in reasons)
    requester = asking.who(at=AT)
    query = asking.popular(requester, "popular", limit=100)
    answer = await asking.ask(engine, query)
    wanted = query.model_copy(update={"type": ["view"]})
    views = await asking.ask(engine, wanted)
    assert [item["score"] for item in answer.items] == [item["score"] for item in views.items]


@pytest.mark.parametrize("how", ["hidden", "deleted"])
async def test_nothing_rests_on_an_event_that_has_no_name(engine: Engine, how: str) -> None:
    """No row, no reason and no affinity names an item or an interest once it is gone."""
    user = "shy"
    gone = [item_id(2, number) for number in range(4)]
    taken = [*gone, item_id(0, 3)]
    await engine.store.append(
        [Event(user, item, timestamp=AT - SECOND * n) for n, item in enumerate(taken, 1)]
    )
    await engine.store.put_user(User(user, interests=(item_id(2, 5),)))
    if how == "deleted":
        for item in (*gone, item_id(2, 5)):
            await engine.live.catalogue.delete_item(item)
    else:
        hidden = [replace(ITEMS[item], hidden=True) for item in (*gone, item_id(2, 5))]
        await engine.live.catalogue.put_items(hidden)
    page = await ask(engine, user, rows=8)
    because = [row.reason for row in page.rows if row.reason.kind == "because"]
    assert {reason.item_id for reason in because} == {item_id(0, 3)}
    assert not any("None" in row.reason.text for row in page.rows)
    requester = asking.who(user_id=user, at=AT, explain=3)
    answer = await asking.ask(engine, asking.recommend(requester, 10))
    audience = await asking.ask(engine, asking.audience(item_id(2, 7), at=AT, limit=100, explain=3))
    explanations = [item.get("explanation", ()) for item in _items(page)]
    explanations += [item["explanation"] for item in answer.items]
    explanations += [each["explanation"] for each in audience.users]
    named = {reason.row.item_id or reason.row.title for each in explanations for reason in each}
    assert item_id(0, 3) in named
    assert not named & {"", *gone, item_id(2, 5)}
    for each in answer.items:
        reasons = each["explanation"]
        assert [reason.row.item_id for reason in reasons] == [item_id(0, 3)]
        assert each["remainder"]["events"] == (answer.memory_rows or 0) - 1
        whole = sum(reason.contribution for reason in reasons)
        whole += each["remainder"]["contribution"] + each["parts"]["prior"]
        assert whole == pytest.approx(each["score"], rel=1e-4)


async def test_a_boost_of_huge_scores_is_finite(engine: Engine) -> None:
    """Scores that are sums of the largest weights leave every score and boost of a row finite."""
    weight = float(np.finfo(np.float32).max)
    huge = [
        Event(f"giant{n}", item_id(0, 12), weight=weight, timestamp=AT - SECOND) for n in range(40)
    ]
    await plant_rise(engine)
    await engine.store.append(huge)
    rules = (asking.rule("even", Condition("categories", {"eq": "even"}), 0.5),)
    answer = await ask(engine, "nobody", rules=rules)
    items = _items(answer)
    assert {row.reason.kind for row in answer.rows} >= {"popular", "trending"}
    assert all(np.isfinite(item["score"]) for item in items)
    boosts = [item["parts"]["rules"] for item in items if item.get("rules")]
    assert boosts
    assert all(0 < boost < weight for boost in boosts)


async def test_facets_count_what_may_stand_in_a_row(engine: Engine) -> None:
    """Items count that pass the filter, are not excluded, buried or seen, or came back."""
    back = [Event("u1", item_id(3, 4), timestamp=AT - n * DAY) for n in (1, 2)]
    await engine.store.append(back)
    events, _ = await engine.store.page("u1", limit=100)
    taken: dict[str, set[int | None]] = {}
    for event in events:
        if event.timestamp is not None and event.timestamp <= AT:
            taken.setdefault(event.item_id, set()).add(event.timestamp)
    out, facets = item_id(2, 2), (asking.facet("categories", 50),)
    english = Condition("attributes.language", {"eq": "en"})
    buried = asking.rule("no music", Condition("attributes.number", {"lt": 3}))
    answer = await ask(
        engine, filter=english, exclude=frozenset({out}), rules=(buried,), facets=facets
    )
    wanted = [
        item
        for name, item in ITEMS.items()
        if item.attributes["language"] == "en"
        and name != out
        and item.attributes["number"] >= 3
        and len(taken.get(name, {1, 2})) > 1
    ]
    assert item_id(3, 4) in {item.item_id for item in wanted}
    counts = Counter(name for item in wanted for name in item.categories)
    assert answer.facets is not None
    assert dict(answer.facets[0].values) == counts
    assert answer.total == len(wanted)
    assert {*ids(answer)} <= {item.item_id for item in wanted}
    assert (await ask(engine)).facets is None


async def test_what_is_new_is_in_the_users_categories(engine: Engine) -> None:
    """The row of new items has the newest ones of the genre that the user walks through."""
    events = [Event("fan", item_id(3, n), timestamp=AT - n * SECOND) for n in (5, 7, 8)]
    await engine.store.append(events)
    fresh = [
        Item(f"fresh-{n}", f"violin {n}", categories=("music",), published_at=AT - 1 - n)
        for n in range(6)
    ]
    await engine.live.catalogue.put_items(fresh)
    answer = await ask(engine, "fan", rows=20)
    (row,) = [row for row in answer.rows if row.reason.kind == "newest"]
    assert "music" in row.reason.categories
    assert "New in" in row.reason.text
    times = [item["score"] for item in row.items]
    assert times == sorted(times, reverse=True)


async def test_items_that_come_back_have_a_row(engine: Engine) -> None:
    """Items that a user took at several times are to be taken again; others are not."""
    often = [item_id(0, n) for n in range(4)]
    events = [
        Event("regular", item, timestamp=AT - (1 + place + 9 * turn) * DAY)
        for turn in range(3)
        for place, item in enumerate(often)
    ]
    once = [Event("regular", item_id(1, n), timestamp=AT - DAY) for n in range(5)]
    await engine.store.append([*events, *once, once[0]])
    answer = await ask(engine, "regular")
    (row,) = [row for row in answer.rows if row.reason.kind == "again"]
    assert {item["item_id"] for item in row.items} == {*often}
    assert not {*often} & {
        item["item_id"] for other in answer.rows if other is not row for item in other.items
    }


async def test_strangers_see_what_everybody_takes(engine: Engine) -> None:
    """Without events there are popular and trending items; a session is enough for more."""
    await plant_rise(engine)
    for user_id in (None, "nobody"):
        answer = await ask(engine, user_id)
        assert [row.reason.kind for row in answer.rows][:2] == ["popular", "trending"]
        assert len(ids(answer)) == len(set(ids(answer)))
    session = asking.who(history=(asking.inline(item_id(2, 3), "purchase"),), at=AT)
    row = (await ask(engine, requester=session)).rows[0]
    assert (row.reason.kind, row.reason.item_id) == ("because", item_id(2, 3))
    assert row.reason.text.startswith("Because you bought ")
    assert row.reason.event_ids is None  # it is not stored
    await engine.store.put_user(User("curious", interests=("music",)))
    told = (await ask(engine, "curious")).rows[0].reason
    assert (told.kind, told.text) == ("because", "Because you are interested in music")


async def test_a_visible_type_that_no_event_has_is_warned_of(engine: Engine) -> None:
    """Every question with a memory says so; a type of the session is one that an event has."""
    session = [asking.inline(item_id(0, 1), "played")]
    visible = asking.visible(types=["played", "veiw", "view"])
    requester = asking.who("u1", session, visible=visible)
    for question in (
        asking.rows(requester),
        asking.recommend(requester),
        asking.score(requester, [item_id(0, 1)]),
        asking.search(requester, "rocket"),
        asking.search(requester, "rocket", memory="history"),
    ):
        warnings = (await asking.ask(engine, question)).warnings or ()
        assert [each for each in warnings if each["pointer"] != "/query"] == [
            {"pointer": "/visible/types", "detail": "no event has the type 'veiw'"}
        ]


async def test_a_page_without_items_is_empty(fresh: Engine) -> None:
    """An empty store has no rows, and one row is one."""
    assert list((await ask(fresh)).rows) == []
    await fresh.live.catalogue.put_items([Item(f"i{n}", f"rocket {n}") for n in range(9)])
    await fresh.store.append([Event("u1", "i0", timestamp=AT)])
    answer = await ask(fresh, rows=1)
    assert [row.reason.kind for row in answer.rows] == ["because"]


async def test_a_long_history_has_rows_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history whose older events are collapsed has the same kinds of rows, with reasons."""
    monkeypatch.setattr("service.histories.memory_provider.LONG", 50)
    monkeypatch.setattr("service.engine.rows.MOST_OF_LONG", 20)
    events = [
        Event("long", item_id(n % 2, n * n), timestamp=AT - (300 - n) * 60 * SECOND)
        for n in range(300)
    ]
    await engine.store.append(events)
    answer = await ask(engine, "long")
    assert len(ids(answer)) == len(set(ids(answer)))
    seen = {event.item_id for event in events}
    for row in answer.rows:
        if row.reason.kind == "because":
            assert row.reason.item_id in seen
            assert seen.isdisjoint(item["item_id"] for item in row.items)
    assert {"because", "again"} <= {row.reason.kind for row in answer.rows}
