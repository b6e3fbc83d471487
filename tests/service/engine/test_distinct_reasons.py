"""Reasons name an item once: the events of one item and type are one reason, by loops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS
from models.ranking.explanation import Reason, explain
from service.domain.records import Event
from service.domain.settings import Settings
from service.engine.engine import Engine, open_engine
from tests.support import asking, tiny
from tests.support.tiny import DAY, NOON, item_id

TARGETS = tuple(item_id(genre, number) for genre in range(3) for number in (2, 9))
TYPES = ("view", "purchase")

Group = tuple[str, str]  # item and type


class Story:
    """An engine, and the loop that it runs in."""

    def __init__(self, runner: asyncio.Runner, engine: Engine) -> None:
        self.runner, self.engine = runner, engine

    def score(self, requester: asking.Who, targets: tuple[str, ...] = TARGETS) -> Any:
        """The answer to a request for scores."""
        query = asking.score(requester, targets)
        return self.runner.run(asking.ask(self.engine, query))


@pytest.fixture(scope="module", params=[True, False], ids=["trained", "untrained"])
def story(
    request: pytest.FixtureRequest, world: tiny.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """The small world, with a model or without."""
    data = world.copy(tmp_path_factory.mktemp("reasons") / "data", trained=request.param)
    with asyncio.Runner() as runner:
        engine = runner.run(open_engine(Settings(data=data)))
        yield Story(runner, engine)
        runner.run(engine.close())


@st.composite
def histories(draw: st.DrawFn, most: int = 40) -> tuple[Any, ...]:
    """Events on few items, so that most are taken again, at different times."""
    pairs = st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(TYPES))
    drawn = draw(st.lists(pairs, min_size=1, max_size=most))
    return tuple(
        asking.inline(item_id(genre, number), type_, timestamp=NOON - (len(drawn) - place) * DAY)
        for place, (genre, number, type_) in enumerate(drawn)
    )


def groups_of(history: tuple[Any, ...]) -> dict[Group, list[int]]:
    """The places of the events of each item and type."""
    groups: dict[Group, list[int]] = {}
    for place, event in enumerate(history):
        groups.setdefault((event.item_id, event.type), []).append(place)
    return groups


def each_event(story: Story, history: tuple[Any, ...], top: int) -> list[dict[int, Reason]]:
    """The reasons of single events for each target, by their places, from the model.

    They are the foremost 2 top + 8, and four times as many until `top` items and types are named.
    """
    memories, snapshot = story.engine.parts.memories, story.engine.live.snapshot
    events = story.runner.run(memories.load(None, NOON, now=NOON, session=history))
    rows = snapshot.catalogue.rows(TARGETS)
    with memories.memory(snapshot, events, DEFAULT_OPTIONS, now=NOON) as user:
        every = explain(snapshot, user, rows, 1_000)
    found = []
    for each in every:
        order = sorted(each, key=lambda reason: _rank(reason.contribution), reverse=True)
        size = 2 * top + 8
        while size < len(order) and len({_name(history, one) for one in order[:size]}) < top:
            size *= 4
        found.append({reason.source: reason for reason in order[:size]})
    return found


def _name(history: tuple[Any, ...], reason: Reason) -> Group:
    """The item and type of a reason's event."""
    return history[reason.source].item_id, history[reason.source].type


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories(), top=st.integers(1, 6))
def test_a_reason_names_an_item_and_type_once(
    story: Story, history: tuple[Any, ...], top: int
) -> None:
    """The foremost items are named, each once, with sums over those of its events that count."""
    answer = story.score(asking.who(history=history, at=NOON, explain=top))
    groups = groups_of(history)
    for item, single in zip(answer.items, each_event(story, history, top), strict=True):
        sums = {
            key: sum(single[at].contribution for at in places if at in single)
            for key, places in groups.items()
            if any(at in single for at in places)
        }
        told = {(r.row.item_id, r.row.type): r for r in item["explanation"]}
        assert len(told) == len(item["explanation"]) == min(top, len(sums))
        order = sorted(sums, key=lambda key: (sums[key] <= 0, -abs(sums[key])))
        least = min(map(_rank, (sums[key] for key in order[:top])))
        for (name, kind), reason in told.items():
            places = [at for at in groups[str(name), kind] if at in single]
            assert reason.events == len(places)
            assert reason.contribution == pytest.approx(sums[str(name), kind], abs=1e-6)
            assert reason.weight == pytest.approx(sum(single[at].weight for at in places), abs=1e-6)
            assert reason.row.timestamp == history[max(places)].timestamp
            assert _rank(reason.contribution) >= (least[0], least[1] - 1e-6)
        contributions = [reason.contribution for reason in item["explanation"]]
        assert contributions == sorted(contributions, reverse=True)


