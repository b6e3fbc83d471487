"""Statistics of a model's log: request times within the largest gap, and shapes that fit."""

from __future__ import annotations

import pytest
import torch

from models.recommender.recommender import LogStatistics, RecommenderConfig
from tests.support.small import DAY, random_followers, random_model


def test_a_request_is_within_the_horizon() -> None:
    """Request times are clamped to the horizon after the newest event."""
    statistics = random_model(1).statistics
    statistics.load(statistics.transition_counts, max_request_gap=3 * DAY)
    newest = torch.tensor([0, 0, 0, 10 * DAY, 10 * DAY])
    asked = torch.tensor([DAY, 3 * DAY, 3 * DAY + 1, 9 * DAY, 2**60])
    expected = [DAY, 3 * DAY, 3 * DAY, 9 * DAY, 13 * DAY]
    assert statistics.clamp_request_time(asked, newest).tolist() == expected
    fresh = LogStatistics(RecommenderConfig(n_items=2, transitions_per_item=3))
    assert fresh.clamp_request_time(torch.tensor(2**59), torch.tensor(0)) == 2**59


def test_followers_of_another_shape_are_refused() -> None:
    """Transition counts of another shape are refused and change nothing."""
    statistics = random_model(1).statistics
    before = statistics.transition_counts
    for items, most in ((11, 5), (12, 4)):
        with pytest.raises(ValueError, match=rf"must be \(12, 5\), not \({items}, {most}\)"):
            statistics.load(random_followers(0, items, most), 0)
    assert torch.equal(statistics.transition_counts.items, before.items)
