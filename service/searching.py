"""Search by text, re-ranked by the memory of whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.scoring import Attending, Scores, score
from models.search import Found, match, nearest, personal_bias, search
from models.snapshot import Snapshot
from models.user_memory import UserMemory
from service.queries import Answer, AnsweredItem, SearchQuery

_PERSONAL = 200  # items found by text that a user's memory re-ranks


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What a text found, and how the asker's memory scored those items that it re-ranked."""

    found: Found
    scores: Scores  # of [P] items; of none without a memory
    places: NDArray[np.int64]  # [L] of the items found among those, -1 = not re-ranked


def search_items(
    query: SearchQuery,
    snapshot: Snapshot,
    user: UserMemory,
    text: NDArray[np.float32],
    *,
    allowed: NDArray[np.bool_],
    how: Attending,
) -> Searched:
    """The items that match a text best.

    Args:
        query: the request.
        snapshot: the catalogue.
        user: from `remember` with the same snapshot; an empty one re-ranks nothing.
        text: [D] what was asked for, encoded.
        allowed: bool [N], what may be answered.
        how: the field keys are attended, and the user's memory.
    """
    matches = match(snapshot, text, allowed=allowed, how=how)
    near = nearest(matches, max(_PERSONAL, query.limit)) if len(user) else np.zeros(0, np.int64)
    scores = score(snapshot, user, near, how)
    personal = personal_bias(snapshot, scores, near) if len(user) else None
    found = search(matches, limit=query.limit, personal=personal)
    place_of = {row: place for place, row in enumerate(near.tolist())}
    places = [place_of.get(row, -1) for row in found.rows.tolist()]
    return Searched(found, scores, np.array(places, np.int64))


def found_answer(snapshot: Snapshot, searched: Searched) -> Answer:
    """The answer to a search."""
    found, scores, catalogue = searched.found, searched.scores, snapshot.catalogue
    masses = scores.mass.tolist()
    items = tuple(
        AnsweredItem(
            catalogue.vocabulary.id(row),
            float(found.scores[at]),
            catalogue.titles[row],
            weight=float(found.weights[at]),
            matched=found.matched[at],
            mass=masses[place] if place >= 0 else None,
        )
        for at, (row, place) in enumerate(
            zip(found.rows.tolist(), searched.places.tolist(), strict=True)
        )
    )
    coarse = "coarse" in {found.mode, scores.mode}
    return Answer(
        items,
        snapshot.version,
        "coarse" if coarse else "exact",
        keys=found.keys,
        mass=found.mass,
    )
