"""Search of one's own history, against a plain loop over the events and a search of their items."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from models.catalogue.item_filter import Condition, Group
from models.catalogue.item_filter import ItemFilter as Filter
from service.domain.errors import StoreUnreachable
from service.domain.records import Event, Item
from service.engine.engine import Engine
from tests.support import asking
from tests.support.tiny import DAY, NOON, item_id

EVEN = Condition("categories", {"eq": "even"})
# Many events on one item, several at one time, one in the future, one on an unknown item.
AGAIN = [
    *(Event("fan", item_id(0, 4), f"f{n}", "watch", timestamp=NOON - n * DAY) for n in range(30)),
    *(Event("fan", item_id(0, n), f"g{n}", "view", timestamp=NOON - 9 * DAY) for n in range(12)),
    *(Event("fan", item_id(1, n), f"h{n}", "view", timestamp=NOON - n * DAY) for n in range(9)),
    Event("fan", item_id(0, 5), "later", "watch", timestamp=NOON + DAY),
    Event("fan", "nowhere", "unknown", "watch", timestamp=NOON),
]
SESSION = (
    asking.inline(item_id(0, 2), "play", timestamp=NOON - DAY),
    asking.inline(item_id(3, 1)),
    asking.inline("nowhere"),
)


async def ask(engine: Engine, query: str, requester: asking.Who, **more: Any) -> Any:
    """Search the history of a requester, as of noon unless they say otherwise."""
    asked = asking.search(requester, query, memory="history", fill=True, **more)
    return await asking.ask(engine, asked)


def found(answer: Any) -> list[Any]:
    """The events of an answer."""
    return list(answer.events)


async def expected(
    engine: Engine, events: Sequence[Event], query: str, wanted: Filter | None, temperature: float
) -> Iterator[tuple[float, float, float, Event, dict[str, float]]]:
    """(score, recency, weight, event, fields that matched), best first, by a loop in float64."""
    members = [Condition("item_id", {"in": sorted({each.item_id for each in events})})]
    among = Group("all", (*members, *([] if wanted is None else [wanted])))
    plain = asking.search(asking.who(temperature=temperature), query, 1000, filter=among, fill=True)
    items = (await asking.ask(engine, plain)).items
    by_id = {item["item_id"]: item for item in items}
    scored = []
    for each in events:
        if each.item_id in by_id and each.timestamp is not None:
            item, days = by_id[each.item_id], max(0, NOON - each.timestamp) / DAY
            recency = 0.5 / (1 + days / 30) / temperature
            scored.append((item["score"] + recency, recency, each, item["matched"]))
    total = math.fsum(math.exp(score) for score, *_ in scored)
    scored.sort(key=lambda one: (-one[0], -cast(int, one[2].timestamp)))
    return ((s, r, math.exp(s) / total, event, matched) for s, r, event, matched in scored)


@pytest.mark.parametrize(
    "query", ["rocket planet", "rokcet", "space-0", "all about soup", "garlic OR"]
)
@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("wanted", [None, EVEN])
async def test_events_are_those_of_a_plain_loop(
    trained: Engine, query: str, temperature: float, wanted: Filter | None
) -> None:
    """Scores, weights, order and matched fields equal those of a loop over the person's events.

    The loop takes the scores of a catalogue search that is restricted to the person's items.
    """
    await trained.store.append(AGAIN)
    requester = asking.who("fan", temperature=temperature, at=NOON)
    until = [each for each in AGAIN if cast(int, each.timestamp) <= NOON]
    more = {} if wanted is None else {"filter": wanted}
    whole = list(await expected(trained, until, query, wanted, temperature))
    assert len({event.item_id for *_, event, _ in whole}) > 3
    for limit in (1, 5, 1000):
        told = found(await ask(trained, query, requester, limit=limit, **more))
        assert len(told) == min(limit, len(whole))
        for event, (score, recency, weight, _, _) in zip(told, whole, strict=False):
            assert event["score"] == pytest.approx(score, abs=1e-4)
            assert event["parts"]["recency"] == pytest.approx(recency, rel=1e-12)
            assert sum(event["parts"].values()) == event["score"]
            assert event["weight"] == pytest.approx(weight, rel=1e-3)
    by_id = {event.event_id: (event, matched) for *_, event, matched in whole}
    for event in told:
        source, matched = by_id.pop(event["event_id"])
        assert (event["item_id"], event["type"]) == (source.item_id, source.type)
        assert event["timestamp"] == source.timestamp
        assert event["matched"] == pytest.approx(matched, abs=1e-4)
    assert not by_id  # every event came once
    own = [event["timestamp"] for event in told if event["item_id"] == item_id(0, 4)]
    assert own == sorted(own, reverse=True) != []
    assert sum(event["weight"] for event in told) == pytest.approx(1, abs=1e-5)
    (best,) = found(await ask(trained, query, asking.who("fan", hard=True, at=NOON), **more))
    (newest,) = [one for one in told if one["item_id"] == best["item_id"]][:1]
    assert best["event_id"] == newest["event_id"]
    assert best["weight"] == pytest.approx(1)


async def test_a_better_match_goes_before_a_newer_event(trained: Engine) -> None:
    """The newer of two events on equal texts is first, and a word that matches beats any age."""
    twins = [Item(name, title="quartz clock repair") for name in ("one", "two")]
    await trained.store.put_items([*twins, Item("other", title="garden walls")])
    ages = {"one": 700, "two": 699, "other": 0}
    events = [Event("v", id_, id_, timestamp=NOON - n * DAY) for id_, n in ages.items()]
    await trained.store.append(events)
    told = found(await ask(trained, "quartz", asking.who("v", at=NOON)))
    assert [event["event_id"] for event in told] == ["two", "one", "other"]


async def test_only_visible_events_of_the_requester_are_found(trained: Engine) -> None:
    """Nobody else's events are found, nor of hidden and deleted items, nor past the conditions."""
    await trained.store.append(AGAIN)
    others = {f"e{user}-{n}" for user in range(40) for n in range(12)}
    now = found(await ask(trained, "rocket", asking.who("fan"), limit=1000))
    assert {event["event_id"] for event in now} & others == set()
    assert "later" in {event["event_id"] for event in now}
    visible = asking.visible(since=NOON - 9 * DAY, until=NOON, types=["watch"], categories=["even"])
    told = found(await ask(trained, "rocket", asking.who("fan", visible=visible), limit=1000))
    assert {event["event_id"] for event in told} == {f"f{n}" for n in range(1, 10)}
    await trained.store.put_items([Item(item_id(0, 3), title="rocket", hidden=True)])
    await trained.store.delete_item(item_id(0, 4))
    told = found(await ask(trained, "rocket", asking.who("fan"), limit=1000))
    gone = {item_id(0, 3), item_id(0, 4)}
    assert {event["item_id"] for event in now} - {event["item_id"] for event in told} == gone
    assert len({event["item_id"] for event in told} & gone) == 0
    nobody = await ask(trained, "rocket", asking.who("nobody"))
    assert (nobody.events, nobody.keys_attended) == ([], 0)
    (warning,) = nobody.warnings
    assert warning.detail == "no item of the history matches 'rocket'"


