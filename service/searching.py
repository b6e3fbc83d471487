"""Search by text, re-ranked by the memory of whoever asks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.scoring import Attending, score
from models.search import personal_bias, search
from models.snapshot import Snapshot
from models.user_memory import UserMemory
from service.queries import Answer, AnsweredItem, SearchQuery

_PERSONAL = 200  # items found by text that a user's memory re-ranks


def search_items(
    query: SearchQuery,
    snapshot: Snapshot,
    user: UserMemory,
    text: NDArray[np.float32],
    *,
    allowed: NDArray[np.bool_],
    how: Attending,
) -> Answer:
    """The items that match a text best.

    Args:
        query: the request.
        snapshot: the catalogue.
        user: from `remember` with the same snapshot; an empty one re-ranks nothing.
        text: [D] what was asked for, encoded.
        allowed: bool [N], what may be answered.
        how: of the user's memory.
    """
    bias = None
    if len(user):
        near = search(snapshot, text, limit=max(_PERSONAL, query.limit), allowed=allowed)
        bias = personal_bias(snapshot, score(snapshot, user, near.rows, how), near.rows)
    found = search(
        snapshot,
        text,
        limit=query.limit,
        allowed=allowed,
        temperature=query.asker.temperature,
        hard=query.asker.hard,
        bias=bias,
    )
    catalogue = snapshot.catalogue
    items = tuple(
        AnsweredItem(
            catalogue.vocabulary.id(row),
            float(found.scores[place]),
            catalogue.titles[row],
            weight=float(found.weights[place]),
            matched=found.matched[place],
        )
        for place, row in enumerate(found.rows.tolist())
    )
    return Answer(items, snapshot.version, found.mode)
