"""Audiences of items and affinities of users against requests for scores and for attention."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from models.ranking import audiences as audience_model
from service.domain.errors import NotFound
from service.domain.records import Event, Item, User
from service.engine import users as audience
from service.engine.engine import Engine
from tests.support import asking, tiny
from tests.support.tiny import NOON, item_id


async def ask(engine: Engine, item: str, **fields: Any) -> Any:
    """The audience of an item."""
    query = asking.audience(item, **{"at": NOON} | fields)
    return await asking.ask(engine, query)


async def scores(engine: Engine, user: str) -> dict[str, float]:
    """The score of every item for a user."""
    names = tuple(item.item_id for item in tiny.items())
    query = asking.score(asking.who(user_id=user, at=NOON), names)
    answer = await asking.ask(engine, query)
    return {item["item_id"]: item["score"] for item in answer.items}


async def test_an_audience_is_ranked_by_the_score_above_the_users_level(engine: Engine) -> None:
    """All of few users are scored, as requests for scores say, and reasons raise the score."""
    item = item_id(1, 4)
    await engine.store.put_user(User("profile", interests=("cooking",)))  # and no event
    answer = await ask(engine, item, limit=1000)
    seen = {event.user_id for event in engine.store.scan_events() if event.item_id == item}
    users = {event.user_id for event in engine.store.scan_events()} - seen
    assert {user["user_id"] for user in answer.users} == users
    assert (answer.scored, answer.candidates) == (len(users), len(users))
    assert answer.retrieval == "exact"
    wanted = {}
    for name in users:
        totals = await scores(engine, name)
        level = np.log(np.mean(np.exp(np.array(list(totals.values()), np.float64))))
        wanted[name] = totals[item] - level  # all 60 items are the reference
    found = {user["user_id"]: user["score"] for user in answer.users}
    assert found == pytest.approx(wanted, abs=1e-3)
    order = [user["score"] for user in answer.users]
    assert order == sorted(order, reverse=True)
    for user in answer.users:
        assert sum(user["parts"].values()) == pytest.approx(user["score"], abs=1e-4)
        assert len(user["explanation"]) <= 3
        history, _ = await engine.store.page(user["user_id"], limit=100)
        own = {event.event_id: event.item_id for event in history}
        for reason in user["explanation"]:
            assert reason.contribution > 0
            assert own[str(reason.row.event_id)] == reason.row.item_id
    everybody = await ask(engine, item, exclude_seen=False, limit=1000, explain=0)
    assert {user["user_id"] for user in everybody.users} == users | seen
    assert all("explanation" not in user for user in everybody.users)
    with pytest.raises(NotFound, match="nothing"):
        await ask(engine, "nothing")


async def test_candidates_of_many_users_are_near_the_item(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many users, those near the item are scored, and ranked as all would be."""
    item = item_id(1, 4)
    every = await ask(engine, item, limit=1000, exclude_seen=False)
    monkeypatch.setattr(audience, "SCORED_USERS", 5)
    some = await ask(engine, item, limit=1000, exclude_seen=False)
    assert (some.scored, some.candidates) == (5, every.candidates)
    chosen = [user["user_id"] for user in some.users]
    assert [u["user_id"] for u in every.users if u["user_id"] in chosen] == chosen
    # Every fourth user walks through the genre of the item.
    assert all(int(user[1:]) % 4 == 1 for user in chosen)
    await engine.live.catalogue.put_items([Item("new", "a soup of garlic and pepper")])
    fresh = await ask(engine, "new")  # without events, those of similar items are near
    assert fresh.scored == 5
    assert all(int(user["user_id"][1:]) % 4 == 1 for user in fresh.users)
    monkeypatch.setattr(audience_model, "_EVENTS", 3)
    assert (await ask(engine, item)).scored <= 5


