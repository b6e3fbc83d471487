"""Samples of customers, and what is said of them."""

import io

import numpy as np
from rich.console import Console

from models.evaluation.full_ranking import RankingMetrics
from models.evaluation.metrics import PairedDifference
from tests.benchmarks.studies.small_shops import NEW, Outcome, as_json, draw, shown
from tests.support.training import drawn_log


def test_smaller_samples_are_of_the_largest() -> None:
    """A sample keeps all events of its customers; 0 customers are everybody."""
    log = drawn_log(0, [3, 5, 2, 4, 6, 1, 2, 3], 9)
    large, small = draw(log, 6, 6, 1), draw(log, 6, 2, 1)
    assert len(np.unique(large.users)) == 6
    assert set(small.users.tolist()) <= set(large.users.tolist())
    for user in np.unique(small.users):
        assert np.count_nonzero(small.users == user) == np.count_nonzero(log.users == user)
    assert draw(log, 6, 0, 1) is log
    assert draw(log, 6, 2, 2).users.tolist() != small.users.tolist()


def test_a_baseline_that_is_above_the_interval_is_told() -> None:
    """What is served holds if neither interval lies below zero."""
    metrics = RankingMetrics(10, 0.25, 0.125, 0.1, 0.5, 2, np.array([1, 30]))
    equal, worse = PairedDifference(0.0, -0.1, 0.1, 0.05), PairedDifference(-0.2, -0.3, -0.1, 0.05)
    good = Outcome(9, 80, NEW, "heed", 4.0, 2, metrics, "EASE", metrics, equal, equal)
    bad = good._replace(ndcg=worse)
    assert (good.holds, bad.holds) == (True, False)
    console = Console(width=240, file=io.StringIO())
    with console.capture() as captured:
        console.print(shown([good, bad], "a shop"))
    text = captured.get()
    assert "a shop" in text
    assert [line.split()[-2] for line in text.splitlines() if "EASE" in line] == ["yes", "no"]
    assert [one["holds"] for one in as_json([good, bad])] == [True, False]
