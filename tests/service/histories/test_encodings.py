"""What is kept of histories is bounded, and changes no answer."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue.item_entry import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory, encode
from service.domain.queries import EventFilter, InlineEvent, Requester, ScoreQuery
from service.domain.records import Event, Item
from service.domain.settings import Settings
from service.domain.stage_clock import StageClock
from service.engine.engine import Engine, open_engine
from service.histories import encodings
from service.histories.encodings import Encodings
from service.histories.request_history import RequestHistory
from tests.support import tiny
from tests.support.histories_asked import ITEMS, asked
from tests.support.pasts import appends
from tests.support.small import DAY, random_model
from tests.support.small import encode as encode_texts
from tests.support.small import snapshot as small_snapshot

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return small_snapshot(ITEMS, random_model(1, window=8))


def right(kept: Encodings, snapshot: Snapshot, question: RequestHistory, at: int = 9 * DAY) -> None:
    """The memory is the one that is made of nothing but the history."""
    mine = kept.remember(snapshot, question, at)
    expected = build_memory(snapshot, question.history, at)
    np.testing.assert_allclose(mine.user_state, expected.user_state, atol=1e-4)
    np.testing.assert_array_equal(mine.bias, expected.bias)
    np.testing.assert_array_equal(mine.source, expected.source)


def size(snapshot: Snapshot, length: int) -> int:
    """Bytes that are kept of a history of this length."""
    encoded = encode(snapshot, asked("ann", length).history)
    assert encoded is not None
    return encoded.nbytes


# ---------------------------------------------------------------------------- the cache


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    room=st.sampled_from([0.0, 0.5, 1.0, 2.5, 1e6]),
    questions=st.lists(
        st.tuples(
            st.sampled_from("abcde"), st.integers(0, 30), st.sampled_from([0, DAY, 99 * DAY])
        ),
        max_size=25,
    ),
)
def test_no_bound_changes_an_answer(
    snapshot: Snapshot, room: float, questions: list[tuple[str, int, int]]
) -> None:
    """Histories grow and shrink in any order, at any time; what is kept never exceeds its bytes."""
    limit = int(room * size(snapshot, 8))
    kept = Encodings(limit)
    for user, length, at in questions:
        right(kept, snapshot, asked(user, length), at)
        assert kept.nbytes <= limit
        assert kept.nbytes == sum(each.nbytes for each in kept._kept.values())
        assert len(kept) <= len({user for user, _, _ in questions})


def test_only_new_events_are_read(snapshot: Snapshot) -> None:
    """A history asked about again costs nothing, one that grew its new events."""
    kept = Encodings(PLENTY)
    with appends(snapshot) as counts:
        for length in (3, 3, 5, 5, 8):
            kept.remember(snapshot, asked("ann", length), DAY)
            kept.remember(snapshot, asked("ann", length), 2 * DAY)
    assert counts == [3, 0, 0, 0, 1, 1, 0, 0, 0, 3, 0]
    assert len(kept) == 1


def test_what_was_asked_for_longest_ago_goes_first(snapshot: Snapshot) -> None:
    """There is room for two: a third takes the place of the one not asked about since."""
    kept = Encodings(int(2.5 * size(snapshot, 5)))
    for user in ("ann", "bob", "ann", "cid"):
        right(kept, snapshot, asked(user, 5))
    assert len(kept) == 2
    with appends(snapshot) as counts:
        for user in ("cid", "ann", "bob"):
            kept.remember(snapshot, asked(user, 5), DAY)
    assert counts == [0, 0, 5]


def test_where_nothing_fits_nothing_is_kept(snapshot: Snapshot) -> None:
    """A bound of nothing, or of less than one history: answered all the same."""
    for limit in (0, size(snapshot, 5) - 1):
        kept = Encodings(limit)
        right(kept, snapshot, asked("ann", 5))
        assert (len(kept), kept.nbytes) == (0, 0)
    kept = Encodings(size(snapshot, 5))
    right(kept, snapshot, asked("ann", 5))
    assert (len(kept), kept.nbytes) == (1, size(snapshot, 5))


def test_what_is_no_stored_history_is_not_kept(snapshot: Snapshot) -> None:
    """Sessions and parts of histories leave what is kept as it was; neither do they use it."""
    kept = Encodings(PLENTY)
    right(kept, snapshot, asked("ann", 4, stored=False))
    assert len(kept) == 0
    right(kept, snapshot, asked("ann", 4))
    before = kept.nbytes
    right(kept, snapshot, asked("ann", 6, stored=False))
    right(kept, snapshot, asked("ann", 2, stored=False))
    assert (len(kept), kept.nbytes) == (1, before)


def test_models_without_an_encoder_keep_nothing() -> None:
    """There is nothing to spare."""
    bare = small_snapshot(ITEMS, random_model(1, blocks=0))
    kept = Encodings(PLENTY)
    right(kept, bare, asked("ann", 4))
    assert (len(kept), kept.nbytes) == (0, 0)


def test_another_model_clears_it(snapshot: Snapshot) -> None:
    """And back again; no history of one model is read by another, though it be the same events."""
    other = small_snapshot(ITEMS, random_model(2, window=8))
    kept = Encodings(PLENTY)
    for now, users in ((snapshot, ("ann", "bob")), (other, ("ann",)), (snapshot, ("ann",))):
        for user in users:
            with appends(now) as counts:
                kept.remember(now, asked(user, 6), DAY)
            assert counts == [6]
            right(kept, now, asked(user, 6))
        assert len(kept) == len(users)
        assert kept.nbytes == len(users) * size(now, 6)


def test_another_catalogue_does_not(snapshot: Snapshot) -> None:
    """The same model over more items goes on; an item of another text is read again."""
    kept = Encodings(PLENTY)
    right(kept, snapshot, asked("ann", 6))
    entries = [ItemEntry("new", "new", {"title": "new"})]
    more = snapshot.refreshed(
        snapshot.catalogue.updated(entries, [], encode_texts), snapshot.counts
    )
    with appends(more) as counts:
        kept.remember(more, asked("ann", 6), DAY)
    assert counts == [0]
    item = int(asked("ann", 6).rows[2])
    entries = [ItemEntry(f"i{item}", "new", {"title": "other"})]
    text = more.refreshed(more.catalogue.updated(entries, [], encode_texts), more.counts)
    with appends(text) as counts:
        kept.remember(text, asked("ann", 6), DAY)
    assert counts == [6]
    right(kept, text, asked("ann", 6))


def test_an_answer_of_the_old_model_that_comes_late_is_not_kept(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it was computed another model came: what the new one kept stays."""
    other = small_snapshot(ITEMS, random_model(2, window=8))
    kept = Encodings(PLENTY)

    def slowly(now: Snapshot, history: UserHistory, at: int, **more: Any) -> UserMemory:
        monkeypatch.setattr(encodings, "build_memory", build_memory)
        kept.remember(other, asked("bob", 3), DAY)
        return build_memory(now, history, at, **more)

    monkeypatch.setattr(encodings, "build_memory", slowly)
    right(kept, snapshot, asked("ann", 6))
    assert len(kept) == 1
    with appends(other) as counts:
        right(kept, other, asked("bob", 3))
    assert counts[0] == 0