async def test_writes_of_other_items_leave_the_memories_of_an_audience(engine: Engine) -> None:
    """After a new item, a new price and a deletion, only users of changed texts are read again."""
    item = item_id(1, 4)
    same, other = tiny.items()[49], tiny.items()[50]

    async def misses() -> float:
        before = engine.parts.memories.stats()["memory_misses"]
        await ask(engine, item, limit=1000)
        return engine.parts.memories.stats()["memory_misses"] - before

    assert await misses() > 0
    priced = replace(same, attributes={**same.attributes, "price": 3.5})
    new = Item("new", "a soup of garlic and pepper")
    for write in (
        partial(engine.live.catalogue.put_items, [new]),
        partial(engine.live.catalogue.put_items, [priced]),
        partial(engine.live.catalogue.delete_item, "new"),
        engine.live.refresh_popularity,
    ):
        await write()
        assert await misses() == 0
    await engine.live.catalogue.put_items([replace(other, title="another text", description="")])
    takers = {e.user_id for e in engine.store.scan_events() if e.item_id == other.item_id}
    assert 0 < await misses() <= len(takers)


async def test_affinities_are_the_attention_by_value(engine: Engine) -> None:
    """Masses are mean weights of attend over the best items; scores are means of score."""
    user = "u2"
    query = asking.affinities(user, at=NOON)
    answer = await asking.ask(engine, query)
    categories = {item.item_id: item.categories for item in tiny.items()}
    events, _ = await engine.store.page(user, limit=100)
    item_of = {event.event_id: event.item_id for event in events}
    masses: dict[str, float] = defaultdict(float)
    for target in categories:  # fewer than a hundred
        attended = await asking.ask(
            engine, asking.attend({"user_id": user}, item_id=target, at=NOON)
        )
        assert attended.ids is not None
        weights = np.mean(attended.weights, axis=0)
        for event, weight in zip(attended.ids, weights.tolist(), strict=True):
            for category in categories[item_of[event]]:
                masses[category] += weight / len(categories)
    totals = await scores(engine, user)
    mean = np.mean(list(totals.values()))
    assert {each.value for each in answer.values} == masses.keys()
    for each in answer.values:
        assert each.mass == pytest.approx(masses[str(each.value)], abs=1e-4)
        own = [totals[name] for name in totals if str(each.value) in categories[name]]
        assert each.score == pytest.approx(np.mean(own) - mean, abs=1e-4)
        taken = [item for item in item_of.values() if str(each.value) in categories[item]]
        assert each.events == len(taken)
    order = [each.mass for each in answer.values]
    assert order == sorted(order, reverse=True)
    assert "history" in [each.value for each in answer.values[:3]]  # what u2 walks through


async def test_hidden_items_are_in_no_affinity(engine: Engine) -> None:
    """The values of hidden and deleted items are not answered, and their events not counted."""
    kept, hidden, deleted = item_id(0, 3), item_id(1, 4), item_id(2, 5)
    await engine.store.append(
        [Event("one", name, timestamp=NOON) for name in (kept, hidden, deleted)]
    )
    (item,) = await engine.store.get_items([hidden])
    assert item is not None
    await engine.live.catalogue.put_items([replace(item, hidden=True)])
    await engine.live.catalogue.delete_item(deleted)
    query = asking.affinities("one", "attributes.number", at=NOON)
    answer = await asking.ask(engine, query)
    assert [(each.value, each.events) for each in answer.values] == [(3, 1)]


async def test_affinities_by_other_fields(engine: Engine) -> None:
    """Attributes and times are values too; nobody has none."""

    async def values(user: str, field: str) -> list[Any]:
        query = asking.affinities(user, field, 2, at=NOON)
        answer = await asking.ask(engine, query)
        return [each.value for each in answer.values]

    await engine.store.append([Event("one", item_id(0, 3), timestamp=NOON)])
    assert await values("one", "attributes.number") == [3]
    assert await values("one", "published_at") == ["2025-12-28T12:00:00Z"]
    assert await values("one", "attributes.nothing") == []
    assert await values("nobody", "categories") == []
