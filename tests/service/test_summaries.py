"""A remembered summary is the one that would be computed."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import torch

from models.user_memory import summarise
from service.engine import Engine, open_engine
from service.queries import Asker, InlineEvent, ScoreQuery, Visible
from service.records import Event, Item
from service.settings import Settings
from service.summaries import Summaries
from service.telemetry import Stages
from tests import tiny


def test_a_summary_is_never_older_than_the_history(world: tiny.World, tmp_path: Path) -> None:
    """After events, deletions and new items, what is remembered equals what is computed."""

    async def story(engine: Engine) -> None:
        for change in (None, "append", "delete", "item", None):
            if change == "append":
                await engine.ingest([Event("ann", tiny.item_id(0, 3), "ann-3")])
            if change == "delete":
                await engine.delete_event("ann", "ann-0")
            if change == "item":
                await engine.put_items([Item(tiny.item_id(0, 1), "another title")])
            snapshot, asked, at = await engine._ask(Asker(user_id="ann", at=0), Stages())
            user = engine._summaries.remember(snapshot, asked, at)
            assert torch.equal(user.summary, summarise(snapshot, asked.past))
            assert user.summary.any()

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


def test_sessions_and_windows_have_summaries_of_their_own(
    world: tiny.World, tmp_path: Path
) -> None:
    """What is laid over a history, or hidden from it, is neither remembered nor served."""

    async def story(engine: Engine) -> None:
        plain = ScoreQuery(Asker(user_id="ann", at=0), (tiny.item_id(0, 5),))
        before = (await engine.score(plain, Stages())).items[0].score
        session = (InlineEvent(tiny.item_id(2, 1)),)
        for asker in (
            replace(plain.asker, history=session),
            replace(plain.asker, visible=Visible(types=frozenset({"nothing"}))),
        ):
            other = (await engine.score(replace(plain, asker=asker), Stages())).items[0]
            assert other.parts is not None
            assert other.score != before
        assert (await engine.score(plain, Stages())).items[0].score == before

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


def test_what_is_forgotten_first_was_asked_for_longest_ago(
    world: tiny.World, tmp_path: Path
) -> None:
    """The number kept is bounded, and dropping one changes no answer."""

    async def story(engine: Engine) -> None:
        few = Summaries(kept=1)
        for user in ("ann", "bob", "ann"):
            snapshot, asked, at = await engine._ask(Asker(user_id=user, at=0), Stages())
            summary = few.remember(snapshot, asked, at).summary
            assert torch.equal(summary, summarise(snapshot, asked.past))
            assert len(few) == 1

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


async def _with_engine(data: Path, story: Callable[[Engine], Awaitable[None]]) -> None:
    engine = await open_engine(Settings(data=data))
    try:
        for user in ("ann", "bob"):
            items = [tiny.item_id(number % 3, number) for number in range(3)]
            await engine.ingest(
                [Event(user, item, f"{user}-{at}", timestamp=at) for at, item in enumerate(items)]
            )
        await story(engine)
    finally:
        await engine.close()
