"""The memory provider: memories equal those built from nothing, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.scoring import score
from service.histories.event_columns import EMPTY, EventColumns
from service.histories.memory_provider import MemoryProvider
from service.questions.parts import ALL_EVENTS, VisibleIn
from tests.support import asking
from tests.support.pasts import appends
from tests.support.small import DAY, encode, random_model
from tests.support.small import snapshot as small_snapshot
from tests.support.stored_events import ITEMS, memory_provider, stored_events, user_history

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return small_snapshot(ITEMS, random_model(1, window=8))


@pytest.fixture
def memories() -> Iterator[MemoryProvider]:
    made = memory_provider(PLENTY)
    yield made
    made.close()


def provided(
    memories: MemoryProvider,
    snapshot: Snapshot,
    events: EventColumns,
    at: int = 99 * DAY,
    options: AttentionOptions = DEFAULT_OPTIONS,
    visible: VisibleIn = ALL_EVENTS,
) -> UserMemory:
    """The memory that a request gets."""
    with memories.memory(snapshot, events, options, now=at, visible=visible) as user:
        return user


def check(
    memories: MemoryProvider, snapshot: Snapshot, events: EventColumns, at: int = 99 * DAY
) -> None:
    """Assert that the provided memory equals one built from the events."""
    user = provided(memories, snapshot, events, at)
    expected = build_memory(snapshot, user_history(snapshot, events), at)
    np.testing.assert_allclose(user.user_state, expected.user_state, atol=1e-4)
    assert torch.equal(user.bias, expected.bias)
    # States that were appended one by one are computed by NumPy.
    np.testing.assert_allclose(user.query, expected.query, atol=1e-4)
    np.testing.assert_allclose(user.keys, expected.keys, atol=1e-4)
    np.testing.assert_allclose(user.values, expected.values, atol=1e-4)
    assert (user.source == expected.source).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    budget=st.sampled_from([0, 3_000, 12_000, 40_000, PLENTY]),
    requests=st.lists(
        st.tuples(
            st.sampled_from("abcde"),
            st.sampled_from([0, 1, 4, 5, 8, 30]),
            st.one_of(
                st.integers(0, 12 * DAY),
                st.integers(9 * DAY, 9 * DAY + 3_000_000_000),
                st.just(99 * DAY),
            ),
        ),
        max_size=25,
    ),
)
def test_no_budget_and_no_time_changes_a_memory(
    snapshot: Snapshot, budget: int, requests: list[tuple[str, int, int]]
) -> None:
    """Memories do not depend on the cache budget, which is never exceeded."""
    memories = memory_provider(budget)
    for user_id, length, at in requests:
        check(memories, snapshot, stored_events(user_id, length), at)
        assert memories.stats()["cached_history_bytes"] <= budget


def test_only_new_events_are_encoded(memories: MemoryProvider, snapshot: Snapshot) -> None:
    """A repeated request encodes nothing, and one after an append only the new events."""
    with appends(snapshot) as counts:
        for length in (3, 3, 5, 5, 8):
            provided(memories, snapshot, stored_events("ann", length))
            provided(memories, snapshot, stored_events("ann", length))
    assert [count for count in counts if count] == [3, 1, 1, 3]


def test_repeated_request_hits_the_cache(memories: MemoryProvider, snapshot: Snapshot) -> None:
    """A repeated request hits the cache until events, snapshot or age buckets change."""
    events = stored_events("ann", 5)
    for _ in range(3):
        provided(memories, snapshot, events)
    assert memories.stats()["memory_hits"] == 2
    for other in (stored_events("ann", 6), replace(stored_events("ann", 6), epoch=2)):
        check(memories, snapshot, other)
    provided(memories, replace(snapshot), events)
    provided(memories, snapshot, events, 9 * DAY)
    assert memories.stats()["memory_hits"] == 2


def test_requests_without_events_share_one_memory(
    memories: MemoryProvider, snapshot: Snapshot
) -> None:
    targets = np.arange(ITEMS)
    expected = score(snapshot, build_memory(snapshot, UserHistory.empty(), 9 * DAY), targets)
    warm, late = AttentionOptions(temperature=2.0), asking.visible(since=5)
    for options, visible, at in (
        (DEFAULT_OPTIONS, ALL_EVENTS, 9 * DAY),
        (warm, late, 99 * DAY),
        (DEFAULT_OPTIONS, late, DAY),
    ):
        user = provided(memories, snapshot, EMPTY, at, options, visible)
        np.testing.assert_array_equal(score(snapshot, user, targets).total, expected.total)
        assert len(user) == 0
    assert memories.stats()["memory_misses"] == 1


async def test_requests_with_sessions_or_masks_bypass_the_cache(
    memories: MemoryProvider, snapshot: Snapshot
) -> None:
    """Requests with inline events or `visible` neither use nor change the cache."""
    events = stored_events("ann", 5)
    check(memories, snapshot, events)
    before = memories.stats()
    hidden = asking.visible(until=0)
    assert len(provided(memories, snapshot, events, visible=hidden)) == 0
    session = await memories.load(None, now=99 * DAY, session=(asking.inline("i1"),))
    user = provided(memories, snapshot, session)
    assert user.history.timestamps.tolist() == [99 * DAY]
    assert memories.stats() == before
    check(memories, snapshot, events)


def test_models_without_an_encoder_are_provided_for() -> None:
    bare = small_snapshot(ITEMS, random_model(1, blocks=0))
    memories = memory_provider(PLENTY)
    for length in (4, 6):
        check(memories, bare, stored_events("ann", length))


def test_cache_entries_are_separate_for_each_model(
    memories: MemoryProvider, snapshot: Snapshot
) -> None:
    """A change of model encodes again and never reuses the other model's states."""
    other = small_snapshot(ITEMS, random_model(2, window=8))
    for now in (snapshot, other, snapshot):
        with appends(now) as counts:
            for user_id in ("ann", "bob"):
                provided(memories, now, stored_events(user_id, 6))
        assert counts == [6, 6]
        check(memories, now, stored_events("ann", 6))


def test_another_catalogue_keeps_encoder_states(
    memories: MemoryProvider, snapshot: Snapshot
) -> None:
    """A larger catalogue keeps encoder states; a changed text of a used item does not."""
    events = stored_events("ann", 6)
    check(memories, snapshot, events)
    more = snapshot.refreshed(
        snapshot.catalogue.updated([ItemEntry("new", "new", {"title": "new"})], [], encode),
        snapshot.counts,
    )
    with appends(more) as counts:
        provided(memories, more, events)
    assert [count for count in counts if count] == []
    entries = [ItemEntry(f"i{int(events.rows[2])}", "new", {"title": "other"})]
    text = more.refreshed(more.catalogue.updated(entries, [], encode), more.counts)
    with appends(text) as counts:
        provided(memories, text, events)
    assert counts == [6]
    check(memories, text, events)


def test_concurrent_requests_agree(snapshot: Snapshot) -> None:
    """Concurrent requests get correct memories, within the budget."""
    memories = memory_provider(24_000)
    requests = [("abcd"[n % 4], 1 + n * 7 % 20) for n in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda of: check(memories, snapshot, stored_events(*of)), requests))
    assert 0 < memories.stats()["cached_history_bytes"] <= 24_000
