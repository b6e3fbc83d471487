"""Baselines as models: copies of a trained model whose score is that of a baseline alone."""

from __future__ import annotations

import copy

import torch

from models.data.interactions import Interactions
from models.recommender.item_similarity import ease_similarity
from models.recommender.recommender import Recommender

EASE_NAME, TRANSITIONS, BOUGHT_BEFORE = "EASE", "transition counts", "bought before"
_TIES = 1e-6  # of popularity, which orders what a baseline scores alike


def baseline_model(model: Recommender, name: str, log: Interactions) -> Recommender | None:
    """Return a copy of a model that scores as a baseline does, by parts that the model has.

    The attention adds nothing, and the prior no more than an order among equals. Similarities are
    the largest of each item, and transitions those of the model's own window.

    Args:
        model: in eval mode.
        name: `EASE_NAME`, `TRANSITIONS` or `BOUGHT_BEFORE`.
        log: the model's training events; collective over its shards.

    Returns:
        Recommender: None for another baseline, or one that the model has no part for.
    """
    parts = {TRANSITIONS: 0, BOUGHT_BEFORE: 1}
    own = model.transition_scale.out_features if model.has_transitions else 0
    if name != EASE_NAME and parts.get(name, own) >= own:
        return None
    served = copy.deepcopy(model)
    popularity = torch.from_numpy(log.liked().total_item_counts() + 1).float().log()
    with torch.no_grad():
        served.cross_attention.w_o.weight.zero_()
        served.transition_scale.weight.zero_()
        served.transition_scale.bias.zero_()
        served.prior.copy_(_TIES * popularity)
        served.new_prior.zero_()
        if served.recent_popularity_weight is not None:
            served.recent_popularity_weight.zero_()
        if name in parts:
            served.transition_scale.bias[parts[name]] = 1.0
    served.set_similarity(ease_similarity(log) if name == EASE_NAME else None)
    return served
