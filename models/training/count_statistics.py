"""What a model is given of a log before it is trained: what can be counted is not learned."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from models.data.interactions import Interactions
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender
from models.recommender.transition_counts import (
    CooccurrenceWindow,
    TransitionCounts,
    transition_counts,
)

_HORIZON = 0.999  # share of training's waits between events that are within the model's horizon


def fit_statistics(model: Recommender, log: Interactions) -> None:
    """What follows what, the horizon, what is popular and what was of late, into the model."""
    config = model.config
    lately = RecentPopularity(log).latest if config.next_basket else None
    model.load_statistics(
        _followers(log, config.transitions_per_item, model.cooccurrence_window),
        _horizon(log),
        lately,
    )
    frequency = _frequency(log)
    with torch.no_grad():
        model.prior.copy_(frequency)
        model.new_prior.copy_(frequency.mean())


def _followers(log: Interactions, most: int, reach: CooccurrenceWindow) -> TransitionCounts:
    if most:
        return transition_counts(log, most, reach)
    return TransitionCounts(
        torch.zeros(log.n_items, 0, dtype=torch.int32), torch.zeros(log.n_items, 0)
    )


def _frequency(log: Interactions) -> Tensor:
    """What the prior starts from: the logarithm of each item's share, the mean item's being 0.

    The steps of a small log would not get it there, nor those of a large catalogue's rare items.
    """
    if not log.n_items:
        return torch.zeros(1)
    counts = torch.from_numpy(log.liked().item_counts() + 1).float()
    return torch.log(counts / counts.mean())


def _horizon(log: Interactions) -> int:
    """The longest wait between two events of a user that is not an exception, microseconds."""
    waits = np.diff(log.timestamps)[np.diff(log.users) == 0]
    return int(np.quantile(waits, _HORIZON)) if len(waits) else 0
