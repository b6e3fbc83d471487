"""Recommendations from events, without a catalogue."""

import asyncio
from pathlib import Path

import pytest

from service.domain.errors import Invalid, NotFound
from service.domain.records import Event, Item
from service.engine.engine import Engine
from service.questions.parts import PinIn
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore
from tests.support import asking, tiny
from tests.support.engine_story import opened


async def test_items_of_events_are_recommended(tmp_path: Path) -> None:
    """Without a catalogue the items of events are recommended, by popularity or by a model."""
    best = tiny.item_id(2, 7)
    store = SQLiteStore(tmp_path / STORE_FILE)
    await store.append(tiny.events())
    await store.append([Event("x", best) for _ in range(99)])
    await store.close()

    async def ask(reason: str) -> list[str]:
        async with opened(tmp_path) as engine:
            query = asking.recommend(asking.who(user_id="u0"), limit=5, exclude_seen=False)
            answer = await asking.ask(engine, query)
        assert {item["reason"] for item in answer.items} == {reason}
        return [item["item_id"] for item in answer.items]

    assert (await ask("popular"))[0] == best
    await asyncio.to_thread(tiny.train, tmp_path)
    found = await ask("personal")
    assert sum(item.startswith("space") for item in found) >= 4  # the genre that u0 walks through
    async with opened(tmp_path) as engine:
        catalogue = [Item("space-01", "a rocket"), Item("new", "a comet")]
        await engine.live.catalogue.put_items(catalogue)
        pins = [PinIn(item_id=best, position=1)]
        answer = await asking.ask(engine, asking.recommend(asking.who(user_id="u0"), pin=pins))
        assert {item["item_id"] for item in answer.items} <= {"space-01", "new"}
        [warning] = answer.warnings
        assert warning.detail == f"item {best!r} is not in the catalogue"


async def test_an_item_without_text_or_event_is_not_recommended(fresh: Engine) -> None:
    """A change of stock may create it. Its first event, once it is counted, brings it in."""

    async def offered() -> set[str]:
        answer = await asking.ask(fresh, asking.recommend(asking.who(), 9))
        return {item["item_id"] for item in answer.items}

    await fresh.live.catalogue.put_items([Item("ghost", attributes={"stock": 7})])
    assert await offered() == {"ghost"}  # there is nothing else
    await fresh.live.catalogue.put_items([Item("a", "a comet")])
    assert await offered() == {"a"}
    await fresh.store.append([Event("u", "ghost")])
    await fresh.live.refresh_popularity()
    assert await offered() == {"a", "ghost"}


@pytest.mark.parametrize("is_listed", [True, False], ids=["no text", "no catalogue"])
async def test_what_is_recommended_is_known_to_every_question(
    fresh: Engine, is_listed: bool
) -> None:
    """Without a model too, an item that has no text is asked about as any other."""
    if is_listed:
        await fresh.live.catalogue.put_items([Item("a"), Item("b"), Item("c", "a comet")])
    await fresh.store.append([Event("u", "a"), Event("v", "a"), Event("v", "b")])
    await asking.ask(fresh, asking.popular(asking.who()))  # brings the items of events in
    await fresh.live.refresh_popularity()
    found = await asking.ask(fresh, asking.recommend(asking.who(), 9))
    offered = [item["item_id"] for item in found.items]
    assert {"a", "b"} <= set(offered)
    requester = asking.who(user_id="u", explain=3)
    scored = await asking.ask(fresh, asking.score(requester, tuple(offered)))
    assert [item["item_id"] for item in scored.items] == offered
    for item in offered:
        await asking.ask(fresh, asking.together(item))
        await asking.ask(fresh, asking.audience(item))
        await asking.ask(fresh, asking.attend({"user_id": "u"}, item_id=item))
    for space in ("both", "content"):
        similar = await asking.ask(fresh, asking.similar("a", space=space))
        assert similar.items == []
        (warning,) = similar.warnings
        assert warning.pointer == "/item_id"
        assert "'a' has neither a text nor an embedding" in warning.detail
    with pytest.raises(Invalid, match="neither a text nor an embedding"):
        await asking.ask(fresh, asking.attend({"catalogue": True}, item_id="a"))
    for unknown in ("x", ""):
        with pytest.raises(NotFound):
            await asking.ask(fresh, asking.similar(unknown))