def _rank(contribution: float) -> tuple[bool, float]:
    """How good a reason is: what raises a score before what lowers it, then by size."""
    return contribution > 0, abs(contribution)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories(most=16))
def test_exact_effects_are_those_of_all_events_of_a_reason(
    story: Story, history: tuple[Any, ...]
) -> None:
    targets = TARGETS[:2]
    exact = story.score(
        asking.who(history=history, at=NOON, explain=4, explain_exact=True), targets
    )
    near = story.score(
        asking.who(history=history, at=NOON, explain=4, explain_effects=True), targets
    )
    for at, (item, estimated) in enumerate(zip(exact.items, near.items, strict=True)):
        for reason, guess in zip(item["explanation"], estimated["explanation"], strict=True):
            assert reason.row == guess.row
            assert guess.effect is not None
            if reason.events > 1:
                assert not guess.effect_is_exact
            assert reason.effect_is_exact
            key = (reason.row.item_id, reason.row.type)
            rest = tuple(event for event in history if (event.item_id, event.type) != key)
            less = story.score(asking.who(history=rest, at=NOON), targets)
            lost = item["score"] - less.items[at]["score"]
            assert reason.effect == pytest.approx(lost, abs=1e-4)


def items_of(story: Story, user_id: str) -> Iterator[list[Any]]:
    """The explained items of every question that gives reasons."""
    engine, run = story.engine, story.runner.run
    asked = asking.who(user_id=user_id, at=NOON, explain=3)
    yield [*run(asking.ask(engine, asking.recommend(asked, limit=10))).items]
    yield [*run(asking.ask(engine, asking.search(asked, "rocket soup"))).items]
    rows = run(asking.ask(engine, asking.rows(asking.who(user_id=user_id, at=NOON)))).rows
    yield [item for row in rows for item in row.items if row.reason.kind == "because"]


def test_every_question_names_an_item_once(story: Story) -> None:
    """Every question about a user who buys again and again has distinct reasons."""
    often = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5)]
    events = [
        Event("regular", item_id(genre, n), type="purchase", timestamp=NOON - (turn * 9 + n) * DAY)
        for turn in range(6)
        for genre, n in often
    ]
    story.runner.run(story.engine.store.append(events))
    merged = 0

    def check(reasons: Any) -> int:
        names = [(reason.row.item_id, reason.row.type) for reason in reasons]
        assert len(names) == len(set(names))
        assert all(reason.row.event_id for reason in reasons)
        return sum(reason.events > 1 for reason in reasons)

    for place, items in enumerate(items_of(story, "regular")):
        assert items
        for item in items:
            merged += check(item["explanation"])
            assert place == 2 or len(item["explanation"]) == 3
    query = asking.audience(item_id(0, 4), limit=50, at=NOON)
    audience = story.runner.run(asking.ask(story.engine, query)).users
    (user,) = [user for user in audience if user["user_id"] == "regular"]
    assert check(user["explanation"]) > 0
    assert merged > 10


def test_reasons_are_filled_up_from_further_down(story: Story) -> None:
    """One item that was taken hundreds of times leaves room for the reasons after it."""
    many = [asking.inline(item_id(0, 1), timestamp=NOON - n * 60_000_000) for n in range(2_500)]
    few = [asking.inline(item_id(1, n), timestamp=NOON - (90 + n) * DAY) for n in range(3)]
    history = (*reversed(few), *reversed(many))
    requester = asking.who(history=history, at=NOON, explain=4)
    for item in story.score(requester, TARGETS[:1]).items:
        names = [(reason.row.item_id, reason.row.type) for reason in item["explanation"]]
        assert len(set(names)) == len(names) == 4
