"""Weights of the parts of a score that held-out cases choose, after training.

A model remembers its training events, so that counts, which leave each user's own events out, look
less useful there than they are for new events. Weights that are fitted to held-out cases have no
such bias (stacking, Wolpert 1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.interactions import Interactions
from models.evaluation.full_ranking import Ranker, ndcg_gains, ranks_by_weight, standard_error
from models.evaluation.model_ranker import ModelRanker, SimilarityRanker, TransitionRanker
from models.evaluation.splits import Holdout
from models.recommender.co_occurrence import MAX_EASE_ITEMS, ItemSimilarity, ease_similarity
from models.recommender.recommender import Recommender

TRANSITION_OFFSETS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # of λ of what followed
# Of λ of what the user took before: at the last, that comes before everything else.
REPEAT_OFFSETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# For item similarities: those of a user sum to about .5 for the most similar item.
SIMILARITIES = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_CUT_OFF = 10  # of the NDCG that chooses


class HeldOutWeights(NamedTuple):
    """Weights that rank held-out cases best."""

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
    offset = 0.0
    if model.has_transitions:
        gains = _Gains(model, content, cases, batch_size, group)
        counts = [TransitionRanker(model, 0)]
        found = gains.of_all(counts, [(each,) for each in TRANSITION_OFFSETS])
        # Processors round sums differently, and other processes must not choose otherwise.
        offset = TRANSITION_OFFSETS[group.broadcast(lambda: choose_weight(found))]
        _add_offsets(model, [offset])
    parts: list[Ranker] = []
    table: ItemSimilarity | None = None
    if 0 < log.n_items <= MAX_EASE_ITEMS:
        table = _similarity(log, group).to(model.prior.device)
        parts.append(SimilarityRanker(table, model.config.dislike_type))
    has_repeats = model.has_transitions and model.counts_repeats
    if has_repeats:
        parts.append(TransitionRanker(model, 1))
    similarities = SIMILARITIES if table is not None else (0.0,)
    repeats = REPEAT_OFFSETS if has_repeats else (0.0,)
    weight = repeat = 0.0
    if parts:
        grid = list(product(similarities, repeats))
        columns = [part for part, used in ((0, table is not None), (1, has_repeats)) if used]
        chosen = [tuple(pair[column] for column in columns) for pair in grid]
        gains = _Gains(model, content, cases, batch_size, group)
        both = gains.of_both_questions(parts, chosen).reshape(len(similarities), len(repeats), -1)
        at, best = group.broadcast(lambda: _choose_pair(both))
        weight, repeat = similarities[at], repeats[best]
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


def _choose_pair(gains: NDArray[np.float64]) -> tuple[int, int]:
    """Choose the similarity and the offset of repeats, by row, from gains [S, R, M]."""
    best = gains.mean(axis=2).argmax(axis=1)  # the offset that suits each similarity
    at = smallest_weight(gains[np.arange(len(gains)), best])
    return at, int(best[at])


class _Gains:
    """NDCG gains of cases, where weighted parts are added to the scores of a model.

    Collective over the shards of the log, whose cases are few enough to be put together.
    """

    def __init__(
        self,
        model: Recommender,
        content: NDArray[np.float32],
        cases: Holdout,
        batch_size: int,
        group: Processes,
    ) -> None:
        self._ranker = ModelRanker(model, content, reduced_precision=True, two_stage=True)
        self._repeats = model.config.repeat_consumption
        self._cases, self._batch_size, self._group = cases, batch_size, group

    def of_all(
        self, parts: Sequence[Ranker], weights: Sequence[Sequence[float]]
    ) -> NDArray[np.float64]:
        """The gains [W, M] of all cases, for W weights of the parts."""
        return self._of_all_shards(
            self._gains(parts, weights, self._cases, exclude_seen=not self._repeats)
        )

    def of_both_questions(
        self, parts: Sequence[Ranker], weights: Sequence[Sequence[float]]
    ) -> NDArray[np.float64]:
        """Values [W, M] whose mean is the NDCG of all cases plus that of new items.

        If users take items again, a service is asked for both: for what comes next, and with seen
        items excluded for what is new. Otherwise all items are new.
        """
        every = self._gains(parts, weights, self._cases, exclude_seen=not self._repeats)
        new, shards = ~self._cases.targets_seen(), self._cases.history.shards
        count = shards.total(int(np.count_nonzero(new)))
        if self._repeats and count:
            found = self._gains(parts, weights, self._cases.where(new), exclude_seen=True)
            every[:, new] += found * (shards.total(len(new)) / count)
        return self._of_all_shards(every)

    def _of_all_shards(self, gains: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._cases.history.shards.gather(gains.T).T

    def _gains(
        self,
        parts: Sequence[Ranker],
        weights: Sequence[Sequence[float]],
        cases: Holdout,
        *,
        exclude_seen: bool,
    ) -> NDArray[np.float64]:
        ranks = ranks_by_weight(
            self._ranker,
            parts,
            weights,
            cases,
            batch_size=self._batch_size,
            exclude_seen=exclude_seen,
            group=self._group,
        )
        return ndcg_gains(ranks, _CUT_OFF)


def _add_offsets(model: Recommender, offsets: Sequence[float]) -> None:
    """Add an offset to λ of each of the first transition counts."""
    bias = model.transition_scale.bias.detach()  # shares the memory
    bias[: len(offsets)] += torch.tensor(offsets, device=bias.device)
