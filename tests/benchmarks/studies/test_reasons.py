"""The study of reasons: its counts on answers of known numbers, and on a served model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from service.domain.queries import (
    AnswerItem,
    Contribution,
    InlineEvent,
    MemoryRow,
    Requester,
    ScoreQuery,
)
from service.domain.records import Event
from service.domain.settings import Settings
from service.domain.stage_clock import StageClock
from service.engine.answers import Answers
from service.engine.compose import compose
from tests.benchmarks.studies.reasons import (
    Figures,
    count,
    hide,
    measure,
    named,
    question,
    summarise,
)
from tests.benchmarks.workload.data import prepare_data
from tests.benchmarks.workload.questions import AT

USERS = 6


def reason(event: str, item: str, contribution: float, effect: float | None) -> Contribution:
    is_exact = event != "old"
    return Contribution(MemoryRow(event, item, "", "view", 0), 0.5, contribution, effect, is_exact)


def item(*explanation: Contribution) -> AnswerItem:
    return {"item_id": "x", "title": "", "explanation": explanation}


def test_counts_of_known_answers() -> None:
    """Each kind of reason is counted where it occurs, and what lowers a score is none."""
    answer = [
        item(reason("1", "a", 2.0, 0.5), reason("2", "b", 0.1, -0.5)),
        item(reason("1", "a", 2.0, 0.0), reason("3", "a", 1.0, 0.1)),
        item(reason("1", "a", 2.0, 0.5), reason("1", "a", 1.0, 0.5)),
        item(reason("4", "secret", 2.0, 0.5), reason("old", "b", 1.0, 0.2)),
        item(reason("2", "b", 0.3, 0.1)),
        item(reason("2", "b", -1.0, -1.0)),
        item(),
    ]
    found = summarise([count(answer, {"a", "b"}), count([item()], {"a"})])
    assert found == Figures(
        answers=2,
        items=8,
        unexplained=3,
        reasons=9,
        exact=8,
        raising=7,
        told=8,
        told_raising=7,
        repeated=1,
        same_item=2,
        hidden=1,
    )


async def left_out(data: Path) -> list[tuple[float, float | None]]:
    """Effects of reasons, and the same from scoring what is left of the history, sent inline.

    None where a reason is not of all events on its item, since it does not say of which ones.
    """
    parts = compose(Settings.read({"data": data}), threads=1)
    try:
        await parts.live.open()
        engine = Answers(parts)
        stored = list(parts.store.scan_events())
        found: list[tuple[float, float | None]] = []
        for user in parts.store.scan_user_ids():
            events = [event for event in stored if event.user_id == user]
            answer = await engine.recommend(question(user), StageClock())
            for each in answer.items:
                for one in named(each):
                    if one.row.event_id is None:
                        continue
                    on = [
                        (event.item_id, event.type) == (one.row.item_id, one.row.type)
                        or event.event_id == one.row.event_id  # of a hidden item, without its id
                        for event in events
                    ]
                    effect = one.effect or 0.0
                    if one.events != sum(on):
                        found.append((effect, None))
                        continue
                    left = [event for event, is_on in zip(events, on, strict=True) if not is_on]
                    score = await score_inline(engine, left, each["item_id"])
                    found.append((effect, each["score"] - score))
        return found
    finally:
        await parts.close()


async def score_inline(engine: Answers, events: Sequence[Event], target: str) -> float:
    history = tuple(InlineEvent(e.item_id, e.type, e.weight, e.timestamp) for e in events)
    query = ScoreQuery(Requester(history=history, at=AT), (target,))
    return (await engine.score(query, StageClock())).items[0]["score"]


def test_a_served_model_is_measured() -> None:
    """Reasons that raise a score are as many as those without which what is left scores less."""
    with prepare_data(None, items=300, users=USERS) as ground:
        done: list[int] = []
        found = measure(ground.data, USERS, progress=done.append)
        asyncio.run(hide(ground.data, np.random.default_rng(0)))
        effects = asyncio.run(left_out(ground.data))
    assert done == list(range(1, USERS + 1))
    assert (found.answers, found.items) == (USERS, 5 * USERS)
    whole = [(effect, less) for effect, less in effects if less is not None]
    assert len(whole) > 0.8 * len(effects)
    assert [effect for effect, _ in whole] == pytest.approx([less for _, less in whole], abs=1e-3)
    assert found.reasons == len(effects)
    assert found.raising == sum((effect if less is None else less) > 0 for effect, less in effects)
    assert (found.repeated, found.hidden) == (0, 0)
