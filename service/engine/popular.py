"""Items ranked by the events of everybody: popular, trending, newest or best rated ones."""

from __future__ import annotations

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
from service.domain.timestamps import to_rfc3339
from service.engine.pipeline import Request, answer_of
from service.engine.selection import ItemSelection, SteeredItems, count_items, warn
from service.questions.answers import AnsweredItemOut, AnswerOut, WarningOut
from service.questions.ready import TREND_FLOOR, TREND_HALF_LIFE, TREND_WINDOW, PopularIn, types_of

AHEAD = 7 * 86_400_000_000  # microseconds by which another machine's clock may be ahead


async def answer_popular(request: Request[PopularIn]) -> AnswerOut:
    """Rank items by the events of everybody."""
    question = request.question
    if question.exclude_seen and question.user_id is not None:
        with request.stages("store"):
            request.events = await request.load(question.user_id)
    await request.open_log()
    selection = await request.select(question.filter, question.facets)
    selection, steered = await request.steer(question, selection)
    types, unknown = request.counted_types(types_of(question.type))

    def rank() -> AnswerOut:
        excluded = request.excluded_rows(question.exclude, seen=question.exclude_seen)
        return popular_items(
            question,
            request.snapshot,
            request.log,
            types,
            selection=selection.with_warnings(unknown),
            steered=steered,
            excluded=excluded,
            at=request.now,
        )

    answer = await request.compute(rank, stage="count")
    await request.add_fields(answer["items"], question.fields)
    return request.finish(answer, with_log=True)


def popular_items(
    question: PopularIn,
    snapshot: Snapshot,
    log: EventLog,
    types: NDArray[np.integer],
    *,
    selection: ItemSelection,
    steered: SteeredItems,
    excluded: NDArray[np.int64],
    at: int,
) -> AnswerOut:
    """Rank the items that were taken, published or rated as the question says.

    `types` are codes of the event types that count, `excluded` item rows that may not be answered,
    and `at` is the time of the request, microseconds UTC.
    """
    ranked, is_ranked, doubts = _ranked(question, snapshot, log, types, at)
    mask = selection.allowed & is_ranked
    steering = steered.steering.scaled(ranked.scores[mask])
    mask[excluded] = False
    if steering.boost is not None:
        ranked.parts["rules"] = steering.boost.astype(np.float64)
    scores = ranked.scores
    order = mask.copy()
    order[steering.pinned] = False
    most = int(np.count_nonzero(order)) if steering.reorders else question.limit
    best = best_rows(scores, np.flatnonzero(order), most, snapshot.catalogue)
    lineup = line_up_ranked(snapshot.catalogue.fields, best, steering, limit=question.limit)
    rows = lineup.rows
    parts = {name: numbers[rows].tolist() for name, numbers in ranked.parts.items()}
    items: list[AnsweredItemOut] = [
        {
            "item_id": item_id,
            "score": score,
            "title": title,
            "parts": {name: numbers[place] for name, numbers in parts.items()},
            "reason": question.by,
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
    answer = answer_of(snapshot, items)
    steered.describe(answer, lineup)
    selection.describe(answer, count_items(snapshot, mask, question.facets))
    warn(answer, doubts if items else _warnings(question, log, at))
    return answer


def _ranked(
    question: PopularIn, snapshot: Snapshot, log: EventLog, types: NDArray[np.integer], at: int
) -> tuple[PopularityScores, NDArray[np.bool_], tuple[WarningOut, ...]]:
    """Return scores of N items, the items that are ranked by them [N], and what makes them odd."""
    size = len(snapshot.catalogue)
    if question.by == "newest":
        events = _counted(question, log, types, at, None)
        times = appeared(snapshot.catalogue, events)
        ranked = PopularityScores(item_counts(events, size), {"appeared": times / 1e6})
        since = NEVER if question.window is None else at - question.window
        return ranked, (times > since) & (times <= at), ()
    window = question.window
    if question.by == "trending" and window is None:
        window = TREND_WINDOW
    events = _counted(question, log, types, at, None if window is None else at - window)
    if question.by == "trending":
        half_life = TREND_HALF_LIFE if question.half_life is None else question.half_life
        # The past of a young log is as long as the log.
        began = at if log.span is None else log.span[0]
        ranked = trending(
            events, size, at=at, half_life=half_life, span=min(window or 0, at - began)
        )
        return ranked, ranked.scores > TREND_FLOOR, ()
    if question.by == "rated":
        ranked, doubts = rated(events, size), _rating_warnings(events)
    else:
        ranked, doubts = popular(events, size, at=at, half_life=question.half_life), ()
    return ranked, ranked.events > 0, doubts


def _counted(
    question: PopularIn, log: EventLog, types: NDArray[np.integer], at: int, since: int | None
) -> LoggedEvents:
    """Return the events that count, none of them later than the request.

    Without a time in the question, all events count, since the clock of a client or another machine
    may be ahead; one ahead of the clock counts as one of now. If ages count, an event more than
    `AHEAD` ahead waits for its time.
    """
    until: int | None = at
    if question.at is None and log.span is not None and log.span[1] > at:
        has_ages = since is not None or question.half_life is not None or question.by == "newest"
        until = at + AHEAD if has_ages else None
    events = of_types(log.between(since, until), types)
    if until == at:
        return events
    return events._replace(timestamps=np.minimum(events.timestamps, at))


def _rating_warnings(events: LoggedEvents) -> tuple[WarningOut, ...]:
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
    return (WarningOut(pointer="/by", detail=f"{detail}the events that are ratings"),)


def _warnings(question: PopularIn, log: EventLog, at: int) -> tuple[WarningOut, ...]:
    """Return what an answer without items says where all events are older than it looks."""
    window = TREND_WINDOW if question.by == "trending" else question.window
    if question.window is not None:
        window = question.window
    if question.by == "newest" or window is None:
        return ()
    times = log.between(None, at).timestamps  # a later event is not answered either
    newest = int(times.max(initial=NEVER))
    if newest == NEVER or newest > at - window:
        return ()
    detail = (
        f"no event is that new: the newest is of {to_rfc3339(newest)}; `at` asks as of another time"
    )
    pointer = "/window" if question.window is not None else "/at"
    return (WarningOut(pointer=pointer, detail=detail),)
