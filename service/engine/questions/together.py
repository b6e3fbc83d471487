"""Items taken after one, or at the same time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog, LoggedEvents, log_sizes, of_types
from models.ranking.ready.popularity import best_rows
from models.ranking.ready.together import Companions, companions
from models.ranking.similar_items import similar
from service.domain.queries import Answer, AnswerItem
from service.domain.ready_queries import TogetherQuery
from service.engine.questions.score import item_row
from service.engine.selection.item_selection import ItemSelection

MAX_USERS = 2_000  # of one item whose histories are read, those who took it last


def together(
    query: TogetherQuery,
    snapshot: Snapshot,
    log: EventLog,
    types: NDArray[np.integer],
    selection: ItemSelection,
    at: int,
) -> Answer:
    """Rank the items that are taken with one, and after these, similar ones by content.

    Items that follow are ranked by the transition counts of the trained model, where it has any of
    the item, else by those of the log; items of the same baskets by their significance.

    Args:
        query: the request.
        snapshot: the model and the catalogue.
        log: all events.
        types: codes of the event types that count.
        selection: of the items that may be answered.
        at: the time of the request, microseconds UTC.

    Raises `NotFound` where there is no such item.
    """
    catalogue = snapshot.catalogue
    row = _known_row(snapshot, log, query.item_id)
    allowed = selection.allowed.copy()
    allowed[row] = False

    def events_of(item: int) -> LoggedEvents:
        return _until(of_types(log.of_item(item), types), at)

    trained = _trained_counts(snapshot, row) if query.relation == "after" else None
    own = events_of(row)
    newest = np.argsort(-own.timestamps, kind="stable")
    users = own.users[newest]
    users = users[np.sort(np.unique(users, return_index=True)[1])][:MAX_USERS]
    if log.span is not None and log.span[1] > at:
        sizes = log_sizes(log.between(None, at))
    else:
        sizes = log.sizes
    found = companions(
        _until(of_types(log.of_users(users), types), at),
        row,
        query.relation,
        groups=sizes[0] if query.relation == "after" else sizes[1],
        events_of=events_of,
        allowed=allowed if trained is None else allowed & (trained > 0),
    )
    scores = _scores(found, trained, query, len(catalogue))
    rows = best_rows(scores, found.rows, query.limit, catalogue)
    places = {item: place for place, item in enumerate(found.rows.tolist())}
    kept = found.take(np.array([places[item] for item in rows.tolist()], np.int64))
    items = _items(query, snapshot, kept, scores)
    allowed[rows] = False
    return selection.described(
        Answer([*items, *_similar(query, snapshot, row, allowed, len(items))], snapshot.version)
    )


def _known_row(snapshot: Snapshot, log: EventLog, item_id: str) -> int:
    """Return the row of an item with events or with a vector. Raises `NotFound`."""
    row = snapshot.catalogue.row(item_id)
    if row >= 0 and not snapshot.catalogue.deleted[row] and len(log.of_item(row).users):
        return row
    return item_row(snapshot, item_id)


def _until(events: LoggedEvents, at: int) -> LoggedEvents:
    return events.take(events.timestamps <= at)


def _trained_counts(snapshot: Snapshot, row: int) -> NDArray[np.float64] | None:
    """Return the model's counts of what follows an item, [N]; None where it has none."""
    known = int(snapshot.trained_rows[row])
    if known < 0 or not snapshot.model.has_transitions:
        return None
    counted = snapshot.model.statistics.transition_counts
    follows = counted.counts[known] > 0
    if not bool(follows.any()):
        return None
    # One place more, for items that are not trained: row -1.
    of_trained = np.zeros(len(counted.items) + 1)
    of_trained[counted.items[known][follows].numpy()] = counted.counts[known][follows].numpy()
    of_items: NDArray[np.float64] = of_trained[snapshot.trained_rows.numpy()]
    return of_items


def _scores(
    found: Companions, trained: NDArray[np.float64] | None, query: TogetherQuery, size: int
) -> NDArray[np.float64]:
    """Return what items are ranked by, [N]."""
    if trained is not None:
        return trained
    scores = np.zeros(size)
    scores[found.rows] = found.weights if query.relation == "after" else found.significance
    return scores


def _items(
    query: TogetherQuery, snapshot: Snapshot, found: Companions, scores: NDArray[np.float64]
) -> list[AnswerItem]:
    catalogue = snapshot.catalogue
    columns = zip(
        catalogue.vocabulary.ids_of(found.rows.tolist()),
        scores[found.rows].tolist(),
        catalogue.titles.take(found.rows),
        found.support.tolist(),
        found.lift.tolist(),
        found.significance.tolist(),
        strict=True,
    )
    part = "transitions" if query.relation == "after" else "significance"
    return [
        {
            "item_id": item_id,
            "score": score,
            "title": title,
            "parts": {part: score},
            "reason": query.relation,
            "support": support,
            "lift": lift,
            "significance": significance,
        }
        for item_id, score, title, support, lift, significance in columns
    ]


def _similar(
    query: TogetherQuery, snapshot: Snapshot, row: int, allowed: NDArray[np.bool_], taken: int
) -> list[AnswerItem]:
    """Return items of similar content for the places that are left."""
    if taken >= query.limit or not snapshot.catalogue.has_content[row]:
        return []
    near = similar(snapshot, row, limit=query.limit - taken, allowed=allowed, spaces=("content",))
    cosines = [spaces["content"].cosine for spaces in near.spaces]
    return [
        {
            "item_id": snapshot.catalogue.vocabulary.id(item),
            "score": cosine,
            "title": snapshot.catalogue.titles[item],
            "parts": {"content": cosine},
            "reason": "content",
        }
        for item, cosine in zip(near.rows.tolist(), cosines, strict=True)
    ]
