"""Baselines: the ranker contract, and their formulas against float64 loops and closed forms."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import models.recommender.co_occurrence
from models.data.interactions import Interactions
from models.evaluation.baselines import (
    Baseline,
    WeekPopularity,
    ease,
    item_transitions,
    popularity,
    repeats,
)
from models.evaluation.full_ranking import Ranker
from models.recommender.co_occurrence import ease_weights, transition_matrix
from tests.support.ranker_contract import RankerContract
from tests.support.small import DAY, events_of

ALL = np.arange(3, dtype=np.int32)


class TestPopularity(RankerContract):
    """The contract, for a list that is the same for everyone."""

    personal = False

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        return popularity(log)


class TestWeekPopularity(RankerContract):
    """The contract, for what everyone took in the last week."""

    personal = False

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        return WeekPopularity.fit(log, log)


class TestTransitionCounts(RankerContract):
    """The contract, for what followed the last items."""

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        return item_transitions(log)


class TestEASE(RankerContract):
    """The contract, for ridge regression between items."""

    @classmethod
    def fit(cls, log: Interactions) -> Ranker:
        return ease(log, ridge=1.0)


def small(n_items: int = 4) -> Interactions:
    """Three users: 0 1 2 0, then 1 2, then nothing."""
    return Interactions.from_columns(
        [0, 0, 0, 0, 1, 1], [0, 1, 2, 0, 1, 2], range(6), n_users=3, n_items=n_items
    )


def random_log(seed: int, events: int = 400) -> Interactions:
    rng = np.random.default_rng(seed)
    users, items, times = (rng.integers(0, n, events) for n in (25, 15, 50))
    return Interactions.from_columns(users, items, times, n_users=25, n_items=15)


def test_popularity_counts_events() -> None:
    scores = popularity(small()).scores(small(), ALL)
    assert scores.tolist() == [[2, 2, 2, 0]] * 3


def test_week_popularity_by_hand() -> None:
    """The week begins 7 days before the request, which is not part of it; popularity breaks ties.

    Without a time, the request is at the user's newest event; without that, nothing is recent.
    """
    times = [0, 1 * DAY, 2 * DAY, 8 * DAY, 9 * DAY, 9 * DAY]
    items, users = [3, 3, 0, 1, 2, 2], [0, 0, 1, 1, 0, 2]
    log = Interactions.from_columns(users, items, times, n_users=4, n_items=4)
    train = Interactions.from_columns([0, 0, 0], [3, 3, 2], [0, 1, 2], n_users=4, n_items=4)
    ranker, rows = WeekPopularity.fit(train, log), np.array([0, 1, 1, 3], dtype=np.int32)
    popularity = np.array([0, 0, 1 / 3, 2 / 3])
    at = np.array([9 * DAY, 9 * DAY + 1, 8 * DAY, 0])
    weeks = [[1, 1, 0, 0], [0, 1, 2, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(ranker.scores(log, rows, at), weeks + popularity, rtol=1e-6)
    newest = [[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(ranker.scores(log, rows, None), newest + popularity, rtol=1e-6)


def test_week_popularity_equals_a_loop() -> None:
    """On a random log, disliked events aside, each score is a count by a plain loop."""
    rng = np.random.default_rng(2)
    log = Interactions.from_columns(
        rng.integers(0, 9, 300),
        rng.integers(0, 5, 300),
        rng.integers(0, 30, 300) * DAY,
        types=rng.integers(0, 2, 300),
        n_users=9,
        n_items=5,
        dislike_type=1,
    )
    at = rng.integers(0, 40, 9) * DAY
    counts = np.zeros((9, 5))
    for row, request in enumerate(at.tolist()):
        for item, time, dislike in zip(log.items, log.timestamps, log.disliked, strict=True):
            counts[row, item] += request - 7 * DAY <= time < request and not dislike
    scores = WeekPopularity.fit(log, log).scores(log, np.arange(9, dtype=np.int32), at)
    np.testing.assert_array_equal(np.floor(scores), counts)
    assert counts.min() == 0 < counts.max()


@pytest.mark.parametrize("fit", [popularity, repeats, ease])
def test_baselines_ignore_dislikes(fit: Callable[[Interactions], Baseline]) -> None:
    rng = np.random.default_rng(3)
    log = random_log(3)
    log = replace(log, types=rng.integers(0, 2, len(log)).astype(np.int16), dislike_type=1)
    users = np.arange(25, dtype=np.int32)
    expected = fit(log.liked()).scores(log.liked(), users)
    np.testing.assert_array_equal(fit(log).scores(log, users), expected)
    assert not np.array_equal(fit(replace(log, dislike_type=-1)).scores(log, users), expected)


def count_in_loops(log: Interactions, window: int, power: float) -> NDArray[np.float64]:
    """The definition of the counts, pair by pair in float64."""
    matrix = np.zeros((log.n_items, log.n_items))
    for u in range(log.n_users):
        items = events_of(log, u).items
        for i in range(len(items)):
            for j in range(i + 1, min(i + window, len(items) - 1) + 1):
                matrix[items[i], items[j]] += 1 / (j - i) ** power
    return matrix


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=30),
    window=st.integers(1, 50),
    power=st.sampled_from([0.5, 1.0, 2.0]),
    chunk=st.sampled_from([1, 64, 1 << 22]),
)
def test_transitions_equal_counting_in_loops(
    events: list[tuple[int, int]], window: int, power: float, chunk: int
) -> None:
    """However the pairs are cut into chunks, also for empty logs and single events."""
    log = Interactions.from_columns(
        [u for u, _ in events], [i for _, i in events], range(len(events)), n_users=4, n_items=5
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.recommender.co_occurrence, "CHUNK", chunk)
        matrix = transition_matrix(log, window=window, power=power).to_dense().numpy()
    np.testing.assert_allclose(matrix, count_in_loops(log, window, power), rtol=1e-6, atol=1e-6)


def test_transition_scores_equal_the_formula() -> None:
    """The newest item counts in full, older ones decay, only 20 of them, then damping."""
    log, history = random_log(3, events=800), random_log(4, events=800)
    assert history.lengths.max() > 20
    ranker = item_transitions(log)
    users = np.array([7, 0, 7, 24], dtype=np.int32)
    matrix = count_in_loops(log, 20, 1.0)
    expected = np.zeros((4, 15))
    for row, user in enumerate(users):
        for age, item in enumerate(events_of(history, int(user)).items[::-1][:20]):
            expected[row] += 0.7**age * matrix[item]
    expected /= (np.bincount(log.items, minlength=15) + 5) ** 0.2
    np.testing.assert_allclose(ranker.scores(history, users), expected, rtol=1e-5)


@pytest.mark.parametrize("lam", [0.5, 30.0])
def test_ease_equals_the_closed_form(lam: float) -> None:
    """The weights are I - P / diag(P) with P the inverse of the regularised Gram matrix."""
    log = random_log(5, events=120)
    taken = np.zeros((25, 15))
    taken[log.users, log.items] = 1  # repeats count once
    inverse = np.linalg.inv(taken.T @ taken + lam * np.eye(15))
    weights = np.eye(15) - inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    ranker = ease(log, ridge=lam)
    np.testing.assert_allclose(ease_weights(log, ridge=lam), weights, rtol=1e-5, atol=1e-6)
    users = np.array([4, 9], dtype=np.int32)
    np.testing.assert_allclose(ranker.scores(log, users), taken[users] @ weights, atol=1e-5)


def test_ease_refuses_what_would_not_fit() -> None:
    log = Interactions.from_columns([0], [0], [0], n_users=1, n_items=1_000_000)
    with pytest.raises(ValueError, match="1000000 items need about 20000 GB, and 20000 are"):
        ease(log)
