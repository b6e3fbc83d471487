"""Weights of the parts of a score that held-out cases choose, after training.

A model remembers its training events, so that counts, which leave each user's own events out, look
less useful there than they are for new events. Weights that are fitted to held-out cases have no
such bias (stacking, Wolpert 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker, ndcg_gains, ranks_by_weight, standard_error
from models.evaluation.model_ranker import ModelRanker, similarity_ranker, transition_ranker
from models.evaluation.splits import Holdout
from models.recommender.co_occurrence import MAX_EASE_ITEMS, ItemSimilarity, ease_similarity
from models.recommender.recommender import Recommender

TRANSITION_OFFSETS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of λ of what followed
# of λ of items taken before: at the last, these come before everything else
REPEAT_OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# For item similarities: those of a user sum to about .5 for the most similar item.
SIMILARITIES = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_CUT_OFF = 10  # of the NDCG that chooses


class HeldOutWeights(NamedTuple):
    offsets: tuple[float, ...] = ()  # added to λ of each transition count
    similarity: float = 0.0  # of item similarities; 0: there is no such part


def fit_held_out_weights(
    model: Recommender,
    content: NDArray[np.float32],
    cases: Holdout,
    log: Interactions,
    *,
    batch_size: int = 256,
    group: Processes = SINGLE_PROCESS,
) -> HeldOutWeights:
    """Give a model in eval mode the weights that rank held-out cases best.

    `log` has the model's training events, which the cases were held out of. The processes of
    `group` share the batches, and each changes its model alike.
    """
    gains = partial(_gains, model, content, cases, batch_size=batch_size, group=group)
    offset = 0.0
    if model.has_transitions:
        found = gains([transition_ranker(model, 0)], [(each,) for each in TRANSITION_OFFSETS])
        # Processors round sums differently, and other processes must not choose otherwise.
        offset = TRANSITION_OFFSETS[group.broadcast(lambda: choose_weight(found))]
        _add_offsets(model, [offset])
    parts: list[Ranker] = []
    table: ItemSimilarity | None = None
    if 0 < log.n_items <= MAX_EASE_ITEMS:
        table = _similarity(log, group).to(model.prior.device)
        parts.append(similarity_ranker(table, model.config.dislike_type))
    has_repeats = model.has_transitions and model.counts_repeats
    if has_repeats:
        parts.append(transition_ranker(model, 1))
    similarities = SIMILARITIES if table is not None else (0.0,)
    repeats = REPEAT_OFFSETS if has_repeats else (0.0,)
    weight = repeat = 0.0
    if parts:
        grid = list(product(similarities, repeats))
        columns = [part for part, used in ((0, table is not None), (1, has_repeats)) if used]
        chosen = [tuple(pair[column] for column in columns) for pair in grid]
        both = gains(parts, chosen, is_of_both=True).reshape(len(similarities), len(repeats), -1)
        best = both.mean(axis=2).argmax(axis=1)  # the offset of repeats that suits each similarity
        at = group.broadcast(lambda: smallest_weight(both[np.arange(len(both)), best]))
        weight, repeat = similarities[at], repeats[group.broadcast(lambda: int(best[at]))]
    _add_offsets(model, [0.0, repeat] if has_repeats else [])
    if table is not None and weight:
        model.set_similarity(table.scaled(weight))
    offsets = (offset, repeat) if has_repeats else (offset,) if model.has_transitions else ()
    return HeldOutWeights(offsets, weight)


def apply_held_out_weights(
    model: Recommender,
    weights: HeldOutWeights,
    log: Interactions,
    group: Processes = SINGLE_PROCESS,
) -> None:
    """Give another model the same weights, with the item similarities of its training events."""
    _add_offsets(model, weights.offsets)
    if weights.similarity:
        table = _similarity(log, group)
        model.set_similarity(table.scaled(weights.similarity).to(model.prior.device))


def choose_weight(gains: NDArray[np.float64]) -> int:
    """Choose the weight of the highest mean gain, from the gains [W, M] of M cases.

    The first, no change, is kept unless another gains more than a standard error of the paired
    difference.
    """
    best = int(gains.mean(axis=1).argmax())
    more = gains[best] - gains[0]
    return best if more.mean() > standard_error(more) else 0


def smallest_weight(gains: NDArray[np.float64]) -> int:
    """Choose the first weight whose mean gain is within the noise of the highest.

    That is the rule of one standard error (Breiman et al. 1984), here of the paired difference: few
    cases tell large weights apart badly, and the smaller one keeps more of the model. Gains are as
    in `choose_weight`.
    """
    best = gains[gains.mean(axis=1).argmax()]
    return next(
        at for at, own in enumerate(gains) if not (best - own).mean() > standard_error(best - own)
    )


def _similarity(log: Interactions, group: Processes) -> ItemSimilarity:
    """The item similarities of a log that all processes have, or a shard of it each."""
    if log.shards.count > 1:
        return ease_similarity(log)
    return group.broadcast(lambda: ease_similarity(log))


def _gains(
    model: Recommender,
    content: NDArray[np.float32],
    cases: Holdout,
    parts: Sequence[Ranker],
    weights: Sequence[Sequence[float]],
    *,
    batch_size: int,
    group: Processes,
    is_of_both: bool = False,
) -> NDArray[np.float64]:
    """The NDCG gains [W, M] of cases, where parts with W weights are added to a model's scores.

    If users take items again and `is_of_both`, a service is asked two questions, what comes next
    and, with seen items excluded, what is new: the mean of the values is then the NDCG of all cases
    plus that of new items. Collective over the shards of the log, whose cases are few enough to be
    put together.
    """
    ranker = ModelRanker(model, content, reduced_precision=True, two_stage=True)

    def gains(asked: Holdout, *, exclude_seen: bool) -> NDArray[np.float64]:
        ranks = ranks_by_weight(
            ranker,
            parts,
            weights,
            asked,
            batch_size=batch_size,
            exclude_seen=exclude_seen,
            group=group,
        )
        return ndcg_gains(ranks, _CUT_OFF)

    repeats, shards = model.config.repeat_consumption, cases.history.shards
    every = gains(cases, exclude_seen=not repeats)
    if repeats and is_of_both:
        new = ~cases.targets_seen()
        count = shards.total(int(np.count_nonzero(new)))
        if count:
            share = shards.total(len(new)) / count
            every[:, new] += gains(cases.where(new), exclude_seen=True) * share
    return shards.gather(every.T).T


def _add_offsets(model: Recommender, offsets: Sequence[float]) -> None:
    bias = model.transition_scale.bias.detach()  # shares the memory
    bias[: len(offsets)] += torch.tensor(offsets, device=bias.device)
