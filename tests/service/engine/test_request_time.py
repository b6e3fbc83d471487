"""The time of a request: events after it do not exist for any question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from models.history import long_history
from service.domain.records import Event
from service.engine.engine import Engine
from service.histories import memory_provider
from tests.support import asking, tiny
from tests.support.tiny import DAY, NOON, SECOND, item_id

pytestmark = pytest.mark.verify

AT = NOON - 36 * DAY  # in the middle of the history of every user
EVERY = tuple(item.item_id for item in tiny.items())
USER = "u1"
MASKED = asking.visible(since=-(1 << 60))  # everything, event by event

Ask = Callable[[Engine, asking.Who], Any]


async def recommend(engine: Engine, requester: asking.Who, **fields: Any) -> Any:
    """Items for a requester."""
    query = asking.recommend(requester, limit=60, **fields)
    return await asking.ask(engine, query)


async def score(engine: Engine, requester: asking.Who) -> Any:
    """The scores of all items, with exact effects."""
    exact = {**requester, "explain_effects": True, "explain_exact": True}
    return await asking.ask(engine, asking.score(exact, EVERY[::12]))


async def search(engine: Engine, requester: asking.Who) -> Any:
    """A search that is re-ranked for a requester."""
    return await asking.ask(engine, asking.search(requester, "all about"))


async def rows(engine: Engine, requester: asking.Who) -> Any:
    """The rows of a requester's page."""
    query = asking.rows({k: v for k, v in requester.items() if k != "explain"})  # always explained
    return await asking.ask(engine, query)


async def attend(engine: Engine, requester: asking.Who) -> Any:
    """The bare attention over a stored user's memory."""
    memory = {"user_id": requester.get("user_id", "")}
    query = asking.attend(memory, item_id=item_id(0, 1), at=requester.get("at"))
    return await asking.ask(engine, query)


async def affinities(engine: Engine, requester: asking.Who) -> Any:
    """The categories that a user attends to."""
    query = asking.affinities(requester.get("user_id", ""), at=requester.get("at"))
    return await asking.ask(engine, query)


async def audience(engine: Engine, requester: asking.Who) -> Any:
    """The users for an item."""
    query = asking.audience(item_id(1, 4), limit=1000, at=requester.get("at"))
    return await asking.ask(engine, query)


async def popular(engine: Engine, requester: asking.Who) -> Any:
    """Ask for what everybody takes, without the items of a user."""
    plain = asking.who(requester.get("user_id"), at=requester.get("at"))
    query = asking.popular(plain, limit=60, exclude_seen=True)
    return await asking.ask(engine, query)


QUESTIONS: dict[str, Ask] = {
    "recommend": recommend,
    "recommend seen": partial(recommend, exclude_seen=False),
    "score": score,
    "search": search,
    "rows": rows,
    "attend": attend,
    "affinities": affinities,
    "audience": audience,
    "popular": popular,
}


def plain(value: Any) -> Any:
    """Return an answer as nested lists and dicts, its numbers to three digits."""
    if isinstance(value, dict):
        return {name: plain(value[name]) for name in value}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return round(value, 3) + 0.0 if isinstance(value, float) else value


async def later_events(engine: Engine) -> list[Event]:
    """The events of the user after the time, some there are."""
    events, _ = await engine.store.page(USER, limit=100)
    later = [event for event in events if (event.timestamp or 0) > AT]
    assert 0 < len(later) < len(events)
    return later


async def delete_later(engine: Engine) -> None:
    """Delete the user's events after the time, and have another user take these items then.

    How popular an item is depends on the events of all users.
    """
    for event in await later_events(engine):
        assert await engine.store.delete_event(USER, str(event.event_id))
        await engine.store.append([replace(event, user_id="heir")])


@pytest.mark.parametrize("name", QUESTIONS)
async def test_a_question_of_a_time_is_answered_as_if_later_events_were_deleted(
    engine: Engine, name: str
) -> None:
    """Items, scores and reasons are those of the same user without the events after the time."""
    ask, requester = QUESTIONS[name], asking.who(USER, at=AT, explain=20)
    unbounded = plain(await ask(engine, {**requester, "at": None}))
    bounded = plain(await ask(engine, requester))
    assert bounded != unbounded
    await delete_later(engine)
    assert plain(await ask(engine, requester)) == bounded


@pytest.mark.parametrize("name", QUESTIONS)
async def test_what_is_cached_of_a_user_serves_no_question_of_another_time(
    engine: Engine, name: str
) -> None:
    """Questions with and without a time are answered alike, whichever was asked before."""
    ask = QUESTIONS[name]
    asked = [asking.who(USER, at=at, explain=5) for at in (None, AT, NOON)]
    first = [plain(await ask(engine, each)) for each in asked]
    assert first[0] != first[1] != first[2]
    again = [plain(await ask(engine, each)) for each in reversed(asked)]
    assert again[::-1] == first


async def test_a_time_after_all_events_is_answered_from_the_cache(engine: Engine) -> None:
    """A request as of a time at which every event has happened takes the cached memory."""
    newest = max((event.timestamp or 0) for event in await later_events(engine))
    for at, hits in ((newest, 0), (newest, 1), (newest - 1, 1), (newest, 2)):
        await recommend(engine, asking.who(USER, at=at))
        assert engine.parts.memories.stats()["memory_hits"] == hits


async def test_only_items_taken_until_the_time_are_seen(engine: Engine) -> None:
    """`exclude_seen` leaves out items of events until the time, that of the time itself too."""
    await engine.store.append(
        [Event("watcher", item_id(2, n), timestamp=AT + n * SECOND) for n in range(3)]
    )
    for at, seen in ((AT, 1), (AT + SECOND, 2), (AT + 2 * SECOND, 3), (None, 3)):
        answer = await recommend(engine, asking.who("watcher", at=at))
        left_out = set(EVERY) - {item["item_id"] for item in answer.items}
        assert left_out == {item_id(2, n) for n in range(seen)}


async def test_events_of_the_session_count_until_the_time(engine: Engine) -> None:
    """Events of a `history` after the time are left out; those without a time count."""
    counted = (asking.inline(item_id(0, 1)), asking.inline(item_id(0, 2), timestamp=AT))
    late = asking.inline(item_id(3, 3), timestamp=AT + 1)
    for user in (None, USER):
        short = asking.who(user, counted, at=AT, explain=20)
        whole = {**short, "history": (late, *counted)}
        for ask in (recommend, score, search, rows):
            assert plain(await ask(engine, whole)) == plain(await ask(engine, short))


async def test_a_collapsed_history_is_bounded_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time within a history that is collapsed gives the scores of the events until then."""
    monkeypatch.setattr(memory_provider, "LONG", 400)
    monkeypatch.setattr(long_history, "LISTS_FROM", 64)
    events = [
        Event("long", EVERY[n * 7 % 40], timestamp=AT + (n - 900) * SECOND) for n in range(2_600)
    ]
    for first in range(0, len(events), 1_000):
        await engine.store.append(events[first : first + 1_000])
    await engine.store.append([replace(each, user_id="short") for each in events[:901]])
    whole = plain(await recommend(engine, asking.who("long")))
    stats = engine.parts.memories.stats()
    assert stats["long_histories"] == 1
    for ask in (recommend, search):
        bounded = await ask(engine, asking.who("long", at=AT))
        wanted = await ask(engine, asking.who("short", at=AT, visible=MASKED))
        assert plain(bounded) == plain(wanted)
    assert plain(await recommend(engine, asking.who("long"))) == whole
