"""Items taken after one, or at the same time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.event_log import EventLog, LoggedEvents, log_sizes, of_types
from models.data.import_times import at_import, lacks_order
from models.ranking.ready.popularity import best_rows
from models.ranking.ready.together import MIN_SUPPORT, Companions, companions
from models.ranking.similar_items import comparable, compare_items
from models.ranking.steering.ranked_lineup import line_up_ranked
from service.domain.item_selection import FilterWarning
from service.domain.queries import Answer, AnswerItem, Space
from service.domain.ready_queries import TogetherQuery
from service.engine.questions.score import item_row
from service.engine.selection.item_selection import ItemSelection, count_items
from service.engine.selection.steering import steer_items

_FEW_BASKETS = 1.5  # of a user on average, up to which nothing comes after them
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

    Events with the time of an import have no order and are no basket. If most events have it, or
    most users have one basket, what is taken by the same users counts. Items that follow are ranked
    by the transition counts of the trained model, where it has any of the item, else by those of
    the log; items of the same baskets by their significance.

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
    row = known_row(snapshot, log, query.item_id)
    allowed = selection.allowed.copy()
    allowed[row] = False

    def events_of(item: int) -> LoggedEvents:
        return _until(of_types(log.of_item(item), types), at)

    own = events_of(row)
    newest = np.argsort(-own.timestamps, kind="stable")
    users = own.users[newest]
    users = users[np.sort(np.unique(users, return_index=True)[1])][:MAX_USERS]
    events = _until(of_types(log.of_users(users), types), at)
    imported = at_import(events.timestamps, is_part=True)
    if not (is_unordered := lacks_order(imported)):
        events = events.take(~imported)
    of_users, baskets = log_sizes(events)
    is_unordered |= len(events.users) > baskets and baskets <= _FEW_BASKETS * of_users
    if query.relation == "after" and is_unordered:
        query = replace(query, relation="basket")
    trained = _trained_counts(snapshot, row) if query.relation == "after" else None
    if log.span is not None and log.span[1] > at:
        sizes = log_sizes(log.between(None, at))
    else:
        sizes = log.sizes
    found = companions(
        events,
        row,
        query.relation,
        groups=sizes[0] if query.relation == "after" else sizes[1],
        events_of=events_of,
        allowed=allowed if trained is None else allowed & (trained > 0),
    )
    scores = _scores(found, trained, query, len(catalogue))
    is_taken = np.zeros(len(catalogue), np.bool_)
    is_taken[found.rows] = True
    spaces: tuple[Space, ...] = ("content",) if catalogue.has_content[row] else ()
    is_similar = comparable(snapshot, row, allowed & ~is_taken, spaces)
    steered = steer_items(
        snapshot,
        query.steering,
        allowed=selection.allowed,
        limit=query.limit,
        comparable=is_taken | is_similar,
    )
    steering = steered.steering
    added = np.zeros(len(catalogue))
    if (boosts := steering.scaled(scores[found.rows]).boosts_of(found.rows)) is not None:
        added[found.rows] = boosts
    every = steering.reorders or len(steering.pins) > 0
    ranked = best_rows(
        scores + added,
        found.rows,
        len(found.rows) if every else query.limit,
        catalogue,
    )
    if (every or len(ranked) < query.limit) and is_similar.any():
        near = compare_items(snapshot, row, allowed=is_similar, spaces=spaces)
        scores[near.rows] = near.cosines_in("content")
        if (boosts := steering.scaled(scores[near.rows]).boosts_of(near.rows)) is not None:
            added[near.rows] = boosts
        order = near.rows[np.argsort(-(scores + added)[near.rows], kind="stable")]
        ranked = np.concatenate([ranked, order if every else order[: query.limit]])
    ranked = ranked[~np.isin(ranked, steering.pinned)]
    lineup = line_up_ranked(catalogue.fields, ranked, steering, limit=query.limit)
    items = _items(query, snapshot, found, lineup.rows, scores)
    if steering.boost is not None:
        for item, boost in zip(items, added[lineup.rows].tolist(), strict=True):
            item["score"] += boost
            item["parts"]["rules"] = boost
    answer = steered.describe(Answer(items, snapshot.version), lineup)
    counted = count_items(snapshot, is_taken, query.facets)
    if not items:
        empty = FilterWarning("/item_id", _why_empty(query, snapshot, row, len(own.users)))
        selection = selection.with_warnings((empty,))
    return selection.with_warnings(steered.warnings).described(answer, counted)


def _why_empty(query: TogetherQuery, snapshot: Snapshot, row: int, events: int) -> str:
    """Return why no item is taken with one, or similar to it by content."""
    catalogue = snapshot.catalogue
    takers = "users" if query.relation == "after" else "baskets"
    if not catalogue.present[row]:
        text = "it is not in the catalogue, and has no text to be compared by"
    elif not catalogue.has_content[row]:
        text = "it has no text to be compared by"
    else:
        text = "no such item has a text to compare with its own"
    return (
        f"no item that may be answered is taken with {query.item_id!r} ({events:,} events that "
        f"count) by {MIN_SUPPORT} {takers} or more and oftener than by chance; {text}"
    )


def known_row(snapshot: Snapshot, log: EventLog, item_id: str) -> int:
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
    query: TogetherQuery,
    snapshot: Snapshot,
    found: Companions,
    rows: NDArray[np.int64],
    scores: NDArray[np.float64],
) -> list[AnswerItem]:
    """Make the items of rows [L]: those that are taken with it, and others by their content."""
    catalogue = snapshot.catalogue
    part = "transitions" if query.relation == "after" else "significance"
    place_of = {row: place for place, row in enumerate(found.rows.tolist())}
    items: list[AnswerItem] = []
    columns = zip(
        rows.tolist(),
        catalogue.vocabulary.ids_of(rows.tolist()),
        scores[rows].tolist(),
        catalogue.titles.take(rows),
        strict=True,
    )
    for row, item_id, score, title in columns:
        item: AnswerItem = {"item_id": item_id, "score": score, "title": title}
        if (place := place_of.get(row)) is None:
            item |= {"parts": {"content": score}, "reason": "content"}
        else:
            item |= {
                "parts": {part: score},
                "reason": query.relation,
                "support": int(found.support[place]),
                "lift": float(found.lift[place]),
                "significance": float(found.significance[place]),
            }
        items.append(item)
    return items
