"""Reasons of the scores of an answer's items: the events of one item and type are one reason.

Users take items again and again. Where each event were a reason of its own, the few that are named
would often be of one item; the foremost items are chosen instead, by what their events add up to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from models.ranking.explanation import Effects, Reason, explain, scores_without
from models.ranking.scoring import Scores, score
from service.domain.queries import Requester
from service.engine.questions.score import ItemRows
from service.histories.event_columns import EventColumns

_SPARE = 8  # events beyond twice as many as reasons that are looked at for events of one item
_MOST_OF_LONG = 2_000  # events of a long history that are looked at, each of which is costly

_Key = tuple[int, int]  # row and type of the item's events; -1 and the entry of a profile


def explain_items(
    snapshot: Snapshot,
    user: UserMemory,
    rows: ItemRows,
    scores: Scores,
    *,
    options: AttentionOptions,
    requester: Requester,
    events: EventColumns,
    places: Sequence[int] | None = None,
) -> list[list[Reason]]:
    """Explain the scores of items by the events that contribute most; [] without `explain`.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        rows: item rows [L].
        scores: of these rows, or of more.
        options: as the scores were made.
        requester: says how many reasons of each item, and how exact their effects.
        events: of the memory.
        places: [L] of the rows among the scores, -1 = not scored, which has no reasons; by default
            in order.
    """
    if not requester.explain:
        return []
    where = np.arange(len(rows)) if places is None else np.asarray(places)
    scored = np.flatnonzero(where >= 0)
    partial = scores.partial
    if partial is not None:
        among = torch.from_numpy(where[scored])
        partial = PartialSoftmax(*(part[:, among] for part in partial))
    effects: Effects = "none"
    if requester.explain_effects or requester.explain_exact:
        effects = "exact" if requester.explain_exact else "estimate"
    found = foremost_reasons(
        snapshot,
        user,
        events,
        rows[scored],
        requester.explain,
        options,
        partial=partial,
        effects=effects,
    )
    reasons: list[list[Reason]] = [[] for _ in rows]
    for place, each in zip(scored.tolist(), found, strict=True):
        reasons[place] = each
    return reasons


def foremost_reasons(
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    rows: NDArray[np.integer],
    top: int,
    options: AttentionOptions,
    *,
    partial: PartialSoftmax | None = None,
    effects: Effects = "none",
) -> list[list[Reason]]:
    """Return the reasons of the `top` items and types whose events raise each score most.

    Events that are far from the foremost are not looked at, so that an item's may not all be there.
    The events of one item and type are still reasons of their own, which
    `service.engine.explanation.naming.merge_events` puts together. Their effects add up to the
    effect of all of them, where that is computed, and are else those of each.

    The arguments are those of `models.ranking.explanation.explain`, and the `events` of the memory.
    """
    wanted = 2 * top + _SPARE
    if user.collapsed is not None:  # which other events count depends on how many are looked at
        found = _explained(snapshot, user, events, rows, top, wanted, options, partial, effects)
        return [_inexact(_foremost(each, events, top), events) for each in found]
    if not _repeats(events):  # nothing is to be put together
        return explain(snapshot, user, rows, top, options, partial=partial, effects=effects)
    found = _explained(snapshot, user, events, rows, top, wanted, options, partial, "none")
    chosen = [_foremost(each, events, top) for each in found]
    if effects == "none" or not any(chosen):
        return chosen
    if effects == "exact":
        return _with_exact_effects(snapshot, user, events, rows, chosen, options)
    depth = max(map(_depth, found, chosen))
    estimated = explain(snapshot, user, rows, depth, options, effects=effects)
    known = [{each.source: each for each in of_target} for of_target in estimated]
    completed = [
        [own[each.source] for each in of_target]
        for own, of_target in zip(known, chosen, strict=True)
    ]
    return [_inexact(each, events) for each in completed]


def _repeats(events: EventColumns) -> bool:
    """Report whether two events are of one item and type."""
    return _distinct(events) < len(events)


def _distinct(events: EventColumns) -> int:
    """Count the pairs of item and type."""
    return len(np.unique(events.rows.astype(np.int64) * len(events.type_names) + events.types))


def _explained(
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    rows: NDArray[np.integer],
    top: int,
    wanted: int,
    options: AttentionOptions,
    partial: PartialSoftmax | None,
    effects: Effects,
) -> list[list[Reason]]:
    """Return `wanted` reasons, or more until they are of `top` items and types.

    Of a long history, `_MOST_OF_LONG` are looked at.
    """
    found = explain(snapshot, user, rows, wanted, options, partial=partial, effects=effects)
    named = [len({_key(events, one.source) for one in each}) for each in found]
    short = [
        place for place, count in enumerate(named) if count < top and len(found[place]) == wanted
    ]
    if user.collapsed is not None and 4 * wanted > _MOST_OF_LONG:
        return found
    if short and min(named[place] for place in short) < _distinct(events) + len(events.interests):
        part = None if partial is None else PartialSoftmax(*(one[:, short] for one in partial))
        more = _explained(
            snapshot, user, events, rows[short], top, 4 * wanted, options, part, effects
        )
        for place, each in zip(short, more, strict=True):
            found[place] = each
    return found


def _key(events: EventColumns, source: int) -> _Key:
    return (-1, source) if source < 0 else (int(events.rows[source]), int(events.types[source]))


def _foremost(reasons: Sequence[Reason], events: EventColumns, top: int) -> list[Reason]:
    """Keep the reasons of the `top` items and types that raise a score most, in their order.

    Where fewer raise it, those that lower it most follow, as in `explain`.
    """
    sums = _sums(reasons, events)
    if len(sums) <= top:
        return list(reasons)
    best = sorted(sums, key=lambda key: (sums[key] <= 0, -abs(sums[key])))[:top]
    return [each for each in reasons if _key(events, each.source) in best]


def _sums(reasons: Sequence[Reason], events: EventColumns) -> dict[_Key, float]:
    sums: dict[_Key, float] = {}
    for each in reasons:
        key = _key(events, each.source)
        sums[key] = sums.get(key, 0.0) + each.contribution
    return sums


def _depth(reasons: Sequence[Reason], chosen: Sequence[Reason]) -> int:
    """Return how many reasons must be named for the chosen ones to be among them."""
    ranks = {each.source: (each.contribution <= 0, -abs(each.contribution)) for each in reasons}
    last = max((ranks[each.source] for each in chosen), default=(False, 0.0))
    return sum(rank <= last for rank in ranks.values())


def _groups(reasons: Sequence[Reason], events: EventColumns) -> Iterator[list[int]]:
    """Yield the places of the reasons of each item and type."""
    groups: dict[_Key, list[int]] = {}
    for place, each in enumerate(reasons):
        groups.setdefault(_key(events, each.source), []).append(place)
    yield from groups.values()


def _inexact(reasons: list[Reason], events: EventColumns) -> list[Reason]:
    """Mark the effects of several events on one item as estimates: their sum is no more."""
    for group in _groups(reasons, events):
        if len(group) > 1:
            for place in group:
                reasons[place] = reasons[place]._replace(effect_is_exact=False)
    return reasons


def _with_exact_effects(
    snapshot: Snapshot,
    user: UserMemory,
    events: EventColumns,
    rows: NDArray[np.integer],
    chosen: list[list[Reason]],
    options: AttentionOptions,
) -> list[list[Reason]]:
    """Set the effects: what each score loses without all events of an item and type at once.

    The first of several events has the effect of all, so that they add up.
    """
    left_out: dict[tuple[int, ...], list[int]] = {}  # sources -> targets
    groups = [
        [(tuple(sorted(each[place].source for place in group)), group)
         for group in _groups(each, events)]
        for each in chosen
    ]  # fmt: skip
    for row, own in zip(rows.tolist(), groups, strict=True):
        for sources, _ in own:
            left_out.setdefault(sources, []).append(row)
    totals = score(snapshot, user, np.asarray(rows, np.int64), options).total.tolist()
    without = _scores_without_all(snapshot, user, left_out, options)
    for row, total, own, each in zip(rows.tolist(), totals, groups, chosen, strict=True):
        for sources, group in own:
            effect = total - without[sources, row]
            each[group[0]] = each[group[0]]._replace(effect=effect, effect_is_exact=True)
            for place in group[1:]:
                each[place] = each[place]._replace(effect=0.0, effect_is_exact=True)
    return chosen


def _scores_without_all(
    snapshot: Snapshot,
    user: UserMemory,
    left_out: Mapping[tuple[int, ...], Sequence[int]],
    options: AttentionOptions,
) -> dict[tuple[tuple[int, ...], int], float]:
    """Score targets without some events of the history at once, by (sources, target)."""
    single = {sources[0]: rows for sources, rows in left_out.items() if len(sources) == 1}
    alone = scores_without(snapshot, user, single, options)
    found: dict[tuple[tuple[int, ...], int], float] = {
        ((source,), row): total for (source, row), total in alone.items()
    }
    for sources, rows in left_out.items():
        if len(sources) > 1:
            history = user.history
            for source in reversed(sources):  # the last first: places before it stay
                history = history.without(source)
            less = build_memory(snapshot, history, user.at)
            totals = score(snapshot, less, np.asarray(rows, np.int64), options).total.tolist()
            found |= {(sources, row): total for row, total in zip(rows, totals, strict=True)}
    return found
