"""Popular, trending, newest and best rated items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import NEVER
from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog, LoggedEvents, of_types
from models.ranking.event_counts import (
    PopularityScores,
    appeared,
    best_rows,
    item_counts,
    popular,
    rated,
    trending,
    unlike_ratings,
)
from models.ranking.lineup import line_up_ranked
from service.domain.item_selection import FilterWarning
from service.domain.queries import Answer, AnswerItem
from service.domain.ready_queries import TREND_FLOOR, TREND_HALF_LIFE, TREND_WINDOW, PopularQuery
from service.domain.timestamps import to_rfc3339
from service.engine.selection.item_selection import ItemSelection, count_items
from service.engine.selection.steering import SteeredItems

AHEAD = 7 * 86_400_000_000  # microseconds by which another machine's clock may be ahead


def popular_items(
    query: PopularQuery,
    snapshot: Snapshot,
    log: EventLog,
    types: NDArray[np.integer],
    selection: ItemSelection,
    steered: SteeredItems,
    excluded: NDArray[np.int64],
    at: int,
) -> Answer:
    """Rank the items that were taken, published or rated as the query says.

    Args:
        query: the request.
        snapshot: the catalogue.
        log: all events.
        types: codes of the event types that count.
        selection: of the items that may be answered.
        steered: by the question, over the same catalogue.
        excluded: item rows that may not be answered.
        at: the time of the request, microseconds UTC.
    """
    ranked, is_ranked, doubts = _ranked(query, snapshot, log, types, at)
    mask = selection.allowed & is_ranked
    steering = steered.steering.scaled(ranked.scores[mask])
    mask[excluded] = False
    if steering.boost is not None:
        ranked.parts["rules"] = steering.boost.astype(np.float64)
    scores = ranked.scores
    order = mask.copy()
    order[steering.pinned] = False
    most = int(np.count_nonzero(order)) if steering.reorders else query.limit
    best = best_rows(scores, np.flatnonzero(order), most, snapshot.catalogue)
    lineup = line_up_ranked(snapshot.catalogue.fields, best, steering, limit=query.limit)
    rows = lineup.rows
    parts = {name: numbers[rows].tolist() for name, numbers in ranked.parts.items()}
    items: list[AnswerItem] = [
        {
            "item_id": item_id,
            "score": score,
            "title": title,
            "parts": {name: numbers[place] for name, numbers in parts.items()},
            "reason": query.by,
            "events": events,
        }
        for place, (item_id, score, title, events) in enumerate(
            zip(
                snapshot.catalogue.vocabulary.ids_of(rows.tolist()),
                scores[rows].tolist(),
                snapshot.catalogue.titles.take(rows),
                ranked.events[rows].tolist(),
                strict=True,
            )
        )
    ]
    answer = selection.described(
        steered.describe(Answer(items, snapshot.version), lineup),
        count_items(snapshot, mask, query.facets),
    )
    warnings = (*(answer.warnings or ()), *(doubts if items else _warnings(query, log, at)))
    return replace(answer, warnings=warnings or None)


def _ranked(
    query: PopularQuery, snapshot: Snapshot, log: EventLog, types: NDArray[np.integer], at: int
) -> tuple[PopularityScores, NDArray[np.bool_], tuple[FilterWarning, ...]]:
    """Return scores of N items, the items that are ranked by them [N], and what makes them odd."""
    size = len(snapshot.catalogue)
    if query.by == "newest":
        events = _counted(query, log, types, at, None)
        times = appeared(snapshot.catalogue, events)
        ranked = PopularityScores(item_counts(events, size), {"appeared": times / 1e6})
        since = NEVER if query.window is None else at - query.window
        return ranked, (times > since) & (times <= at), ()
    window = query.window
    if query.by == "trending" and window is None:
        window = TREND_WINDOW
    events = _counted(query, log, types, at, None if window is None else at - window)
    if query.by == "trending":
        half_life = TREND_HALF_LIFE if query.half_life is None else query.half_life
        # The past of a young log is as long as the log.
        began = at if log.span is None else log.span[0]
        ranked = trending(
            events, size, at=at, half_life=half_life, span=min(window or 0, at - began)
        )
        return ranked, ranked.scores > TREND_FLOOR, ()
    if query.by == "rated":
        ranked, doubts = rated(events, size), _rating_warnings(events)
    else:
        ranked, doubts = popular(events, size, at=at, half_life=query.half_life), ()
    return ranked, ranked.events > 0, doubts


def _counted(
    query: PopularQuery, log: EventLog, types: NDArray[np.integer], at: int, since: int | None
) -> LoggedEvents:
    """Return the events that count, none of them later than the request.

    Without a time in the query, all events count, since the clock of a client or another machine
    may be ahead; one ahead of the clock counts as one of now. If ages count, an event more than
    `AHEAD` ahead waits for its time.
    """
    until: int | None = at
    if query.requester.at is None and log.span is not None and log.span[1] > at:
        has_ages = since is not None or query.half_life is not None or query.by == "newest"
        until = at + AHEAD if has_ages else None
    events = of_types(log.between(since, until), types)
    if until == at:
        return events
    return events._replace(timestamps=np.minimum(events.timestamps, at))


def _rating_warnings(events: LoggedEvents) -> tuple[FilterWarning, ...]:
    """Return what an answer says whose events have weights that cannot be ratings."""
    reason = unlike_ratings(events)
    if reason is None:
        return ()
    least, most = float(events.weights.min()), float(events.weights.max())
    found = {
        "equal": f"all weights are {most:g}, so that every item has the same mean",
        "outliers": f"the weights, {least:g} to {most:g}, look like quantities: fewer than 1 % are "
        "in the upper half of that range",
        "values": f"the weights, {least:g} to {most:g}, look like prices or quantities: they have "
        "more values than a scale has steps",
    }[reason]
    detail = (
        f"{found}; the best rated items are those of the highest mean weight, and `type` names "
    )
    return (FilterWarning("/by", f"{detail}the events that are ratings"),)


def _warnings(query: PopularQuery, log: EventLog, at: int) -> tuple[FilterWarning, ...]:
    """Return what an answer without items says where all events are older than it looks."""
    window = TREND_WINDOW if query.by == "trending" else query.window
    if query.window is not None:
        window = query.window
    if query.by == "newest" or window is None:
        return ()
    times = log.between(None, at).timestamps  # a later event is not answered either
    newest = int(times.max(initial=NEVER))
    if newest == NEVER or newest > at - window:
        return ()
    detail = (
        f"no event is that new: the newest is of {to_rfc3339(newest)}; `at` asks as of another time"
    )
    return (FilterWarning("/window" if query.window is not None else "/at", detail),)
