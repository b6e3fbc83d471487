"""The user cache: one budget for events and derived states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import build_memory
from service.domain.records import User
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import DerivedState, UserCache
from tests.support.small import DAY, encode, random_model
from tests.support.small import snapshot as small_snapshot
from tests.support.stored_events import ITEMS, stored_events, user_history

AT = 99 * DAY


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return small_snapshot(ITEMS, random_model(1, window=8))


def derive(snapshot: Snapshot, events: EventColumns) -> DerivedState:
    """Build the derived state of a user's events."""
    history = user_history(snapshot, events)
    return DerivedState.of(snapshot, events, history, build_memory(snapshot, history, AT))


def put(cache: UserCache, snapshot: Snapshot, user_id: str, length: int = 5) -> None:
    """Load a user's events and derive from them, as a request does."""
    events = stored_events(user_id, length)
    cache.put_events(events)
    cache.derived(user_id, snapshot)
    cache.put_derived(snapshot, derive(snapshot, events))


def users(cache: UserCache) -> tuple[float, float]:
    """Number of users whose events are held, and of those whose derived state is."""
    stats = cache.stats()
    return stats["cached_histories"], stats["cached_memories"]


def size(snapshot: Snapshot) -> tuple[int, int]:
    """Bytes of a user's events, and of what is derived from them."""
    events = stored_events("ann", 5)
    return events.nbytes, derive(snapshot, events).nbytes


def test_parts_share_one_budget(snapshot: Snapshot) -> None:
    """Events and derived states share the budget; derived states, the larger, are evicted first."""
    events, derived = size(snapshot)
    budget = 4 * events + 2 * derived
    cache = UserCache(budget)
    for user_id in "abcdefgh":
        put(cache, snapshot, user_id)
        assert cache.nbytes <= budget
    assert derived > events
    held = {user_id for user_id in "abcdefgh" if cache.events(user_id) is not None}
    memories = {user_id for user_id in "abcdefgh" if cache.derived(user_id, snapshot)}
    assert memories < held
    assert "h" in memories
    assert users(cache) == (len(held), len(memories))
    assert cache.nbytes == len(held) * events + len(memories) * derived


def test_large_memories_do_not_displace_the_events_of_many(snapshot: Snapshot) -> None:
    """Derived states cannot evict events from half of the budget."""
    events, derived = size(snapshot)
    cache = UserCache(4 * derived)
    many = [f"user {number}" for number in range(2 * derived // events)]
    for user_id in many:
        cache.put_events(stored_events(user_id, 5))
    put(cache, snapshot, "ann")
    for user_id in "bcdefghijk":
        cache.derived(user_id, snapshot)
        cache.put_derived(snapshot, derive(snapshot, stored_events(user_id, 5)))
    assert users(cache)[0] >= len(many) - 1
    assert users(cache)[1] >= 1


def test_derived_state_never_takes_the_half_of_the_events(snapshot: Snapshot) -> None:
    large = derive(snapshot, stored_events("bob", 30))
    cache = UserCache(large.nbytes * 3 // 2)
    number = 0
    while cache.nbytes < large.nbytes:
        cache.put_events(stored_events(f"user {number}", 5))
        number += 1
    cache.derived("bob", snapshot)
    small = derive(snapshot, stored_events("ann", 1))
    assert not cache.put_derived(snapshot, large)
    assert users(cache)[0] == number
    assert cache.put_derived(snapshot, small)


def test_state_serves_its_events_by_the_same_tables(snapshot: Snapshot) -> None:
    """A state serves its version and epoch, by any snapshot with the same tables of its items."""
    events = stored_events("ann", 5)
    state = derive(snapshot, events)
    row = int(events.rows.max())
    own, other = snapshot.catalogue.vocabulary.id(row), "an item that is new"
    assert state.serves(events, snapshot)
    assert not state.serves(replace(events, version=9), snapshot)
    assert not state.serves(replace(events, epoch=2), snapshot)
    later = written(snapshot, other)
    assert later.cow_tables.step != snapshot.cow_tables.step
    assert state.serves(events, later)
    assert state.serves(events, written(later, own, f"title {row}", price=3))
    changed = written(later, own, "another title")
    assert not state.serves(events, changed)
    assert not derive(changed, events).serves(events, later)
    interested = replace(events, user=User("ann", interests=("an interest",)))
    state = derive(later, interested)
    assert state.serves(interested, written(later, "nothing of hers"))
    assert not state.serves(interested, written(later, "an interest"))


def written(snapshot: Snapshot, item_id: str, text: str = "", **attributes: int) -> Snapshot:
    """Return the snapshot after an item was put."""
    fields = {"title": text, "description": f"about {item_id[1:]}"}
    entry = ItemEntry(item_id, text, fields, attributes=attributes)
    catalogue = snapshot.catalogue.updated([entry], [], encode)
    return snapshot.refreshed(catalogue, snapshot.counts)


def test_a_memory_serves_until_an_age_is_in_another_bucket(snapshot: Snapshot) -> None:
    """A cached memory is valid until an event's age enters another bucket, either way."""
    events = stored_events("ann", 1)
    at = int(events.timestamps[0]) + 3_600_000_000
    history = user_history(snapshot, events)
    memory = build_memory(snapshot, history, at)
    state = DerivedState.of(snapshot, events, history, memory)
    assert state.memory_at(at) is memory
    assert state.memory_at(at + 60_000_000) is memory
    assert state.memory_at(at - 60_000_000) is memory
    # Buckets of an hour are 40 minutes long.
    assert state.memory_at(at + 3_600_000_000) is None
    assert state.memory_at(at - 3_000_000_000) is None