async def test_a_session_is_searched_alone_and_over_a_history(trained: Engine) -> None:
    """Inline events are found, without ids; with a user they lie among the stored ones."""
    await trained.store.append(AGAIN)
    alone = found(await ask(trained, "rocket", asking.who(history=SESSION, at=NOON)))
    items = {item_id(0, 2): ("play", NOON - DAY), item_id(3, 1): ("view", NOON)}
    assert {e["item_id"]: (e["type"], e["timestamp"]) for e in alone} == items
    assert {event["event_id"] for event in alone} == {None}
    both = found(await ask(trained, "rocket", asking.who("fan", SESSION, at=NOON), limit=1000))
    stored = found(await ask(trained, "rocket", asking.who("fan", at=NOON), limit=1000))
    assert len(both) == len(stored) + 2


async def test_coarse_retrieval_attends_the_nearest_keys(trained: Engine) -> None:
    """`coarse` attends fewer keys, states the share of the softmax that they hold, and says so."""
    await trained.store.append(AGAIN)
    exact = await ask(trained, "soup", asking.who("fan", at=NOON), limit=1000)
    coarse = asking.who("fan", retrieval=asking.retrieval("coarse", k=3), at=NOON)
    some = await ask(trained, "soup", coarse, limit=1000)
    assert (exact.retrieval, exact.mass, some.retrieval) == ("exact", 1.0, "coarse")
    assert 0 < (some.keys_attended or 0) < (exact.keys_attended or 0)
    kept = {event["event_id"] for event in found(some)}
    held = sum(each["weight"] for each in found(exact) if each["event_id"] in kept)
    assert some.mass == pytest.approx(held, rel=1e-4)
    assert held < 1


async def test_answers_while_the_store_is_away_say_so(
    trained: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that are known are found without their ids, and the answer is degraded."""
    before = await ask(trained, "rocket", asking.who("u0"))
    assert not before.degraded

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnreachable("away")

    for name in ("changed_history", "event_ids", "get_items"):
        monkeypatch.setattr(trained.store, name, away)
    after = await ask(trained, "rocket", asking.who("u0"), highlight=True)
    assert after.degraded
    assert [event["event_id"] for event in found(after)] == [None] * len(before.events)
    assert [event["item_id"] for event in after.events] == [e["item_id"] for e in before.events]
