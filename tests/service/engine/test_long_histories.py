"""Long histories through the engine: collapsed, cached and always up to date."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from models.history import long_history
from service.domain.records import Event, Item
from service.engine.engine import Engine
from service.histories import memory_provider
from tests.support import asking, tiny

pytestmark = pytest.mark.verify

LENGTH = 2_600
HOUR = 3_600_000_000
ITEMS = tuple(tiny.item_id(genre, number) for genre in (0, 1) for number in range(6))
AT = (LENGTH + 2_000) * HOUR  # after all events
EVERYTHING = asking.visible(since=-(1 << 60))  # a mask, which asks for every event one by one


@pytest.fixture(autouse=True)
def _long_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_provider, "LONG", 1_500)
    monkeypatch.setattr(long_history, "LISTS_FROM", 64)


def events(count: int, start: int = 0, items: tuple[str, ...] = ITEMS) -> list[Event]:
    """Events one hour apart, on a few repeated items."""
    chosen = np.random.default_rng(start).integers(0, len(items), count)
    made = []
    for at, item in enumerate(chosen.tolist(), start):
        made.append(Event("ann", items[item], f"long-{at}", timestamp=at * HOUR, weight=1 + at % 3))
    return made


async def told(engine: Engine, made: list[Event]) -> None:
    """Append the events in batches of 1,000."""
    for at in range(0, len(made), 1_000):
        await engine.store.append(made[at : at + 1_000])


async def agree(engine: Engine, tolerance: float = 5e-5, **more: Any) -> Any:
    """Assert that scores and reasons equal those of every event; return the answer."""
    requester = asking.who(user_id="ann", at=AT, explain=5, explain_effects=True, **more)
    query = asking.score(requester, ITEMS)
    found = await asking.ask(engine, query)
    wanted = await asking.ask(
        engine,
        query.model_copy(update={"visible": EVERYTHING, "retrieval": asking.retrieval("exact")}),
    )
    assert wanted.rows_scanned == wanted.memory_rows
    for one, other in zip(found.items, wanted.items, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=tolerance)
        assert sum(x.contribution for x in one["explanation"]) == pytest.approx(
            sum(x.contribution for x in other["explanation"]), abs=5 * tolerance
        )
        if tolerance < 1e-3:
            named = {x.row.event_id: x for x in other["explanation"]}
            for reason in one["explanation"]:
                same = named.get(reason.row.event_id)
                # The sum of estimates is another number than the exact effect of several events.
                if same and (reason.events == 1 or reason.effect_is_exact == same.effect_is_exact):
                    near = pytest.approx(same.effect, abs=1e-4 * reason.events)
                    assert reason.effect == near
    return found


async def test_answers_reflect_every_change_of_a_history(
    trained: Engine, world: tiny.World
) -> None:
    """Answers reflect appends, late events, deletions, merges, changed items and new models."""
    await told(trained, events(LENGTH))
    await trained.store.append([Event("bob", ITEMS[1], "bob-1", timestamp=77)])
    changes: list[Callable[[], Awaitable[Any]]] = [
        lambda: trained.store.append(events(3, LENGTH)),
        lambda: told(trained, events(700, LENGTH + 10)),
        lambda: trained.store.append([Event("ann", ITEMS[0], "late", timestamp=5)]),
        lambda: trained.store.delete_event("ann", "long-17"),
        lambda: trained.store.delete_event("ann", f"long-{LENGTH + 2}"),
        lambda: trained.live.catalogue.put_items([Item(ITEMS[2], "quite another title")]),
        lambda: trained.live.catalogue.put_items([Item("new", "a new one")]),
        lambda: trained.store.merge("ann", "bob"),
        lambda: trained.activate(world.second),
    ]
    await agree(trained, temperature=2.0)  # event by event, and the next question is not
    found = await agree(trained)
    assert found.rows_scanned is not None
    assert found.memory_rows is not None
    assert found.rows_scanned < found.memory_rows
    for change in changes:
        await change()
        found = await agree(trained)
        assert found.rows_scanned is not None
    hits = trained.parts.memories.stats()["memory_hits"]
    await agree(trained, explain_exact=True)
    assert trained.parts.memories.stats()["memory_hits"] > hits
    await agree(trained, exclude_self=True)
    await agree(trained, retrieval=asking.retrieval("coarse", k=10_000))
    await trained.store.forget("ann")
    query = asking.score(asking.who(user_id="ann", at=AT), ITEMS)
    assert (await asking.ask(trained, query)).memory_rows == 0


async def test_the_encoder_reads_past_events_on_items_without_keys(trained: Engine) -> None:
    """Answers are right where most of the newest events are on unknown or on deleted items.

    So many of the others stay outside what is collapsed that the encoder finds all it reads.
    """
    late = tuple(f"late-{number}" for number in range(5))
    await trained.live.catalogue.put_items([Item(name, f"about {name}") for name in late])
    await told(trained, events(LENGTH))
    await told(trained, events(1_450, LENGTH, items=late))
    found = await agree(trained)
    assert found.rows_scanned is not None
    assert found.rows_scanned < 2_000
    for name in late:
        await trained.live.catalogue.delete_item(name)
    await agree(trained)
    await trained.live.catalogue.put_items([Item(late[0], "about this again")])
    await agree(trained)
    await told(trained, events(1_450, 2 * LENGTH, items=("unknown", *ITEMS[:1])))
    await agree(trained)


async def test_lists_are_built_in_the_background_and_report_their_error(trained: Engine) -> None:
    many = tuple(f"many-{n}" for n in range(900))
    await trained.live.catalogue.put_items(
        [Item(name, f"{name} about subject {n % 37}") for n, name in enumerate(many)]
    )
    await told(trained, events(4_000, items=many))
    listed = asking.retrieval(max_error=0.05)
    requester = asking.who(user_id="ann", at=AT, retrieval=listed)
    first = await asking.ask(trained, asking.score(requester, ITEMS))
    assert first.retrieval == "exact"  # lists are not waited for
    for _ in range(6_000):
        if not trained.parts.memories.stats()["long_histories_waiting_for_lists"]:
            break
        await asyncio.sleep(0.01)
    found = await agree(trained, tolerance=0.01, retrieval=listed)
    assert found.retrieval == "lists"
    for item in found.items:
        assert 0 < item["relative_error"] <= 0.05
        assert 0 < item["mass"] < 1
    answer = await asking.ask(trained, asking.recommend(requester, limit=5))
    assert len(answer.items) == 5
    answer = await asking.ask(trained, asking.search(requester, "many 3", limit=5))
    assert len(answer.items) == 5
    exact = await asking.ask(
        trained, asking.score({**requester, "retrieval": asking.retrieval("exact")}, ITEMS)
    )
    assert exact.retrieval == "exact"
    stats = trained.parts.memories.stats()
    assert stats["long_histories"] == 1
    assert stats["cached_memory_bytes"] > 0


async def test_without_room_answers_are_the_same(trained: Engine) -> None:
    """With a cache of 0 bytes the answers are the same."""
    trained.parts.memories.resize_cache(0)
    await told(trained, events(LENGTH))
    await agree(trained)
    assert trained.parts.memories.stats()["long_histories"] == 0


async def test_concurrent_requests_and_appends(trained: Engine) -> None:
    """Concurrent requests during appends get finite scores, and later answers are exact."""
    await told(trained, events(LENGTH))
    query = asking.score(asking.who(user_id="ann", at=AT), ITEMS[:3])

    async def ask() -> list[Any]:
        return [await asking.ask(trained, query) for _ in range(20)]

    asked = [asyncio.create_task(ask()) for _ in range(4)]
    for start in range(LENGTH, LENGTH + 1_200, 100):
        await trained.store.append(events(100, start))
    answers = [answer for task in asked for answer in await task]
    assert all(np.isfinite([item["score"] for item in answer.items]).all() for answer in answers)
    await agree(trained)