def test_many_ask_at_once(snapshot: Snapshot) -> None:
    """From several threads, for the same users: right answers, and a count that is right after."""
    kept = Encodings(int(2.5 * size(snapshot, 8)))
    questions = [("abcd"[n % 4], 1 + n * 7 % 20) for n in range(200)]

    def ask(question: tuple[str, int]) -> None:
        right(kept, snapshot, asked(*question))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, questions))
    assert kept.nbytes == sum(each.nbytes for each in kept._kept.values())
    assert kept.nbytes <= 2.5 * size(snapshot, 8)


# ---------------------------------------------------------------------------- in the service


def test_what_is_kept_is_never_older_than_the_history(world: tiny.World, tmp_path: Path) -> None:
    """After events in and out of order, deletions, merges and new items: what would be computed."""

    async def story(engine: Engine) -> None:
        changes: list[Callable[[], Awaitable[object]] | None] = [
            None,
            lambda: engine.ingest([Event("ann", tiny.item_id(0, 3), "ann-3", timestamp=9)]),
            lambda: engine.ingest([Event("ann", tiny.item_id(1, 3), "ann-4", timestamp=1)]),
            lambda: engine.delete_event("ann", "ann-0"),
            lambda: engine.put_items([Item(tiny.item_id(1, 1), "another title")]),
            lambda: engine.merge("ann", "bob"),
            lambda: engine.activate(world.second),
            lambda: engine.ingest([Event("ann", tiny.item_id(0, 4), "ann-5", timestamp=10)]),
            None,
        ]
        seen: list[torch.Tensor] = []
        for change in changes:
            if change is not None:
                await change()
            snapshot, question, at = await engine._ask(
                Requester(user_id="ann", at=20), StageClock()
            )
            right(engine._memories.encodings, snapshot, question, at)
            seen.append(build_memory(snapshot, question.history, at).user_state)
            assert seen[-1].any()
        for place, change in enumerate(changes[1:], 1):
            assert torch.allclose(seen[place], seen[place - 1], atol=1e-4) == (change is None)
        await engine.forget("ann")
        snapshot, question, at = await engine._ask(Requester(user_id="ann", at=20), StageClock())
        assert not engine._memories.encodings.remember(snapshot, question, at).user_state.any()

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


