"""Recent popularity compared with a loop over events, without leaks from later events."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import models.recommender.recent_popularity
from models.data.interactions import Interactions
from models.recommender.recent_popularity import HALF_LIVES, RecentPopularity
from tests.support.small import DAY

ITEMS = 5


def drawn(seed: int, events: int, days: int) -> Interactions:
    """A few users over some days, long after 1970 or before it, with dislikes among the events."""
    rng = np.random.default_rng(seed)
    start = int(rng.choice([-(10**15), 0, 1_700_000_000_000_000]))
    return Interactions.from_columns(
        rng.integers(0, 3, events),
        rng.integers(0, ITEMS, events),
        start + rng.integers(0, days * DAY + 1, events),
        types=rng.integers(0, 3, events),
        n_users=3,
        n_items=ITEMS,
        dislike_type=1,
    )


def expected(log: Interactions, day: int, half_life: float, item: int) -> float:
    """log (n_c + 1) / (mean n + 1) of the liked events on the days before; item -1 has none."""
    liked = log.types != 1
    start = min(log.timestamps[liked].tolist())
    counts = [0.0] * ITEMS
    for row, time, good in zip(log.items, log.timestamps.tolist(), liked, strict=True):
        ago = day - (time - start) // DAY
        if good and ago > 0:
            counts[row] += 0.5 ** (ago / half_life)
    taken = 0.0 if item < 0 else counts[item]
    return math.log((taken + 1) / (sum(counts) / ITEMS + 1))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), events=st.integers(4, 40), days=st.integers(0, 60))
def test_trends_equal_the_loop(seed: int, events: int, days: int) -> None:
    log = drawn(seed, events, days)
    if not (log.types != 1).any():
        return
    trends = RecentPopularity(log)
    start = int(log.timestamps[log.types != 1].min())
    last = (int(log.timestamps[log.types != 1].max()) - start) // DAY
    rows = torch.tensor([3, 0, -1, 4])
    for day in (-3, 0, last // 2, last, last + 1, last + 50):
        places = trends.steps(torch.tensor([start + day * DAY + DAY // 3]))
        found = trends.scores(places, rows)
        assert found.shape == (len(HALF_LIVES), 1, 4)
        for number, half_life in enumerate(HALF_LIVES):
            known = min(max(day, 0), last + 1)  # nothing is known of what comes after the log
            for column, row in enumerate(rows.tolist()):
                wanted = expected(log, known, half_life, row)
                assert float(found[number, 0, column]) == pytest.approx(wanted, abs=1e-5)
    end = trends.scores(trends.steps(torch.tensor([2**60])), torch.tensor([0, 1, 2, 3, 4, -1]))
    np.testing.assert_array_equal(trends.latest, end[:, 0])


def test_large_catalogues_use_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of trends is bounded, and recent items still rank above older ones."""
    monkeypatch.setattr(models.recommender.recent_popularity, "MAX_ENTRIES", 10 * (ITEMS + 1))
    log = Interactions.from_columns(
        [0] * 200, [0] * 100 + [1] * 100, np.arange(200) * DAY, n_users=1, n_items=ITEMS
    )
    trends = RecentPopularity(log)
    assert trends._tables.shape[1] <= 11
    weekly, monthly = trends.latest.tolist()
    assert weekly[1] > weekly[0] == pytest.approx(weekly[2], abs=1e-3)
    assert monthly[1] > monthly[0] > monthly[2] == monthly[-1]


@pytest.mark.parametrize("items", [0, 3])
def test_empty_log_has_no_trends(items: int) -> None:
    log = Interactions.from_columns([], [], [], n_users=1, n_items=items)
    assert not RecentPopularity(log).latest.any()
    assert RecentPopularity(log).latest.shape == (len(HALF_LIVES), items + 1)
