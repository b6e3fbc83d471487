"""Report of a comparison: means over seeds, paired differences and slices, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics
from service.lab.comparison import Comparison, ModelResults
from service.lab.comparison_report import differences, summarise, to_json
from service.lab.protocols import EvaluationTask, global_time
from service.training.judgement import HEED

HOUR = 3_600_000_000


def metrics(*ranks: int) -> RankingMetrics:
    return RankingMetrics(10, 0.0, 0.0, 0.0, 0.0, len(ranks), np.array(ranks, np.int64))


def task() -> EvaluationTask:
    """Three users' last events are the cases, an hour, an hour and two days after their first."""
    log = Interactions.from_columns(
        [0, 1, 2, 0, 1, 2],
        [0, 0, 0, 0, 1, 2],
        [0, 0, 0, HOUR, HOUR, 48 * HOUR],
        n_users=3,
        n_items=3,
    )
    return global_time(log, 1)


TABLE: Comparison = {
    "popularity": ModelResults([metrics(0, 20, 20)], seconds=[0.0]),
    "popularity of 7 days": ModelResults([metrics(20, 20, 20)], [metrics(0, 0, 20)]),
    HEED: ModelResults(
        [metrics(0, 0, 20), metrics(20, 0, 2)], [metrics(0, 0, 0), metrics(0, 0, 2)]
    ),
}


def test_differences_average_each_case_over_seeds() -> None:
    """Both seeds count, and a model without times stands beside Heed at time as it is."""
    found = differences(TABLE)
    assert list(found) == ["popularity", "popularity of 7 days"]
    assert [hr.difference for hr, _ in found.values()] == pytest.approx([1 / 3, 2 / 3])
    assert [ndcg.difference for _, ndcg in found.values()] == pytest.approx([0.75 / 3, 1.75 / 3])
    at_time = differences(TABLE, at_time=True)
    assert at_time["popularity"][0].difference == pytest.approx(2 / 3)
    assert at_time["popularity of 7 days"][1].difference == pytest.approx(2.75 / 3 - 2 / 3)


def test_a_sentence_counts_users() -> None:
    """A user finds something if one of the basket is among the ten; seeds are averaged."""
    assert summarise(task(), TABLE) == (
        "For 2 of 3 customers the next item is one of the ten recommended; "
        "for 1 with the best baseline, popularity."
    )
    baskets = task()
    cases = replace(baskets.test, users=np.array([0, 0, 1], np.int32))
    assert summarise(baskets._replace(test=cases), TABLE) == (
        "For 1.5 of 2 customers the next basket holds one of the ten recommended; "
        "for 1 with the best baseline, popularity."
    )


def test_no_cases_have_no_differences() -> None:
    none: Comparison = {name: ModelResults([metrics()]) for name in TABLE}
    assert differences(none) == {}
    timeless = {"popularity": TABLE["popularity"], HEED: ModelResults([metrics(0, 0, 0)])}
    assert differences(timeless, at_time=True) == {}


def test_slices_hold_the_mean_of_their_cases() -> None:
    """Each slice averages its own cases over seeds; debiased, rare targets weigh more."""
    report = to_json(task(), TABLE, "quick")
    assert (report["task"], report["date"]) == ("global-time", "1970-01-01T00:00:00.000001Z")
    assert (report["events"], report["cases"]) == (6, 3)
    slices = {(each["by"], each["slice"]): each for each in report["slices"]}
    hr = {key: each["models"][HEED]["hr"] for key, each in slices.items()}
    debiased = (0.5 * 0.5 + 1 + 0.5) / 2.5  # items 0, 1 and 2 have 3, 0 and 0 events in training
    assert hr == {
        ("all", "all cases"): pytest.approx(2 / 3),
        ("all", "popularity-debiased"): pytest.approx(debiased),
        ("gap to the target", "up to 1 hour"): pytest.approx(3 / 4),
        ("gap to the target", "over 1 day"): pytest.approx(1 / 2),
        ("history", "up to 10 events"): pytest.approx(2 / 3),
        ("age of the item", "up to 7 days"): pytest.approx(1 / 2),
        ("age of the item", "not in training"): pytest.approx(3 / 4),
    }
    last = slices["gap to the target", "over 1 day"]
    assert last["cases"] == 1
    assert last["models"][f"{HEED}, at time"] == {"hr": 1.0, "ndcg": pytest.approx(0.75)}
    assert last["models"]["popularity of 7 days, at time"] == {"hr": 0.0, "ndcg": 0.0}
    assert slices["all", "all cases"]["models"]["popularity"]["ndcg"] == pytest.approx(1 / 3)
    assert math.isclose(report["heed_over"]["popularity"]["hr"]["difference"], 1 / 3)
