"""Events whose times are ahead of this machine's clock, by another one's clock or by a client's."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from models.data import event_log
from service.domain.records import Event
from service.domain.timestamps import MAX_TIMESTAMP
from service.engine.engine import Engine
from tests.support import asking, tiny
from tests.support.tiny import DAY, item_id

TARGET, OTHER = item_id(0, 7), item_id(2, 7)
USERS = [f"ahead-{number}" for number in range(30)]


async def append(engine: Engine, ahead: int) -> None:
    """Have users take two items together, so much ahead of the clock."""
    at = min(time.time_ns() // 1000 + ahead, MAX_TIMESTAMP - DAY)
    events = [
        Event(user, item, timestamp=at + 10 * number + step)
        for number, user in enumerate(USERS)
        for step, item in enumerate([TARGET, OTHER])
    ]
    await engine.store.append(events)


def ids(answer: Any) -> list[str]:
    """The items of an answer."""
    return [item["item_id"] for item in answer.items]


Ask = Callable[..., Awaitable[Any]]


def questions(engine: Engine) -> tuple[Ask, Ask, Ask]:
    """Questions for popular items, for items taken together, and for an audience."""

    async def popular(by: Any, **fields: Any) -> list[str]:
        query = asking.popular(asking.who(), by, limit=60, **fields)
        return ids(await asking.ask(engine, query))

    async def together() -> list[str]:
        query = asking.together(TARGET, limit=60, relation="after")
        answer = await asking.ask(engine, query)
        return [item["item_id"] for item in answer.items if item["reason"] == "after"]

    async def audience() -> list[str]:
        query = asking.audience(TARGET, limit=1000, explain=0)
        answer = await asking.ask(engine, query)
        return [user["user_id"] for user in answer.users]

    return popular, together, audience


@pytest.mark.parametrize("ahead", [2 * DAY, 10_000 * 365 * DAY], ids=["two days", "year 9999"])
async def test_events_ahead_of_the_clock_count_at_once(engine: Engine, ahead: int) -> None:
    """The next question of anybody counts them; where ages count, only those of the next days."""
    popular, together, audience = questions(engine)
    await append(engine, ahead)
    assert {*(await popular("popular"))[:2]} == {TARGET, OTHER}
    assert TARGET in await popular("rated")
    for fields in ({"by": "trending"}, {"by": "popular", "window": 30 * DAY}):
        assert {*await popular(**fields)} == ({TARGET, OTHER} if ahead == 2 * DAY else set())
    assert (await popular("popular", half_life=DAY))[0] in (
        {TARGET, OTHER} if ahead == 2 * DAY else {item.item_id for item in tiny.items()}
    )
    assert not {*await audience()} & {*USERS}  # they have seen it
    affinities = await asking.ask(engine, asking.affinities(USERS[0]))
    assert {each.value for each in affinities.values} >= {"space", "history"}
    requester = asking.who(USERS[0])
    recommended = await asking.ask(engine, asking.recommend(requester, limit=60))
    assert len(recommended.items) == 58
    page = await asking.ask(engine, asking.rows(requester))
    shown = {item["item_id"] for row in page.rows for item in row.items}
    assert shown
    assert not shown & {TARGET, OTHER}
    assert OTHER in await together() or engine.live.snapshot.trained is not None


async def test_an_event_of_the_future_slows_no_question(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a request without a time, it makes no question read the whole log."""
    _, together, audience = questions(engine)
    await append(engine, 10_000 * 365 * DAY)
    await together()
    await audience()

    def between(*_: object) -> None:
        raise AssertionError("the whole log is gone through")

    monkeypatch.setattr(event_log.EventLog, "between", between)
    await together()
