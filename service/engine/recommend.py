"""Recommendations for one requester."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from models.catalogue.item_filter import ItemFilter
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.recommend import Ranked, recommend
from service.domain.queries import Filter, RecommendQuery
from service.histories.event_columns import EventColumns


def recommend_items(
    query: RecommendQuery,
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    options: AttentionOptions,
) -> Ranked:
    """Rank the best items for a requester; without those of their events where the query says so.

    The memory is from `build_memory` with the same snapshot.
    """
    excluded = snapshot.catalogue.rows(sorted(query.exclude)).astype(np.int64)
    if query.exclude_seen:
        excluded = np.concatenate([excluded, events.items])
    return recommend(
        snapshot,
        user,
        limit=query.limit,
        allowed=allowed_items(snapshot, query.filter),
        excluded=excluded[(excluded >= 0) & (excluded < len(snapshot.catalogue))],
        diversity=query.diversity,
        options=options,
    )


def allowed_items(snapshot: Snapshot, wanted: Filter) -> NDArray[np.bool_]:
    """Mark the items that pass a filter, bool [N]."""
    if wanted == Filter():
        return snapshot.catalogue.servable
    conditions = {each.name: getattr(wanted, each.name) for each in fields(wanted)}
    return snapshot.catalogue.allowed(ItemFilter(**conditions))
