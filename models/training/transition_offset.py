"""Corrects the weight of the transitions by held-out cases, after training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.evaluation.full_ranking import RankingMetrics
from models.evaluation.metrics import ndcg_gains, standard_error
from models.recommender.recommender import Recommender

OFFSETS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of λ, in ascending order


def fit_transition_offset(
    model: Recommender, validate: Callable[[Recommender], RankingMetrics]
) -> tuple[list[float], RankingMetrics]:
    """Add to λ of each transition count what ranks held-out cases best.

    A model remembers its training events, so that the transition counts, which leave each user's
    own events out, look less useful there than they are for events that are to come. The weights of
    parts that are fitted to data which the parts were not trained on have no such bias (stacking,
    Wolpert 1992). Larger offsets are tried until two in a row bring no higher NDCG; an offset is
    kept if it gains more than a standard error of the paired difference.

    Args:
        model: changed in place.
        validate: ranks the held-out cases.

    Returns:
        tuple: the offset of each count, and the metrics with all of them.
    """
    metrics, offsets = validate(model), []
    for count in range(model.transition_scale.out_features if model.has_transitions else 0):
        offset, metrics = _fit_one(model, count, metrics, validate)
        offsets.append(offset)
    return offsets, metrics


def add_transition_offsets(model: Recommender, offsets: list[float]) -> None:
    """Add an offset to λ of each transition count."""
    with torch.no_grad():
        model.transition_scale.bias[: len(offsets)] += torch.tensor(offsets)


def _fit_one(
    model: Recommender,
    count: int,
    without: RankingMetrics,
    validate: Callable[[Recommender], RankingMetrics],
) -> tuple[float, RankingMetrics]:
    bias = model.transition_scale.bias.detach()  # shares the memory
    trained, best, offset, since_best = float(bias[count]), without, 0.0, 0
    for each in OFFSETS:
        _set(bias, count, trained + each)
        metrics = validate(model)
        if metrics.ndcg > best.ndcg:
            best, offset, since_best = metrics, each, 0
        elif since_best:
            break
        else:
            since_best = 1
    gain = ndcg_gains(best.ranks, best.k) - ndcg_gains(without.ranks, best.k)
    if not gain.mean() > standard_error(gain):
        best, offset = without, 0.0
    _set(bias, count, trained + offset)
    return offset, best


def _set(bias: torch.Tensor, count: int, value: float) -> None:
    with torch.no_grad():
        bias[count] = value
