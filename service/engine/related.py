"""Items that are like one, and items that are taken with one."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.data.event_log import LoggedEvents, log_sizes, of_types
from models.data.interactions import at_import, lacks_order
from models.ranking.event_counts import MIN_SUPPORT, Companions, best_rows, companions
from models.ranking.lineup import SteeredRows, line_up_ranked
from models.ranking.similar_items import comparable, compare_items, similar, spaces_of
from service.domain.errors import Invalid
from service.domain.timestamps import to_rfc3339
from service.engine.pipeline import Request, answer_of
from service.engine.selection import ItemSelection, count_items, steer_items
from service.questions.answers import (
    AnsweredItemOut,
    AnswerOut,
    ItemEventOut,
    ItemEventsOut,
    Space,
    WarningOut,
)
from service.questions.asked import SimilarIn, attention_options
from service.questions.ready import ItemEventsParams, TogetherIn, types_of

Relation = Literal["after", "basket"]

_LACKS: dict[Space, str] = {
    "content": "has neither a text nor an embedding",
    "trained": "was not in the training of the served model",
}
_FEW_BASKETS = 1.5  # of a user on average, up to which nothing comes after them
MAX_USERS = 2_000  # of one item whose histories are read, those who took it last


async def similar_items(request: Request[SimilarIn]) -> AnswerOut:
    """Find the items most similar to one, in the requested space or wherever it has a key.

    Nothing is similar to an item without any key, and a warning says so. Raises `NotFound`, and
    `Invalid` for an item that has no key in the requested space, but has one in another.
    """
    question = request.question
    await request.open_snapshot()
    pointer = question.filter_pointer
    selection = await request.select(question.filter, question.facets, pointer=pointer)
    answer = await request.compute(lambda: _similar(request, selection))
    await request.add_fields(answer["items"], question.fields)
    return request.finish(answer)


async def items_together(request: Request[TogetherIn]) -> AnswerOut:
    """Rank the items that are taken with one, and after these, similar ones by content.

    Events with the time of an import have no order and are no basket. If most events have it, or
    most users have one basket, what is taken by the same users counts. Items that follow are ranked
    by the transition counts of the trained model, where it has any of the item, else by those of
    the log; items of the same baskets by their significance.

    Raises `NotFound` where there is no such item.
    """
    question = request.question
    await request.open_log()
    selection = await request.select(question.filter, question.facets)
    answer = await request.compute(lambda: _together(request, selection), stage="count")
    await request.add_fields(answer["items"], question.fields)
    return request.finish(answer, with_log=True)


async def item_events(request: Request[ItemEventsParams]) -> ItemEventsOut:
    """Return the newest events of an item. Raises `NotFound`."""
    await request.open_log()
    own = request.log.of_item(known_row(request))
    newest = own.take(np.argsort(-own.timestamps, kind="stable")[: request.question.limit])
    with request.stages("store"):
        names = await request.parts.store.user_ids(newest.users.tolist())
    types = request.parts.event_log.loaded.types
    columns = zip(names, newest.types.tolist(), newest.timestamps.tolist(), strict=True)
    events: list[ItemEventOut] = [
        {"user_id": name, "type": types.id(code), "timestamp": to_rfc3339(time)}
        for name, code, time in columns
        if name is not None  # forgotten since the log was read
    ]
    degraded = request.is_degraded(with_log=True)
    return {"events": events, "total": len(own.users), "degraded": degraded}


# ------------------------------------------------------------------------------- similar


def _similar(request: Request[SimilarIn], selection: ItemSelection) -> AnswerOut:
    question, snapshot, item_id = request.question, request.snapshot, request.about
    catalogue, row = snapshot.catalogue, request.item_row(item_id)
    spaces = spaces_of(snapshot, row)
    if question.space != "both" and spaces:
        if question.space not in spaces:
            lacks = _LACKS[question.space]
            raise Invalid(
                "/space", f"must be {spaces[0]!r} or 'both' here: item {item_id!r} {lacks}"
            )
        spaces = (question.space,)
    others = None
    if question.facets or question.pin:
        others = comparable(snapshot, row, selection.allowed, spaces)
    steered = steer_items(
        question,
        snapshot,
        now=request.now,
        allowed=selection.allowed,
        shown=request.shown,
        comparable=others,
    )
    selection = selection.with_warnings(steered.warnings)
    if not spaces:
        detail = f"nothing is compared: item {item_id!r} {' and '.join(_LACKS.values())}"
        selection = selection.with_warnings((WarningOut(pointer="/item_id", detail=detail),))
    found = similar(
        snapshot,
        row,
        limit=question.limit,
        allowed=selection.allowed,
        spaces=spaces,
        steering=steered.steering,
        options=attention_options(question.retrieval, request.parts.settings),
    )
    items: list[AnsweredItemOut] = [
        {
            "item_id": catalogue.vocabulary.id(row),
            "score": float(found.scores[at]),
            "title": catalogue.titles[row],
            "parts": {"similarity": float(found.scores[at])},
            "weight": float(found.weights[at]),
            "spaces": {
                space: {"cosine": near.cosine, "share": near.share}
                for space, near in found.spaces[at].items()
            },
        }
        for at, row in enumerate(found.rows.tolist())
    ]
    if found.boosts is not None:
        for item, added in zip(items, found.boosts.tolist(), strict=True):
            item["score"] += added
            item["parts"]["rules"] = added
    answer = answer_of(
        snapshot,
        items,
        retrieval="coarse" if question.retrieval.mode == "coarse" else "exact",
        keys_attended=found.keys,
        mass=found.mass,
        spaces=[*spaces],
    )
    steered.describe(answer, SteeredRows(found.rows, found.moved))
    counted = None if others is None else count_items(snapshot, others, question.facets)
    selection.describe(answer, counted)
    return answer


# ------------------------------------------------------------------------------ together


def _together(request: Request[TogetherIn], selection: ItemSelection) -> AnswerOut:
    question, snapshot, log, at = request.question, request.snapshot, request.log, request.until
    types, unknown = request.counted_types(types_of(question.type))
    selection = selection.with_warnings(unknown)
    catalogue = snapshot.catalogue
    row = known_row(request)
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
    relation = question.relation
    if relation == "after" and is_unordered:
        relation = "basket"
    trained = _trained_counts(snapshot, row) if relation == "after" else None
    if log.span is not None and log.span[1] > at:
        sizes = log_sizes(log.between(None, at))
    else:
        sizes = log.sizes
    found = companions(
        events,
        row,
        relation,
        groups=sizes[0] if relation == "after" else sizes[1],
        events_of=events_of,
        allowed=allowed if trained is None else allowed & (trained > 0),
    )
    scores = trained
    if scores is None:
        scores = np.zeros(len(catalogue))
        scores[found.rows] = found.weights if relation == "after" else found.significance
    is_taken = np.zeros(len(catalogue), np.bool_)
    is_taken[found.rows] = True
    spaces: tuple[Space, ...] = ("content",) if catalogue.has_content[row] else ()
    is_similar = comparable(snapshot, row, allowed & ~is_taken, spaces)
    steered = steer_items(
        question,
        snapshot,
        now=request.now,
        allowed=selection.allowed,
        shown=request.shown,
        comparable=is_taken | is_similar,
    )
    steering = steered.steering
    added = np.zeros(len(catalogue))
    if (boosts := steering.scaled(scores[found.rows]).boosts_of(found.rows)) is not None:
        added[found.rows] = boosts
    every = steering.reorders or len(steering.pins) > 0
    most = len(found.rows) if every else question.limit
    ranked = best_rows(scores + added, found.rows, most, catalogue)
    if (every or len(ranked) < question.limit) and is_similar.any():
        near = compare_items(snapshot, row, allowed=is_similar, spaces=spaces)
        scores[near.rows] = near.cosines_in("content")
        if (boosts := steering.scaled(scores[near.rows]).boosts_of(near.rows)) is not None:
            added[near.rows] = boosts
        order = near.rows[np.argsort(-(scores + added)[near.rows], kind="stable")]
        ranked = np.concatenate([ranked, order if every else order[: question.limit]])
    ranked = ranked[~np.isin(ranked, steering.pinned)]
    lineup = line_up_ranked(catalogue.fields, ranked, steering, limit=question.limit)
    items = _items(relation, snapshot, found, lineup.rows, scores)
    if steering.boost is not None:
        for item, boost in zip(items, added[lineup.rows].tolist(), strict=True):
            item["score"] += boost
            item["parts"]["rules"] = boost
    answer = answer_of(snapshot, items)
    steered.describe(answer, lineup)
    if not items:
        detail = _why_empty(request, relation, row, len(own.users))
        selection = selection.with_warnings((WarningOut(pointer="/item_id", detail=detail),))
    selection = selection.with_warnings(steered.warnings)
    selection.describe(answer, count_items(snapshot, is_taken, question.facets))
    return answer


def _why_empty(request: Request[TogetherIn], relation: Relation, row: int, events: int) -> str:
    """Return why no item is taken with one, or similar to it by content."""
    catalogue = request.snapshot.catalogue
    takers = "users" if relation == "after" else "baskets"
    if not catalogue.present[row]:
        text = "it is not in the catalogue, and has no text to be compared by"
    elif not catalogue.has_content[row]:
        text = "it has no text to be compared by"
    else:
        text = "no such item has a text to compare with its own"
    return (
        f"no item that may be answered is taken with {request.about!r} ({events:,} events that "
        f"count) by {MIN_SUPPORT} {takers} or more and oftener than by chance; {text}"
    )


def known_row(request: Request[Any]) -> int:
    """Return the row of an item with events or with a vector. Raises `NotFound`."""
    catalogue = request.snapshot.catalogue
    row = catalogue.row(request.about)
    if row >= 0 and not catalogue.deleted[row] and len(request.log.of_item(row).users):
        return row
    return request.item_row(request.about)


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


def _items(
    relation: Relation,
    snapshot: Snapshot,
    found: Companions,
    rows: NDArray[np.int64],
    scores: NDArray[np.float64],
) -> list[AnsweredItemOut]:
    """Make the items of rows [L]: those that are taken with it, and others by their content."""
    catalogue = snapshot.catalogue
    part = "transitions" if relation == "after" else "significance"
    place_of = {row: place for place, row in enumerate(found.rows.tolist())}
    items: list[AnsweredItemOut] = []
    columns = zip(
        rows.tolist(),
        catalogue.vocabulary.ids_of(rows.tolist()),
        scores[rows].tolist(),
        catalogue.titles.take(rows),
        strict=True,
    )
    for row, item_id, score, title in columns:
        item: AnsweredItemOut = {"item_id": item_id, "score": score, "title": title}
        if (place := place_of.get(row)) is None:
            item |= {"parts": {"content": score}, "reason": "content"}
        else:
            item |= {
                "parts": {part: score},
                "reason": relation,
                "support": int(found.support[place]),
                "lift": float(found.lift[place]),
                "significance": float(found.significance[place]),
            }
        items.append(item)
    return items
