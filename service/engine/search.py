"""Search by words and by meaning, re-ranked by the memory of whoever asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import DEFAULT_OPTIONS, AttentionOptions
from models.history.user_memory import UserMemory
from models.ranking.explain import Reason
from models.ranking.scoring import Scores, score
from models.ranking.search import Found, Matches, match, nearest, personal_bias, search
from models.ranking.search_parameters import DEFAULTS, SearchParameters
from models.text.bm25 import Hits, ParsedQuery
from service.domain.queries import Answer, AnswerItem, Contribution, Requester, SearchQuery
from service.engine.explain import reasons_of

PERSONAL = 200  # items found by text that a user's memory re-ranks
HITS = 500  # items that the words of a query find at most

# Words and nearest keys of many items take milliseconds each, and both let go of the interpreter.
_WORDS = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="heed-words")


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What a text found, and how the requester's memory scored those items that it re-ranked."""

    found: Found
    reading: ParsedQuery | None  # of the query; None where no words are kept
    scores: Scores  # of [P] items; of none without a memory
    places: Sequence[int]  # [L] of the items found among those, -1 = not re-ranked
    reasons: Sequence[Sequence[Reason]]  # of each item found, if they were asked for


def search_items(
    query: SearchQuery,
    snapshot: Snapshot,
    user: UserMemory,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions,
    parameters: SearchParameters = DEFAULTS,
) -> Searched:
    """The items that match a text best.

    Args:
        query: the request.
        snapshot: the catalogue.
        user: from `build_memory` with the same snapshot; an empty one re-ranks nothing.
        encode: what was asked for to its vector [D].
        allowed: bool [N], what may be answered.
        options: both are attended, the field keys and the user's memory.
        parameters: what a match is worth.
    """
    reading, matches = matched(
        query.query, snapshot, encode, allowed=allowed, options=options, parameters=parameters
    )
    near, scores = remembered(snapshot, user, matches, query.limit, options=options)
    personal = personal_bias(snapshot, scores, near, query.personal_weight) if len(user) else None
    found = search(matches, limit=query.limit, personal=personal)
    place_of = {row: place for place, row in enumerate(near.tolist())}
    places = [place_of.get(row, -1) for row in found.rows.tolist()]
    reasons = reasons_of(
        snapshot,
        user,
        found.rows,
        scores,
        options=options,
        requester=query.requester,
        places=places,
    )
    return Searched(found, reading, scores, places, reasons)


def remembered(
    snapshot: Snapshot,
    user: UserMemory,
    matches: Matches,
    limit: int,
    *,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> tuple[NDArray[np.int64], Scores]:
    """The item rows [P] that the requester's memory re-ranks, and its scores of them.

    Args:
        snapshot: the catalogue.
        user: from `build_memory` with the same snapshot; an empty one re-ranks nothing.
        matches: from `matched`.
        limit: how many items are wanted.
        options: the softmax and the retrieval of rows.
    """
    near = nearest(matches, max(PERSONAL, limit)) if len(user) else np.zeros(0, np.int64)
    return near, score(snapshot, user, near, options)


def matched(
    text: str,
    snapshot: Snapshot,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    allowed: NDArray[np.bool_],
    options: AttentionOptions = DEFAULT_OPTIONS,
    parameters: SearchParameters = DEFAULTS,
) -> tuple[ParsedQuery | None, Matches]:
    """A text read by both heads: as it was understood, and beside the keys that may matter.

    The arguments are those of `search_items`.
    """
    words, reading = snapshot.catalogue.bm25_index, None
    hits: Hits | Callable[[], Hits] | None = None
    if words is not None:
        reading = words.read(text)
        text = reading.text
        allowed = _held(words.holding(reading), allowed)
        if snapshot.key_index is None:
            hits = words.search(reading, HITS, allowed)
        else:
            hits = _WORDS.submit(words.search, reading, HITS, allowed).result
    vector = encode(text.strip())
    return reading, match(
        snapshot, vector, allowed=allowed, options=options, hits=hits, parameters=parameters
    )


def _held(rows: NDArray[np.int64] | None, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What may be answered, where only these rows may; None = any."""
    if rows is None:
        return allowed
    held = np.zeros_like(allowed)
    held[rows] = allowed[rows]
    return held


def found_answer(
    requester: Requester,
    snapshot: Snapshot,
    searched: Searched,
    named: Sequence[tuple[Contribution, ...]],
) -> Answer:
    """The answer to a search.

    Args:
        requester: who asked; without a user or a history there is nobody to explain by.
        snapshot: the catalogue.
        searched: what was found.
        named: the reasons, with names.
    """
    found, scores, catalogue = searched.found, searched.scores, snapshot.catalogue
    masses = scores.mass.tolist()
    items: list[AnswerItem] = [
        {
            "item_id": item_id,
            "score": worth,
            "title": title,
            "weight": weight,
            "matched": by_field,
        }
        for item_id, worth, title, weight, by_field in zip(
            catalogue.vocabulary.ids_of(found.rows.tolist()),
            found.scores.tolist(),
            catalogue.titles.take(found.rows),
            found.weights.tolist(),
            found.matched,
            strict=True,
        )
    ]
    for item, place in zip(items, searched.places, strict=True):
        if place >= 0:
            item["mass"] = masses[place]
    if requester.explain and (requester.user_id is not None or requester.history is not None):
        for item, explanation in zip(items, named, strict=True):
            item["explanation"] = explanation
    coarse = "coarse" in {found.mode, scores.mode}
    return Answer(
        items,
        snapshot.version,
        "coarse" if coarse else "exact",
        keys_attended=found.keys,
        mass=found.mass,
        corrections={} if searched.reading is None else searched.reading.corrections,
    )
