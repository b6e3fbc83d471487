"""Explanation of scores: the rows of a memory that a score is due to, and their effects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention.attend import DEFAULT_OPTIONS, AttentionOptions
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.item_weights import rank_contributions
from models.history.newest_left_out import attention_without_newest
from models.history.user_attention import REMAINDER, expand_top_events
from models.history.user_memory import UserMemory
from models.ranking.contributions import Contributions, contributions
from models.ranking.effects import effects_of

Effects = Literal["none", "estimate", "exact"]


class Reason(NamedTuple):
    """Contribution of one row of the memory to one target's score."""

    source: int  # event of the history; -1 - i is profile entry i
    weight: float  # mean over heads
    contribution: float  # signed; all rows' sum to the score without the prior
    effect: float | None = None  # what the score loses without the row; None = not computed
    effect_is_exact: bool = False  # False: not computed, or estimated


@torch.inference_mode()
def explain(
    snapshot: Snapshot,
    user: UserMemory,
    rows: NDArray[np.integer],
    top: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    partial: PartialSoftmax | None = None,
    effects: Effects = "none",
) -> list[list[Reason]]:
    """Return the `top` rows that raise each target's score most.

    Where fewer rows than that raise them, the rows that lower them most follow. A list is in
    descending order of the signed contributions, so that its head is what a score is due to. Events
    on hidden and deleted items are no reasons, since nobody may be told of these.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        rows: item rows [L], the targets.
        top: how many rows of the memory to name for each.
        options: as in `score`.
        partial: of a long history, the targets' attention as `score` returned it, [H, L].
        effects: whether to compute effects, and how: see `models.ranking.effects`.
    """
    if not len(user) or top < 1 or not len(rows):
        return [[] for _ in rows]
    targets = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    if partial is None:
        found = [contributions(snapshot, user, targets, options)]
    else:  # a long history opens other events for each target
        without = attention_without_newest(snapshot, user, targets, options)
        every = replace(options, mode="exact")  # what was not retrieved is hidden
        found = [
            contributions(
                snapshot,
                expand_top_events(snapshot, user, int(target), top, partial.target(place), options),
                target[None],
                every,
                without=None if without is None else without.target(place),
            )
            for place, target in enumerate(targets)
        ]
    named = [_foremost(each, top, snapshot) for each in found]  # memory rows, [T][≤ top] of each
    reasons = [_reasons(*each) for each in zip(found, named, strict=True)]
    if effects != "none":
        completed = effects_of(
            snapshot, user, found, named, options, exact=effects == "exact", partial=partial
        )
        reasons = [
            [
                [
                    reason._replace(effect=effect, effect_is_exact=is_exact)
                    for reason, (effect, is_exact) in zip(*target, strict=True)
                ]
                for target in zip(*memory, strict=True)
            ]
            for memory in zip(reasons, completed, strict=True)
        ]
    return [target for memory in reasons for target in memory]


def _foremost(found: Contributions, top: int, snapshot: Snapshot) -> list[NDArray[np.int64]]:
    """Choose the rows to name for each target, by descending contribution."""
    each = found.each.numpy()
    nameable = ((found.weights.sum(0) > 0).numpy() | (each != 0)) & (found.user.source != REMAINDER)
    nameable &= ~snapshot.catalogue.withheld(found.user.rows.numpy())
    # What cannot be named counts as 0, which comes last.
    orders = rank_contributions(np.where(nameable, each, 0.0))
    if not nameable.all():
        orders = np.take_along_axis(
            orders, np.argsort(~np.take_along_axis(nameable, orders, 1), axis=1, kind="stable"), 1
        )
    orders, targets = orders[:, :top], np.arange(len(each))[:, None]
    by_value = orders[targets, np.argsort(-each[targets, orders], axis=1, kind="stable")]
    return [rows[can[rows]] for rows, can in zip(by_value, nameable, strict=True)]


def _reasons(found: Contributions, named: Sequence[NDArray[np.int64]]) -> list[list[Reason]]:
    """Make the reasons of the rows that are named for each target."""
    source, weights, each = found.user.source, found.weights.mean(0).numpy(), found.each.numpy()
    rows = np.concatenate([np.zeros(0, np.int64), *named])
    targets = np.repeat(np.arange(len(named)), [len(own) for own in named])
    reasons = map(
        Reason,
        source[rows].tolist(),
        weights[targets, rows].tolist(),
        each[targets, rows].tolist(),
    )
    return [list(islice(reasons, len(own))) for own in named]