def test_a_growing_history_is_read_once(world: tiny.World, tmp_path: Path) -> None:
    """Through the whole service: event by event, one is read for each; and asking again is free."""

    async def story(engine: Engine) -> None:
        plain = ScoreQuery(Requester(user_id="ann", at=20), (tiny.item_id(0, 5),))
        await engine.score(plain, StageClock())
        snapshot, _, _ = await engine._ask(plain.requester, StageClock())
        with appends(snapshot) as counts:
            for number in range(3, 8):
                await engine.ingest(
                    [Event("ann", tiny.item_id(0, number), f"ann-{number}", timestamp=number)]
                )
                await engine.score(plain, StageClock())
                await engine.score(plain, StageClock())
        assert counts == [1] * 5  # asked for again, a memory is the one that was
        assert (await engine.stats())["cached_encodings"] == 1
        assert (await engine.stats())["cached_encoding_bytes"] > 0

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


def test_sessions_and_windows_are_encoded_on_their_own(world: tiny.World, tmp_path: Path) -> None:
    """What is laid over a history, or hidden from it, is neither kept nor served."""

    async def story(engine: Engine) -> None:
        plain = ScoreQuery(Requester(user_id="ann", at=0), (tiny.item_id(0, 5),))
        before = (await engine.score(plain, StageClock())).items[0]["score"]
        session = (InlineEvent(tiny.item_id(2, 1)),)
        for requester in (
            replace(plain.requester, history=session),
            replace(plain.requester, visible=EventFilter(types=frozenset({"nothing"}))),
        ):
            other = (await engine.score(replace(plain, requester=requester), StageClock())).items[0]
            assert other["score"] != before
        assert (await engine.score(plain, StageClock())).items[0]["score"] == before

    asyncio.run(_with_engine(world.copy(tmp_path / "data"), story))


def test_without_room_the_service_answers_the_same(world: tiny.World, tmp_path: Path) -> None:
    """The setting bounds what is kept; at 0 nothing is."""
    answers: list[list[float]] = []

    async def story(engine: Engine) -> None:
        questions = [ScoreQuery(Requester(user_id=user, at=20), (tiny.item_id(0, 5),))
                     for user in ("ann", "bob", "ann")]  # fmt: skip
        answers.append(
            [(await engine.score(each, StageClock())).items[0]["score"] for each in questions]
        )
        answers[-1].append((await engine.stats())["cached_encodings"])

    asyncio.run(_with_engine(world.copy(tmp_path / "one"), story))
    asyncio.run(_with_engine(world.copy(tmp_path / "two"), story, encoding_cache_bytes=0))
    assert answers[0][:3] == pytest.approx(answers[1][:3], abs=1e-4)
    assert (answers[0][3], answers[1][3]) == (2, 0)


async def _with_engine(data: Path, story: Callable[[Engine], Awaitable[None]], **more: Any) -> None:
    engine = await open_engine(Settings(data=data, **more))
    try:
        for user in ("ann", "bob"):
            items = [tiny.item_id(number % 3, number) for number in range(3)]
            await engine.ingest(
                [Event(user, item, f"{user}-{at}", timestamp=at) for at, item in enumerate(items)]
            )
        await story(engine)
    finally:
        await engine.close()
