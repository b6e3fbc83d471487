"""Recommendations for one requester."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory
from models.ranking.recommend import Ranked, recommend
from models.ranking.steering import NO_STEERING, ItemSteering
from service.domain.queries import RecommendQuery
from service.domain.ready_queries import PopularQuery
from service.histories.event_columns import EventColumns


def recommend_items(
    query: RecommendQuery,
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    options: AttentionOptions,
    allowed: NDArray[np.bool_],
    steering: ItemSteering = NO_STEERING,
) -> Ranked:
    """Rank the best of the allowed items [N] for a requester, without the excluded ones.

    The memory is from `build_memory` with the same snapshot, the steering is the query's own.
    """
    return recommend(
        snapshot,
        user,
        limit=query.limit,
        allowed=allowed,
        excluded=excluded_rows(query, snapshot, events),
        diversity=query.diversity,
        options=options,
        steering=steering,
    )


def excluded_rows(
    query: RecommendQuery | PopularQuery, snapshot: Snapshot, events: EventColumns
) -> NDArray[np.int64]:
    """Return the rows that a query excludes, those of the requester's events where it says so."""
    excluded = snapshot.catalogue.rows(sorted(query.exclude)).astype(np.int64)
    if query.exclude_seen:
        excluded = np.concatenate([excluded, events.items])
    return excluded[(excluded >= 0) & (excluded < len(snapshot.catalogue))]
