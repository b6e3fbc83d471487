"""Initialises a model from counts of the log, before any training; collective over its shards."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from models.data.interactions import Interactions, quantile
from models.recommender.co_occurrence import count_transitions
from models.recommender.recent_popularity import RecentPopularity
from models.recommender.recommender import Recommender

_GAP_QUANTILE = 0.999  # of the gaps between events, beyond which request times are clamped


def fit_statistics(model: Recommender, log: Interactions) -> None:
    """Initialise transition counts, request-gap cap, popularity prior and recent popularity."""
    _count(model, log)
    prior = _log_popularity(log)
    with torch.no_grad():
        model.prior.copy_(prior)
        model.new_prior.copy_(prior.mean())


def update_statistics(model: Recommender, before: Interactions, log: Interactions) -> None:
    """Count a longer log anew; the trained prior of an item moves with its popularity.

    `before` is the log that the model was trained on.
    """
    _count(model, log)
    change = _log_popularity(log) - _log_popularity(before)
    with torch.no_grad():
        model.prior.add_(change.to(model.prior.device))


def _count(model: Recommender, log: Interactions) -> None:
    config = model.config
    model.statistics.load(
        count_transitions(log, config.transitions_per_item, model.statistics.cooccurrence_window),
        _max_request_gap(log),
        RecentPopularity(log).latest if config.next_basket else None,
    )


def _log_popularity(log: Interactions) -> Tensor:
    """Return the initial prior: the log of each item's share, 0 for an item of mean popularity.

    The steps of a small log would not learn it, nor those of a large catalogue's rare items.
    """
    if not log.n_items:
        return torch.zeros(1)
    counts = torch.from_numpy(log.liked().total_item_counts() + 1).float()
    return torch.log(counts / counts.mean())


def _max_request_gap(log: Interactions) -> int:
    """Return the largest gap between a user's events, outliers aside, in microseconds."""
    gaps = np.diff(log.timestamps)[np.diff(log.users) == 0]
    if not log.shards.any(len(gaps) > 0):
        return 0
    return int(quantile(gaps, _GAP_QUANTILE, log.shards))
