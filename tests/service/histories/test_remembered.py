"""Memories that are kept are those that would be made, whenever they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from service.histories.remembered import Remembered
from service.histories.request_history import HistoryVersion, RequestHistory
from tests.support.histories_asked import ITEMS, asked
from tests.support.small import DAY, random_model
from tests.support.small import snapshot as small_snapshot

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return small_snapshot(ITEMS, random_model(1, window=8))


def found(
    kept: Remembered, snapshot: Snapshot, question: RequestHistory, at: int
) -> tuple[UserMemory, bool]:
    """The memory at a time, and whether it was known; it is kept then."""
    known = kept.get(snapshot, question, at)
    if known is not None:
        return known, True
    user = build_memory(snapshot, question.history, at)
    kept.put(snapshot, question, user)
    return user, False


def size(snapshot: Snapshot, length: int, at: int) -> int:
    """Bytes that are kept of ann's memory."""
    question = asked("ann", length)
    return build_memory(snapshot, question.history, at).nbytes + question.nbytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    room=st.sampled_from([0.0, 1.0, 2.5, 1e6]),
    questions=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([0, 1, 4, 30]),
            st.one_of(st.integers(0, 12 * DAY), st.integers(9 * DAY, 9 * DAY + 3_000_000_000)),
        ),
        max_size=25,
    ),
)
def test_no_bound_and_no_time_changes_a_memory(
    snapshot: Snapshot, room: float, questions: list[tuple[str, int, int]]
) -> None:
    """To the bit what is made of the history then; what is kept never exceeds its bytes."""
    limit = int(room * size(snapshot, 30, 9 * DAY))
    kept = Remembered(limit)
    for user_id, length, at in questions:
        question = asked(user_id, length)
        user, _ = found(kept, snapshot, question, at)
        expected = build_memory(snapshot, question.history, at)
        assert torch.equal(user.bias, expected.bias)
        assert torch.equal(user.user_state, expected.user_state)
        assert torch.equal(user.memory.keys, expected.memory.keys)
        assert torch.equal(user.memory.values, expected.memory.values)
        assert (user.source == expected.source).all()
        each = [one.user.nbytes + one.asked.nbytes for one in kept._kept.values()]
        assert kept.nbytes == sum(each) <= limit
        again = kept.asked(snapshot, question.version)
        assert again is None or (again.history.timestamps == question.history.timestamps).all()


def test_it_serves_until_an_age_is_in_another_bucket(snapshot: Snapshot) -> None:
    """An event of an hour ago: for a while the memory is the same, then another; and so before."""
    question, kept = asked("ann", 1), Remembered(PLENTY)
    at = int(question.history.timestamps[0]) + 3_600_000_000
    first, known = found(kept, snapshot, question, at)
    assert not known
    assert found(kept, snapshot, question, at + 60_000_000) == (first, True)
    assert found(kept, snapshot, question, at - 60_000_000) == (first, True)
    # Buckets of an hour are 40 minutes long: of these times one at least is in the next.
    assert not found(kept, snapshot, question, at + 3_600_000_000)[1]
    assert found(kept, snapshot, question, at + 3_600_000_000)[1]


def test_another_history_or_snapshot_is_another_memory(snapshot: Snapshot) -> None:
    """One event more, other events under the same version, a new view of the catalogue."""
    kept, at = Remembered(PLENTY), 99 * DAY
    found(kept, snapshot, asked("ann", 5), at)
    assert kept.get(snapshot, asked("ann", 5), at) is not None
    assert kept.get(snapshot, asked("ann", 6), at) is None
    assert kept.asked(snapshot, HistoryVersion("ann", 6, 1)) is None
    assert kept.asked(snapshot, HistoryVersion("ann", 5, 2)) is None
    assert kept.asked(snapshot, HistoryVersion("bob", 5, 1)) is None
    other = replace(asked("ann", 5), version=HistoryVersion("ann", 5, 2))
    assert kept.get(snapshot, other, at) is None
    assert kept.get(replace(snapshot), asked("ann", 5), at) is None
    assert (len(kept), kept.nbytes) == (0, 0)


def test_a_session_is_not_kept(snapshot: Snapshot) -> None:
    """What is not all that is stored of a user is neither kept nor answered from what is."""
    kept, at = Remembered(PLENTY), 99 * DAY
    assert not found(kept, snapshot, asked("ann", 5, stored=False), at)[1]
    assert len(kept) == 0
    found(kept, snapshot, asked("ann", 5), at)
    assert kept.get(snapshot, asked("ann", 5, stored=False), at) is None
    assert kept.asked(snapshot, None) is None


def test_what_is_too_large_drives_nobody_out(snapshot: Snapshot) -> None:
    """Of two small memories and one beyond the bound, those stay; the longest unused goes first."""
    at = 99 * DAY
    kept = Remembered(int(2.5 * size(snapshot, 2, at)))
    for user_id, length in (("ann", 2), ("bob", 2), ("cid", 30)):
        found(kept, snapshot, asked(user_id, length), at)
    assert {*kept._kept} == {"ann", "bob"}
    assert kept.get(snapshot, asked("ann", 2), at) is not None  # used again
    found(kept, snapshot, asked("dan", 2), at)
    assert {*kept._kept} == {"ann", "dan"}
