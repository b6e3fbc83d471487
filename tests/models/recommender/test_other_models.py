"""Statistics of the log, and models that score as a baseline does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from models.data.interactions import Interactions
from models.evaluation.baselines import ease, repeats
from models.evaluation.full_ranking import Ranker, evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import leave_one_out
from models.recommender.recommender import (
    BOUGHT_BEFORE,
    EASE_NAME,
    TRANSITIONS,
    LogStatistics,
    RecommenderConfig,
    baseline_model,
)
from tests.support.small import DAY, random_model
from tests.support.training import content, counted_model, drawn_log

ITEMS = 14
SHOP = {"next_basket": True, "repeat_consumption": True}


@pytest.mark.parametrize(("name", "fit"), [(EASE_NAME, ease), (BOUGHT_BEFORE, repeats)])
def test_a_baseline_model_ranks_as_the_baseline(
    name: str, fit: Callable[[Interactions], Ranker]
) -> None:
    split = leave_one_out(drawn_log(4, [9, 12, 7, 8, 11, 6, 10, 9], ITEMS))
    model = counted_model(2, split.train, **SHOP)
    served = baseline_model(model, name, split.train)
    assert served is not None
    expected = evaluate(fit(split.train), split.test, exclude_seen=False)
    found = evaluate(ModelRanker(served, content(ITEMS)), split.test, exclude_seen=False)
    scores = fit(split.train).scores(split.test.history, split.test.users, None)
    ties = [np.isclose(own, own[target], atol=1e-6).sum() - 1
            for own, target in zip(scores, split.test.targets, strict=True)]  # fmt: skip
    assert (found.ranks <= expected.ranks).all()
    assert (found.ranks >= expected.ranks - np.array(ties)).all()


def test_transitions_alone_follow_what_followed() -> None:
    """The order of the scores is that of the model's own counts."""
    log = drawn_log(5, [9, 12, 7, 8], ITEMS)
    model = counted_model(2, log)
    served = baseline_model(model, TRANSITIONS, log)
    assert served is not None
    users = np.arange(4, dtype=np.int32)
    scores = ModelRanker(served, content(ITEMS)).scores(log, users, None)
    for user in range(4):
        newest = log.items[log.offsets[user] : log.offsets[user + 1]][::-1].copy()
        counts = model.statistics.transition_counts
        weights = np.zeros(ITEMS)
        for at, item in enumerate(newest[: counts.window.depth].tolist()):
            for column, count in zip(counts.items[item].tolist(), counts.counts[item].tolist(),
                                     strict=True):  # fmt: skip
                if column < ITEMS:
                    weights[column] += counts.window.decay**at * count
        np.testing.assert_allclose(scores[user], np.log1p(2 * weights), atol=1e-4)


def test_there_is_no_model_without_the_part() -> None:
    log = drawn_log(5, [9, 12, 7, 8], ITEMS)
    model = counted_model(2, log)
    assert baseline_model(model, BOUGHT_BEFORE, log) is None
    assert baseline_model(model, "popularity", log) is None
    assert model.config.similar_items == 0  # it is left as it was


def test_a_request_is_within_the_horizon() -> None:
    statistics = random_model(1).statistics
    statistics.load(statistics.transition_counts, max_request_gap=3 * DAY)
    newest = torch.tensor([0, 0, 0, 10 * DAY, 10 * DAY])
    asked = torch.tensor([DAY, 3 * DAY, 3 * DAY + 1, 9 * DAY, 2**60])
    expected = [DAY, 3 * DAY, 3 * DAY, 9 * DAY, 13 * DAY]
    assert statistics.clamp_request_time(asked, newest).tolist() == expected
    fresh = LogStatistics(RecommenderConfig(n_items=2, transitions_per_item=3))
    assert fresh.clamp_request_time(torch.tensor(2**59), torch.tensor(0)) == 2**59
