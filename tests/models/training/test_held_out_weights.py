"""The offsets of the transitions' weights that held-out cases choose."""

import copy

import numpy as np
import pytest
import torch

from models.data.interactions import Interactions
from models.evaluation.full_ranking import evaluate, ranks_by_weight
from models.evaluation.model_ranker import ModelRanker, transition_ranker
from models.evaluation.splits import leave_one_out
from models.training.held_out_weights import (
    TRANSITION_OFFSETS,
    apply_held_out_weights,
    choose_weight,
    fit_held_out_weights,
    smallest_weight,
)
from tests.support.training import content, counted_model, drawn_log

ITEMS = 12


def baskets() -> Interactions:
    """Users who take items again, so that a next-basket model has two counts."""
    return drawn_log(3, [9, 4, 12, 7, 5, 8, 3, 6], ITEMS)


@pytest.mark.parametrize("next_basket", [False, True])
def test_ranks_by_weight_are_those_of_changed_models(next_basket: bool) -> None:
    split = leave_one_out(baskets())
    model = counted_model(1, split.train, next_basket=next_basket)
    assert model.counts_repeats == next_basket
    cases, texts = split.validation, content(ITEMS)
    for count in range(1 + next_basket):
        found = ranks_by_weight(
            ModelRanker(model, texts),
            [transition_ranker(model, count)],
            [(offset,) for offset in TRANSITION_OFFSETS],
            cases,
            batch_size=3,
        )
        for offset, ranks in zip(TRANSITION_OFFSETS, found, strict=True):
            changed = copy.deepcopy(model)
            with torch.no_grad():
                changed.transition_scale.bias[count] += offset
            expected = evaluate(ModelRanker(changed, texts), cases).ranks
            assert ranks.tolist() == expected.tolist()


def test_a_model_gets_the_offset_that_ranks_cases_best() -> None:
    """A model that learned to distrust transitions trusts them again where cases say so."""
    # Everyone takes the items in one order, so that what follows an item is certain.
    log = Interactions.from_columns(
        np.repeat(np.arange(30), 6),
        np.concatenate([(np.arange(6) + start) % ITEMS for start in range(30)]),
        np.arange(180),
        n_users=30,
        n_items=ITEMS,
    )
    split = leave_one_out(log)
    model = counted_model(1, split.train)
    with torch.no_grad():
        model.transition_scale.weight.zero_()
        model.transition_scale.bias.fill_(0.0)
    before = evaluate(ModelRanker(model, content(ITEMS)), split.validation).ndcg
    (offset,), _ = fit_held_out_weights(model, content(ITEMS), split.validation, split.train)
    assert offset > 0
    assert float(model.transition_scale.bias.detach()) == offset
    after = evaluate(ModelRanker(model, content(ITEMS)), split.validation).ndcg
    assert after > before


def test_the_highest_gain_beyond_the_noise_is_chosen() -> None:
    gains = np.zeros((len(TRANSITION_OFFSETS), 50))
    gains[3], gains[5] = 0.4, 0.5
    assert choose_weight(gains) == 5
    gains = np.full((len(TRANSITION_OFFSETS), 50), 0.5)
    gains[4, :2] = 1.0, 0.01  # one case ranks higher and another lower
    assert choose_weight(gains) == 0


def companions() -> Interactions:
    """Users who take three of the four items of a kind, in any order, and one of any other."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, 60)
    taken = [np.append(rng.integers(0, ITEMS), rng.permutation(4)[:3] + 4 * kind) for kind in kinds]
    return Interactions.from_columns(
        np.repeat(np.arange(60), 4), np.concatenate(taken), np.arange(240), n_users=60,
        n_items=ITEMS,
    )  # fmt: skip


def test_similarities_are_added_where_cases_say_so() -> None:
    """A model that has learned nothing ranks by the similarities of its training events."""
    split = leave_one_out(companions())
    model = counted_model(1, split.train)
    with torch.no_grad():
        for part in (
            model.cross_attention.w_o.weight,
            model.prior,
            *model.transition_scale.parameters(),
        ):
            part.zero_()
    before = evaluate(ModelRanker(model, content(ITEMS)), split.validation).ndcg
    other = copy.deepcopy(model)
    weights = fit_held_out_weights(model, content(ITEMS), split.validation, split.train)
    assert weights.similarity > 0
    assert model.config.similar_items == ITEMS
    after = evaluate(ModelRanker(model, content(ITEMS)), split.validation).ndcg
    assert after > before
    apply_held_out_weights(other, weights, split.train)
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)


def test_the_smallest_weight_within_the_noise_is_chosen() -> None:
    rng = np.random.default_rng(0)
    gains = rng.normal(size=(1, 50)) + np.array([[0.0], [0.5], [0.5], [0.51]])
    gains[3] += rng.normal(size=50) * 0.1
    gains[3] += 0.51 - (gains[3] - gains[0]).mean()
    assert smallest_weight(gains) == 1
    assert smallest_weight(gains[:, :1]) == 0  # one case tells nothing
