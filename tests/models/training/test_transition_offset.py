"""The offset of the transitions' weight that held-out cases choose."""

import numpy as np
import pytest
import torch

from models.evaluation.full_ranking import RankingMetrics
from models.recommender.recommender import Recommender
from models.training.transition_offset import (
    OFFSETS,
    add_transition_offsets,
    fit_transition_offset,
)
from tests.support.small import random_model


def judged(best: float, model: Recommender, seen: list[float]) -> RankingMetrics:
    """Metrics of 50 cases whose ranks rise with the distance of the first λ from the best."""
    weight = float(model.transition_scale.bias[0].detach())
    seen.append(weight)
    ranks = np.arange(50) % 3 + np.int64(round(abs(weight - best) * 4))
    ndcg = float(np.mean(1 / np.log2(ranks + 2)))
    return RankingMetrics(100, 0.0, ndcg, 0.0, 0.0, len(ranks), ranks)


@pytest.mark.parametrize("better_by", [0.0, 0.5, 1.5, 4.0])
def test_the_best_offset_is_added(better_by: float) -> None:
    """λ's bias ends at the offset of highest NDCG, whatever was trained; its weights stay."""
    model = random_model(0, n_items=5, transitions_per_item=2)
    weights = model.transition_scale.weight.detach().clone()
    trained, seen = float(model.transition_scale.bias[0].detach()), list[float]()
    offsets, metrics = fit_transition_offset(
        model, lambda each: judged(trained + better_by, each, seen)
    )
    assert offsets == [better_by]
    assert float(model.transition_scale.bias[0].detach()) == pytest.approx(trained + better_by)
    assert torch.equal(model.transition_scale.weight, weights)
    assert metrics.ranks.max() == 2  # those of the best offset
    assert len(seen) <= 1 + len(OFFSETS)


def test_a_gain_within_the_noise_changes_nothing() -> None:
    """An offset that ranks one case of many higher, and others lower, is not kept."""
    model = random_model(0, n_items=5, transitions_per_item=2)
    before = model.transition_scale.bias.detach().clone()

    def validate(each: Recommender) -> RankingMetrics:
        moved = not torch.equal(each.transition_scale.bias, before)
        ranks = np.full(50, 3, dtype=np.int64)
        if moved:
            ranks[:2] = 0, 5
        ndcg = float(np.mean(1 / np.log2(ranks + 2)))
        return RankingMetrics(100, 0.0, ndcg, 0.0, 0.0, len(ranks), ranks)

    offsets, metrics = fit_transition_offset(model, validate)
    assert offsets == [0.0]
    assert torch.equal(model.transition_scale.bias, before)
    assert (metrics.ranks == 3).all()


def test_offsets_are_added_to_another_model() -> None:
    """The final model gets the offsets of the validated one."""
    model = random_model(0, n_items=5, transitions_per_item=2)
    before = float(model.transition_scale.bias[0].detach())
    add_transition_offsets(model, [1.5])
    assert float(model.transition_scale.bias[0].detach()) == pytest.approx(before + 1.5)
