"""Corrects the weight of the transitions by held-out cases, after training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.data_parallel import SINGLE_PROCESS, DataParallelGroup
from models.evaluation.full_ranking import ranks_by_weight
from models.evaluation.metrics import ndcg_gains, standard_error
from models.evaluation.model_ranker import ModelRanker, TransitionRanker
from models.evaluation.splits import Holdout
from models.recommender.recommender import Recommender

OFFSETS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of λ
_CUT_OFF = 10  # of the NDCG that chooses one


def fit_transition_offsets(
    model: Recommender,
    content: NDArray[np.float32],
    cases: Holdout,
    *,
    batch_size: int = 256,
    group: DataParallelGroup = SINGLE_PROCESS,
) -> list[float]:
    """Add to λ of each transition count what ranks held-out cases best.

    A model remembers its training events, so that the transition counts, which leave each user's
    own events out, look less useful there than they are for new events. Weights that are fitted to
    held-out cases have no such bias (stacking, Wolpert 1992).

    Args:
        model: in eval mode, changed in place.
        content: text embeddings of its items [items, D].
        cases: held out of the model's training events.
        batch_size: cases at once.
        group: its processes share the batches, and each adds the same.

    Returns:
        list: the offset of each count; none for a model without transitions.
    """
    offsets: list[float] = []
    for count in range(model.transition_scale.out_features if model.has_transitions else 0):
        ranks = ranks_by_weight(
            ModelRanker(model, content, reduced_precision=True),
            TransitionRanker(model, count),
            OFFSETS,
            cases,
            batch_size=batch_size,
            exclude_seen=not model.config.repeat_consumption,
            group=group,
        )
        offset = OFFSETS[choose_offset(ndcg_gains(ranks, _CUT_OFF))]
        add_transition_offsets(model, [0.0] * count + [offset])
        offsets.append(offset)
    return offsets


def choose_offset(gains: NDArray[np.float64]) -> int:
    """Choose the offset of the highest mean gain, from the gains [W, M] of M cases.

    The first, no offset, is kept unless another gains more than a standard error of the paired
    difference.
    """
    best = int(gains.mean(axis=1).argmax())
    more = gains[best] - gains[0]
    return best if more.mean() > standard_error(more) else 0


def add_transition_offsets(model: Recommender, offsets: Sequence[float]) -> None:
    """Add an offset to λ of each of the first transition counts."""
    bias = model.transition_scale.bias.detach()  # shares the memory
    bias[: len(offsets)] += torch.tensor(offsets, device=bias.device)
