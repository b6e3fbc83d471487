"""Search of a requester's own history: the events on the items that match a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.ranking.matches import DEFAULTS, SearchParameters
from models.ranking.search import EventResults, search_events
from models.text.query_parser import ParsedQuery
from service.domain.queries import Answer, AnswerEvent, SearchQuery
from service.engine.questions.search import describe_query, match_text
from service.histories.event_columns import EventColumns, visible_events


class HistoryOutcome(NamedTuple):
    """Events found by a text."""

    found: EventResults
    sources: list[int]  # [L] their places in the columns
    parsed: ParsedQuery | None  # the query; None without a BM25 index


def search_history(
    query: SearchQuery,
    snapshot: Snapshot,
    events: EventColumns,
    encode: Callable[[str], NDArray[np.float32]],
    *,
    at: int,
    allowed: NDArray[np.bool_],
    options: AttentionOptions,
    parameters: SearchParameters = DEFAULTS,
) -> HistoryOutcome:
    """Rank the visible events on allowed items [N]; `at` is the time of the request.

    The other arguments are those of `search_items`.
    """
    # Items that the catalogue does not know yet, at -1 or behind its end, are not allowed.
    known = np.append(allowed, False)
    may = known[np.where(events.rows < len(allowed), events.rows, -1)]
    visible = visible_events(snapshot, events, query.requester.visible)
    places = np.flatnonzero(may if visible is None else may & visible)
    rows = events.rows[places].astype(np.int64)
    own = np.zeros_like(allowed)
    own[rows] = True
    parsed, matches = match_text(
        query.query,
        snapshot,
        encode,
        allowed=own,
        options=options,
        parameters=parameters,
        depth=query.limit,
    )
    found = search_events(
        matches,
        rows,
        at - events.timestamps[places],
        limit=query.limit,
        fill=query.fill,
        min_score=query.min_score,
    )
    return HistoryOutcome(found, places[found.events].tolist(), parsed)


def history_answer(
    query: SearchQuery,
    snapshot: Snapshot,
    events: EventColumns,
    outcome: HistoryOutcome,
    event_ids: Sequence[str],
) -> Answer:
    """Make the answer, whose items are `AnswerEvent`s; `event_ids` are those of the sources."""
    found, sources = outcome.found, outcome.sources
    rows = found.items.rows[found.places]
    columns = zip(
        event_ids,
        snapshot.catalogue.vocabulary.ids_of(rows.tolist()),
        snapshot.catalogue.titles.take(rows),
        events.types[sources].tolist(),
        events.timestamps[sources].tolist(),
        found.match.tolist(),
        found.recency.tolist(),
        found.weights.tolist(),
        found.places.tolist(),
        strict=True,
    )
    named: list[AnswerEvent] = [
        {
            "event_id": event_id or None,
            "item_id": item_id,
            "title": title,
            "type": events.type_names[code],
            "timestamp": timestamp,
            "score": match + recency,
            "parts": {"match": match, "recency": recency},
            "weight": weight,
            "matched": found.items.matched[place],
        }
        for event_id, item_id, title, code, timestamp, match, recency, weight, place in columns
    ]
    answer = Answer(
        named,
        snapshot.version,
        found.items.mode,
        keys_attended=found.items.keys,
        mass=found.items.mass,
    )
    return describe_query(answer, query, outcome.parsed, found=bool(named))
