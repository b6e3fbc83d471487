"""The memory of whoever asks, and of nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from service.domain.queries import Requester
from service.histories.memory_provider import MemoryProvider
from service.histories.request_history import NOBODY
from tests.support.histories_asked import ITEMS, asked
from tests.support.small import DAY, random_model
from tests.support.small import snapshot as small_snapshot


@pytest.fixture
def memories() -> Iterator[MemoryProvider]:
    made = MemoryProvider(
        exact_up_to=1_000,
        encoding_cache_bytes=1 << 20,
        memory_cache_bytes=1 << 20,
        long_history_bytes=1 << 20,
        max_error=0.01,
        check_share=0.0,
    )
    yield made
    made.close()


def test_nobodys_memory_is_made_once_for_each_snapshot(memories: MemoryProvider) -> None:
    """It answers as the memory of an empty past does, whenever that is asked for."""
    snapshot = small_snapshot(ITEMS, random_model(1, window=8))
    targets = np.arange(ITEMS)
    expected = score(snapshot, build_memory(snapshot, UserHistory.empty(), 9 * DAY), targets)
    with memories.of(snapshot, Requester(), NOBODY, 9 * DAY) as first:
        np.testing.assert_array_equal(score(snapshot, first, targets).total, expected.total)
        assert len(first) == 0
    with memories.of(snapshot, Requester(temperature=2.0), NOBODY, 99 * DAY) as second:
        assert second is first
    with memories.of(snapshot, Requester("new"), replace(NOBODY), 9 * DAY) as unknown:
        assert unknown is first
    with memories.of(replace(snapshot), Requester(), NOBODY, 9 * DAY) as other:
        assert other is not first


def test_what_was_asked_is_known_as_long_as_the_memory_is(memories: MemoryProvider) -> None:
    """A memory that is kept brings the events it was made of, and no other's."""
    snapshot = small_snapshot(ITEMS, random_model(1, window=8))
    question, requester = asked("ann", 5), Requester("ann")
    with memories.of(snapshot, requester, question, 99 * DAY) as made:
        pass
    assert memories.remembered.asked(snapshot, question.version) is question
    with memories.of(snapshot, requester, question, 99 * DAY) as again:
        assert again is made
    assert memories.asked(snapshot, Requester(), None) is None


def test_no_targets_are_no_scores() -> None:
    """Of somebody with a history and of nobody, with the size of the memory all the same."""
    snapshot = small_snapshot(ITEMS, random_model(1, window=8))
    for past in (asked("ann", 5).history, UserHistory.empty()):
        user = build_memory(snapshot, past, 99 * DAY)
        scores = score(snapshot, user, np.zeros(0, np.int64))
        assert [len(part) for part in scores[:6]] == [0] * 6
        assert (scores.mode, scores.memory, scores.error) == ("exact", len(user), None)
