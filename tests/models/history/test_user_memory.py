"""User memories: rows, weights, ages, own vectors, profiles, and cached encoder states."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.attend import DEFAULT_OPTIONS
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.history import user_memory
from models.history.user_history import UserHistory, attendable_events
from models.history.user_memory import EncodedHistory, build_memory
from models.history.user_memory import encode as encode_events
from models.ranking.scoring import score
from tests.support.pasts import (
    AT,
    EVERY,
    HEADS,
    ITEMS,
    TRAINED,
    WINDOW,
    Loop,
    appends,
    drawn_snapshot,
)
from tests.support.reference_model import ReferenceModel, window_start
from tests.support.small import DAY, SECOND, past, random_model, random_past
from tests.support.small import encode as encode_texts
from tests.support.small import snapshot as small_snapshot


@torch.inference_mode()
def encode(
    snapshot: Snapshot, history: UserHistory, before: EncodedHistory | None = None
) -> EncodedHistory | None:
    return encode_events(snapshot, history, *attendable_events(snapshot, history), before)


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return drawn_snapshot()


def test_hidden_events_change_no_score(snapshot: Snapshot) -> None:
    wider = snapshot.refreshed(snapshot.catalogue.with_items(["only an event"]), snapshot.counts)
    seen = past([3, 13, 7], [0, DAY, 2 * DAY], [1, 2, 0.5])
    more = past(
        [5, 3, -1, 13, ITEMS, 99, 7],
        [0, 0, SECOND, DAY, DAY, 2 * DAY, 2 * DAY],
        [9, 1, 9, 2, 9, 9, 0.5],
        visible=np.array([False, True, True, True, True, True, True]),
    )
    assert not wider.has_vector[ITEMS]
    users = [build_memory(wider, made, AT) for made in (seen, more)]
    assert users[0].source.tolist() == [0, 1, 2]
    assert users[1].source.tolist() == [1, 3, 6]
    both = [score(wider, user, EVERY) for user in users]
    for part in ("total", "attention", "transitions", "prior"):
        np.testing.assert_array_equal(getattr(both[0], part), getattr(both[1], part))


def test_an_event_after_the_request_is_just_now(snapshot: Snapshot) -> None:
    ahead = build_memory(snapshot, past([3, 4], [0, AT + DAY]), AT)
    now = build_memory(snapshot, past([3, 4], [0, AT]), AT)
    assert ahead.age.tolist() == [AT, 0]
    np.testing.assert_array_equal(ahead.bias, now.bias)


def test_extreme_weights_give_numbers(snapshot: Snapshot) -> None:
    made = past([4, 7, 9], [0, 1, 2], [1.2e-38, 1, 3.4e38])
    scores = score(snapshot, build_memory(snapshot, made, AT), EVERY)
    assert torch.isfinite(scores.total).all()
    loop = Loop(snapshot, made, AT)
    for target in range(ITEMS):
        alpha, gain = loop.attention(target, DEFAULT_OPTIONS)
        assert alpha[:, 2].min() == pytest.approx(1)
        assert float(scores.attention[target]) == pytest.approx((alpha * gain).sum(), abs=1e-4)


def test_own_vectors_stand_in_for_the_item(snapshot: Snapshot) -> None:
    own = snapshot.catalogue.content[13]
    plain = past([3, 13], [0, DAY])
    brought = replace(plain, vectors={1: (own, own)})
    both = [score(snapshot, build_memory(snapshot, made, AT), EVERY) for made in (plain, brought)]
    np.testing.assert_allclose(both[0].total, both[1].total, atol=1e-5)


@pytest.mark.parametrize("row", [-1, ITEMS + 3])
def test_of_an_unknown_item_one_vector_stands_for_both(snapshot: Snapshot, row: int) -> None:
    vector = encode_texts(["brought"])[0]
    totals = []
    for pair in ((vector, vector), (vector, None), (None, vector)):
        made = past([3, row], [0, DAY], vectors={1: pair})
        totals.append(score(snapshot, build_memory(snapshot, made, AT), EVERY).total)
    np.testing.assert_array_equal(totals[0], totals[1])
    np.testing.assert_array_equal(totals[0], totals[2])


def test_profile_entries_are_rows_of_the_memory(snapshot: Snapshot) -> None:
    made = past([3], [AT], profile_rows=np.array([5, -1], np.int32),
                profile_content=encode_texts(["x", "jazz"]))  # fmt: skip
    user = build_memory(snapshot, made, AT)
    later = build_memory(snapshot, made, AT + 300 * DAY)
    assert user.source.tolist() == [0, -1, -2]
    assert user.rows.tolist() == [3, 5, -1]
    np.testing.assert_array_equal(user.bias[:, 1:], later.bias[:, 1:])
    bias = snapshot.model.recency
    with torch.inference_mode():
        oldest = bias.position[:, 31] + bias.age[:, 39] + bias.joint[:, 31 * 40 + 39]
        np.testing.assert_allclose(user.bias[:, 1], oldest, atol=1e-6)
    alone = build_memory(snapshot, replace(made, rows=made.rows[:0], timestamps=made.timestamps[:0],
                                       weights=made.weights[:0]), AT)  # fmt: skip
    assert not alone.user_state.any()
    assert not score(snapshot, alone, EVERY).transitions.any()
    assert score(snapshot, alone, EVERY).attention.abs().min() > 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 25])
def test_the_user_state_is_of_the_window_and_the_request(length: int) -> None:
    snapshot = small_snapshot(ITEMS, random_model(4, window=8))
    made = random_past(length, length, ITEMS)
    reference = ReferenceModel(snapshot.model, HEADS, 8)
    content = snapshot.catalogue.content
    items = [reference.vector(row if row < TRAINED else -1, content[row]) for row in range(ITEMS)]
    pairs = zip(made.rows.tolist(), made.weights.tolist(), strict=True)
    vectors = [reference.read(items[row], -1, weight) for row, weight in pairs]
    times = made.timestamps.tolist()
    for at in (times[-1], times[-1] + DAY, times[-1] + 2 * DAY, times[-1] + 500 * DAY, 0):
        user = build_memory(snapshot, made, at)
        _, expected = reference.encode(vectors, times, at)
        np.testing.assert_allclose(user.user_state, expected, atol=2e-5)


def test_recent_lists_the_nine_newest_item_events(snapshot: Snapshot) -> None:
    rows = [4, 13, -1, 1, 2, 3, 99, 5, 6, 7, 8, 14, 9]
    own = {6: (encode_texts(["own"])[0], None)}  # of no item: a row of the memory, but not at hand
    user = build_memory(snapshot, past(rows, range(13), vectors=own), AT)
    assert user.rows.tolist() == [4, 13, 1, 2, 3, -1, 5, 6, 7, 8, 14, 9]
    assert user.recent.tolist() == [11, 10, 9, 8, 7, 6, 4, 3, 2]
    assert user.recent_items.tolist() == [9, -1, 8, 7, 6, 5, 3, 2, 1]


# ---------------------------------------------------------------------------- going on


Event = tuple[int, int, str]  # item row, time, and what is special about it


def made_of(events: list[Event]) -> UserHistory:
    """A past of these events; some bring a vector, some are hidden."""
    rows = [row for row, _, _ in events]
    vectors = {at: (encode_texts([f"own {time}"])[0], None)
               for at, (_, time, kind) in enumerate(events) if kind == "own"}  # fmt: skip
    return past(
        rows,
        [time for _, time, _ in events],
        vectors=vectors,
        visible=np.array([kind != "hidden" for _, _, kind in events], dtype=np.bool_),
    )


def read_of(snapshot: Snapshot, events: list[Event]) -> tuple[int, list[tuple[int, int]]]:
    """What the encoder must read of them: from where on, and the items and times."""
    seen = [(row, time) for row, time, kind in events if kind != "hidden" and 0 <= row < ITEMS]
    start = window_start(len(seen), snapshot.model.config.window)
    return start, seen[start:]


def alike(one: EncodedHistory | None, other: EncodedHistory | None) -> None:
    assert one is not None
    assert other is not None
    assert one.first_item == other.first_item
    np.testing.assert_array_equal(one.events, other.events)
    np.testing.assert_array_equal(one.cache.timestamps, other.cache.timestamps)
    for name in ("keys", "values", "states"):
        mine, yours = (getattr(each.cache, name) for each in (one, other))
        np.testing.assert_allclose(mine, yours, atol=1e-4)


def changed(events: list[Event], data: st.DataObject) -> list[Event]:
    """Another state of a history: what a service sees happen to one."""
    row = st.sampled_from([*range(ITEMS), -1, ITEMS + 3])
    kind = st.sampled_from(["", "", "", "", "own", "hidden"])
    latest = events[-1][1] if events else 0
    what = data.draw(st.sampled_from(["append", "append", "append", "late", "delete", "delete last",
                                      "merge", "again", "clear"]))  # fmt: skip
    if what == "append":
        waits = data.draw(st.lists(st.sampled_from([0, 1, SECOND, DAY]), min_size=1, max_size=6))
        new = [(data.draw(row), latest + sum(waits[: n + 1]), data.draw(kind))
               for n in range(len(waits))]  # fmt: skip
        return events + new
    if what == "late":
        new = [(data.draw(row), data.draw(st.integers(0, latest)), "")]
    elif what == "merge":
        times = data.draw(st.lists(st.integers(0, latest + DAY), max_size=4))
        new = [(data.draw(row), time, data.draw(kind)) for time in times]
    elif what == "delete" and events:
        gone = data.draw(st.integers(0, len(events) - 1))
        return events[:gone] + events[gone + 1 :]
    else:
        return {"delete last": events[:-1], "clear": []}.get(what, events)
    return sorted(events + new, key=lambda event: event[1])  # ties in order of arrival


@settings(max_examples=40, deadline=None, derandomize=True)
@given(window=st.sampled_from([1, 3, 4, 8]), data=st.data())
def test_extending_a_cached_state_equals_encoding(window: int, data: st.DataObject) -> None:
    snapshot = small_snapshot(ITEMS, random_model(2, window=window))
    events: list[Event] = []
    kept: EncodedHistory | None = None
    before: tuple[int, list[tuple[int, int]]] = (0, [])
    for _ in range(data.draw(st.integers(1, 12))):
        events = changed(events, data)
        made = made_of(events)
        with appends(snapshot) as counts:
            kept = encode(snapshot, made, kept)
        alike(kept, encode(snapshot, made))
        start, read = read_of(snapshot, events)
        goes_on = before[0] == start and read[: len(before[1])] == before[1]
        assert sum(counts) == len(read) - (len(before[1]) if goes_on else 0)
        before = start, read
        at = int(data.draw(st.sampled_from([0, AT, 400 * DAY])))
        mine = build_memory(snapshot, made, at, encoded=kept)
        anew = build_memory(snapshot, made, at)
        np.testing.assert_allclose(mine.user_state, anew.user_state, atol=1e-4)
        np.testing.assert_allclose(mine.keys, anew.keys, atol=1e-4)
        np.testing.assert_allclose(mine.values, anew.values, atol=1e-4)


def test_a_window_is_read_again_only_when_it_moves() -> None:
    snapshot = small_snapshot(ITEMS, random_model(2, window=8))
    rows = np.random.default_rng(0).integers(0, ITEMS, 30).tolist()
    kept: EncodedHistory | None = None
    with appends(snapshot) as counts:
        for length in range(1, 31):
            kept = encode(snapshot, past(rows[:length], range(length)), kept)
    # The window holds 8 and moves by 2: from the ninth event on, every other reads 7.
    assert counts == [1] * 8 + [7, 1] * 11


def test_an_item_of_another_vector_is_read_again() -> None:
    snapshot = small_snapshot(ITEMS, random_model(2))
    made = past([3, 13, 7], [0, 1, 2])
    kept = encode(snapshot, made)
    for item, fresh in (("i14", 0), ("i13", 3)):
        text = snapshot.catalogue.updated(
            [ItemEntry(item, "new", {"title": "new"})], [], encode_texts
        )
        later = snapshot.refreshed(text, snapshot.counts)
        with appends(later) as counts:
            found = encode(later, made, kept)
        alike(found, encode(later, made))
        assert sum(counts) == fresh


def test_cached_memory_reports_its_size_in_bytes(snapshot: Snapshot) -> None:
    """`nbytes` equals the storage that a cached state keeps alive, for any history length."""
    kept = encode(snapshot, random_past(1, 500, ITEMS))
    longer = encode(snapshot, random_past(1, 501, ITEMS), kept)
    for each in (kept, longer):
        assert each is not None
        parts = [part for part in (each.events, *each.cache) if part.numel()]
        held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
                for part in parts}  # fmt: skip
        assert sum(held.values()) == each.nbytes
        assert len(each.events) <= WINDOW


def test_transitions_of_all_items_are_kept_unless_there_are_too_many(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory holds the transitions part, as its size says, and scores without it are equal."""
    made = random_past(3, 40, ITEMS)
    user = build_memory(snapshot, made, AT)
    monkeypatch.setattr(user_memory, "_KEPT_PARTS", 1)
    bare = build_memory(snapshot, made, AT)
    assert user.transitions is not None
    assert bare.transitions is None
    assert user.nbytes - bare.nbytes == user.transitions.nbytes
    targets = np.arange(ITEMS)
    kept, summed = score(snapshot, user, targets), score(snapshot, bare, targets)
    assert float(kept.transitions.std()) > 0
    torch.testing.assert_close(kept.total, summed.total, atol=1e-6, rtol=0)


def test_without_an_encoder_there_is_nothing_to_keep() -> None:
    bare = small_snapshot(ITEMS, random_model(2, blocks=0))
    assert encode(bare, past([3], [0])) is None
    assert not build_memory(bare, past([3], [0]), AT).user_state.any()
    snapshot = small_snapshot(ITEMS, random_model(2))
    empty = encode(snapshot, UserHistory.empty())
    assert empty is not None
    with appends(snapshot) as counts:
        alike(encode(snapshot, past([3], [0]), empty), encode(snapshot, past([3], [0])))
    assert counts == [1, 1]
    assert not build_memory(snapshot, UserHistory.empty(), AT, encoded=empty).user_state.any()
