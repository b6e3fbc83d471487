"""Recommendations of a requester with the items of the history that they are due to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.explanation import Reason, explain
from models.ranking.recommend import Ranked, best_scores, recommend
from models.ranking.steering import NO_STEERING, ItemSteering
from service.domain.records import NEGATIVE
from service.histories.event_columns import EventColumns

REASONS = 5  # of each recommended item
MOST_OF_LONG = 80  # new items of a long history, which is explained item by item, in some ms each


@dataclass(frozen=True, slots=True, eq=False)
class PersonalPool:
    """Ranked items of a requester: new ones with their reasons, and those that come back."""

    fresh: Ranked  # items that the requester has not had, best first
    reasons: Sequence[Sequence[Reason]]  # of each of these
    again: Ranked  # items that the requester took at several times


def personal_pool(
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    options: AttentionOptions,
    *,
    allowed: NDArray[np.bool_],
    excluded: NDArray[np.int64],
    size: int,
    limit: int,
    steering: ItemSteering = NO_STEERING,
) -> PersonalPool:
    """Rank up to `size` new items and up to `limit` items that come back.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        events: the requester's.
        options: as the memory is attended.
        allowed: bool [N], items that may be answered.
        excluded: item rows that may not.
        size: the most new items; of a long history at most `MOST_OF_LONG`.
        limit: the most items that come back.
        steering: of the same catalogue, of which only boosts count.
    """
    if steering.boost is not None:
        scaled = steering.scaled(best_scores(snapshot, user, allowed, options))
        steering = ItemSteering(boost=scaled.boost)
    seen = events.items[events.items < len(allowed)]
    fresh = recommend(
        snapshot,
        user,
        limit=size if user.collapsed is None else min(size, MOST_OF_LONG),
        allowed=allowed,
        excluded=np.concatenate([excluded, seen]),
        options=options,
        steering=steering,
    )
    reasons = explain(snapshot, user, fresh.rows, REASONS, options, partial=fresh.scores.partial)
    repeated = np.zeros_like(allowed)
    repeated[repeated_items(events, len(allowed))] = True
    again = recommend(
        snapshot,
        user,
        limit=limit,
        allowed=allowed & repeated,
        excluded=excluded,
        options=options,
        steering=steering,
    )
    return PersonalPool(fresh, reasons, again)


def showable_items(
    allowed: NDArray[np.bool_], events: EventColumns, excluded: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark the allowed items [N] that may be in a pool: new ones, and those that come back."""
    mask = allowed.copy()
    mask[events.items[events.items < len(mask)]] = False
    again = repeated_items(events, len(mask))
    mask[again] = allowed[again]
    mask[excluded] = False
    return mask


def liked_events(events: EventColumns, size: int) -> NDArray[np.int64]:
    """Return the places of events on the first `size` items that are not negative."""
    negative = np.array([name in NEGATIVE for name in events.type_names] or [False], np.bool_)
    is_liked = ~negative[events.types] & (events.rows >= 0) & (events.rows < size)
    return np.flatnonzero(is_liked)


def repeated_items(events: EventColumns, size: int) -> NDArray[np.int64]:
    """Return the rows of the items that were taken at two times or more."""
    places = liked_events(events, size)
    order = np.lexsort((events.timestamps[places], events.rows[places]))
    rows, times = events.rows[places][order], events.timestamps[places][order]
    another = (rows[1:] == rows[:-1]) & (times[1:] != times[:-1])
    return np.unique(rows[1:][another]).astype(np.int64)
