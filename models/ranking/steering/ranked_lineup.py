"""Steering of items that are ranked by one number each, such as popular ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.fields.item_fields import ItemFields
from models.ranking.steering.item_steering import ItemSteering, Quota
from models.ranking.steering.lineup import Moved, Pool, line_up, take_first
from models.ranking.steering.quota_counts import QuotaCounts


class SteeredRows(NamedTuple):
    """Rows of an answer, best first."""

    rows: NDArray[np.int64]  # [L]
    moved: tuple[Moved | None, ...]  # [L] why an item does not stand where its number puts it


def line_up_ranked(
    fields: ItemFields,
    ranked: NDArray[np.int64],
    steering: ItemSteering,
    *,
    limit: int,
) -> SteeredRows:
    """Put pins at their positions, buried items last, and keep quotas; nothing is explored.

    Args:
        fields: of the catalogue.
        ranked: distinct item rows [R], best first, boosts included, without pins.
        steering: of the same catalogue.
        limit: the most items, pinned ones among them.
    """
    every = np.concatenate([ranked, steering.pinned])
    worth = -torch.arange(len(every)).float()
    events = np.zeros(len(every), np.int64)
    pool = Pool(every, worth, worth, events, lambda places: torch.zeros(len(places), 1))
    counts = QuotaCounts.over(fields, steering.quotas, every)
    lineup = line_up(pool, counts, steering, limit=limit, diversity=0.0)
    return SteeredRows(every[lineup.places], lineup.moved)


def line_up_scored(
    fields: ItemFields,
    rows: NDArray[np.int64],
    scores: NDArray[np.floating[Any]],
    steering: ItemSteering,
    *,
    limit: int,
) -> SteeredRows:
    """Rank items by the sum of score and boost, ties in the order given, and line them up.

    Args:
        fields: of the catalogue.
        rows: distinct item rows [R]; pins among them are ranked nowhere else.
        scores: of these, without boosts, [R].
        steering: of the same catalogue.
        limit: the most items, pinned ones among them.
    """
    own = scores if steering.boost is None else scores + steering.boost[rows]
    order = rows[np.argsort(-own, kind="stable")]
    ranked = order[~np.isin(order, steering.pinned)]
    return line_up_ranked(fields, ranked, steering, limit=limit)


class QuotaChoice:
    """Choice of the first places of an order within quotas, for several answers from one pool."""

    def __init__(
        self, fields: ItemFields, quotas: Sequence[Quota], rows: NDArray[np.int64], limit: int
    ) -> None:
        self._counts = QuotaCounts.over(fields, quotas, rows)
        self._limit = limit

    def __call__(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first places [<= limit] of an order that all quotas have room for."""
        return take_first(order, self._counts.copy(), self._limit)
