"""Metrics against figures worked out by hand, and the bootstrap against known differences."""

import math

import numpy as np
import pytest

from models.evaluation.full_ranking import (
    bootstrap,
    discounts,
    first_relevant_rank,
    graded_ndcg,
    hits,
    ndcg_gains,
    popularity_weights,
    recall,
    reciprocal_ranks,
    standard_error,
)

RANKS = np.array([0, 1, 2, 9, 10], dtype=np.int64)


def test_hits_and_gains_by_hand() -> None:
    """The first place is worth 1, the third a half, the eleventh nothing at 10."""
    assert hits(RANKS).tolist() == [1, 1, 1, 1, 0]
    assert hits(RANKS, 2).tolist() == [1, 1, 0, 0, 0]
    expected = [1.0, 1 / math.log2(3), 0.5, 1 / math.log2(11), 0.0]
    assert ndcg_gains(RANKS) == pytest.approx(expected)
    assert ndcg_gains(RANKS, 3) == pytest.approx([*expected[:3], 0.0, 0.0])
    assert reciprocal_ranks(RANKS) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 10, 1 / 11])
    assert discounts(np.array([0, 2, 6])) == pytest.approx([1, 1 / 2, 1 / 3])


def test_popularity_weights_by_hand() -> None:
    """A hit on an item never trained on weighs as much as ten on an item of 99 events."""
    weights = popularity_weights(np.array([0, 3, 99]))
    assert weights == pytest.approx([1, 1 / 2, 1 / 10])
    debiased = np.average(hits(np.array([50, 2, 0])), weights=weights)
    assert debiased == pytest.approx(0.6 / 1.6)


def test_standard_error_of_a_share() -> None:
    """The error of a mean of zeros and ones is sqrt(p (1 - p) / (n - 1)); one case has none."""
    worth = hits(np.array([0] * 30 + [50] * 70))
    assert standard_error(worth) == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert math.isnan(standard_error(worth[:1]))


def test_bootstrap_spread_is_that_of_the_paired_differences() -> None:
    """The interval matches the normal theory of the mean difference, not of the single rankers."""
    rng = np.random.default_rng(3)
    a = rng.integers(0, 30, 4000)
    b = np.where(rng.random(4000) < 0.1, rng.integers(0, 30, 4000), a)
    paired = ndcg_gains(b) - ndcg_gains(a)
    error = paired.std() / math.sqrt(4000)
    result = bootstrap(paired)
    assert result.difference == pytest.approx(paired.mean())
    assert result.standard_error == pytest.approx(error, rel=0.05)
    assert result.low == pytest.approx(paired.mean() - 1.96 * error, abs=0.2 * error)
    assert result.high == pytest.approx(paired.mean() + 1.96 * error, abs=0.2 * error)
    assert result.standard_error < 0.5 * standard_error(ndcg_gains(a))


def test_bootstrap_equals_resampling_cases_by_hand() -> None:
    """Four cases can be resampled in 256 ways; the interval's ends are quantiles of those."""
    result = bootstrap(np.array([1.0, 0.0, 0.0, -1.0]))
    # P(mean = -1) = 1/256 < 2.5 %, P(mean <= -3/4) = 9/256 > 2.5 %
    assert (result.low, result.high) == pytest.approx((-3 / 4, 3 / 4))
    assert result.standard_error == pytest.approx(math.sqrt(1 / 8), rel=0.05)


def test_bootstrap_needs_a_case() -> None:
    """The mean of nothing has no interval."""
    with pytest.raises(ValueError, match="at least one case"):
        bootstrap(hits(RANKS[:0]))


def test_graded_ndcg_of_the_textbook_example() -> None:
    """Grades 3 2 3 0 1 2, with a 3 and a 2 left out: DCG 6.861 of 8.740 (linear gains)."""
    ranking = ["d1", "d2", "d3", "d4", "d5", "d6"]
    judged = {"d1": 3, "d2": 2, "d3": 3, "d4": 0, "d5": 1, "d6": 2, "d7": 3, "d8": 2}
    assert graded_ndcg(ranking, judged, 6) == pytest.approx(6.861 / 8.740, abs=1e-4)


def test_graded_ndcg_at_its_edges() -> None:
    """The ideal order gives 1; unjudged ids, negative grades and empty rankings give 0."""
    assert graded_ndcg(["a", "b"], {"a": 2, "b": 1}) == 1.0
    assert graded_ndcg(["x", "a"], {"a": 1, "x": -2}) == pytest.approx(1 / math.log2(3))
    assert graded_ndcg([], {"a": 1}) == 0.0
    assert graded_ndcg(["a"], {}) == 0.0
    assert graded_ndcg(["b", "a"], {"a": 1}, 1) == 0.0
    with pytest.raises(ValueError, match="twice"):
        graded_ndcg(["a", "a"], {"a": 1})


def test_first_relevant_rank_by_hand() -> None:
    judged = {"a": 0.0, "b": 1.0, "c": 3.0}
    assert first_relevant_rank(["a", "x", "b", "c"], judged, 4) == 2
    assert first_relevant_rank(["a", "x", "b", "c"], judged, 2) == 2
    assert first_relevant_rank([], judged, 5) == 5
    assert hits(np.array([0, 2, 3, 100]), 3).tolist() == [1, 1, 0, 0]


def test_recall_counts_relevant_ids_only() -> None:
    judged = {"a": 1, "b": 2, "c": 0}
    assert recall(["a", "c", "b"], judged, 2) == 0.5
    assert recall(["a", "c", "b"], judged, 3) == 1.0
    assert recall(["a"], {"c": 0}) == 0.0
