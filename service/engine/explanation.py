"""Explanation of scores by events: which ones, by name, and what is lost without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.attention.partial_softmax import PartialSoftmax
from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from models.ranking.explanation import Effects, Reason, explain, scores_without
from models.ranking.scoring import Scores, score
from service.domain.errors import StoreUnreachable
from service.domain.records import check_finite
from service.domain.timestamps import to_rfc3339
from service.histories.event_columns import EventColumns
from service.questions.answers import AttendedEventOut, ContributionOut, RemainderOut
from service.stores.base import Store


class MemoryRow(NamedTuple):
    """The event or profile entry that a row of a memory stands for."""

    event_id: str | None  # None for inline events and profile entries
    item_id: str | None
    title: str
    type: str
    timestamp: int | None

    @property
    def written(self) -> AttendedEventOut:
        """The row as an answer has it."""
        time = None if self.timestamp is None else to_rfc3339(self.timestamp)
        return {
            "event_id": self.event_id,
            "item_id": self.item_id,
            "title": self.title,
            "type": self.type,
            "timestamp": time,
        }


class Contribution(NamedTuple):
    """Contribution to one target's score: of one memory row, or of all on one item and type."""

    row: MemoryRow  # the newest; one object for all contributions of a row
    weight: float  # mean over heads of the softmax weight
    contribution: float  # signed; all rows' contributions and the prior sum to the score
    effect: float | None = None  # what the score loses without this row; None: not requested
    effect_is_exact: bool = False  # False: estimated
    events: int = 1  # that are summed up


_HIDDEN = MemoryRow(None, None, "", "hidden", None)  # of every item that must not be named


class NamedReasons(NamedTuple):
    """The contributions behind the scores of some items."""

    of_items: list[tuple[Contribution, ...]]
    is_degraded: bool  # the store cannot be reached: event ids, or newer events, may be missing


async def name_reasons(
    store: Store, snapshot: Snapshot, events: EventColumns, reasons: Sequence[Sequence[Reason]]
) -> NamedReasons:
    """Name the requester's events and interests behind the reasons of each of some items.

    The events of one item and type are one contribution, as `merge_events` has it.
    """
    named = await name_events(store, snapshot, events, reasons)
    return named._replace(of_items=[merge_events(each) for each in named.of_items])


async def name_events(
    store: Store, snapshot: Snapshot, events: EventColumns, reasons: Sequence[Sequence[Reason]]
) -> NamedReasons:
    """Name events as `name_reasons` does, each of them; those of hidden items are no reasons."""
    sources = dict.fromkeys(reason.source for each in reasons for reason in each)
    event_ids = await _event_ids(store, events, sources)
    known = event_ids or {}
    rows = {source: _memory_row(snapshot, events, source, known) for source in sources}
    named = [
        tuple(
            Contribution(rows[source], weight, contribution, effect, is_exact)
            for source, weight, contribution, effect, is_exact in each
            if rows[source] is not _HIDDEN
        )
        for each in reasons
    ]
    return NamedReasons(named, event_ids is None)


def merge_events(contributions: Sequence[Contribution]) -> tuple[Contribution, ...]:
    """Sum up the contributions of the events of each item and type, by falling contribution.

    The newest event stands for all of them. The sum of several estimated effects is an estimate.
    """
    groups: dict[tuple[str | None, str, str, bool], list[Contribution]] = {}
    for each in contributions:
        row = each.row
        interest = row.title if row.item_id is None else ""
        key = (row.item_id, interest, row.type, row.timestamp is None)
        groups.setdefault(key, []).append(each)
    if len(groups) == len(contributions):
        return tuple(contributions)
    return tuple(sorted(map(_merged, groups.values()), key=lambda each: -each.contribution))


def remainder_of(
    explanation: Sequence[Contribution], personal: float, memory_rows: int
) -> RemainderOut:
    """Count the rows that an explanation of a score does not name, of all that make up `personal`.

    `personal` is the score without its prior and rules.
    """
    return {
        "events": memory_rows - sum(each.events for each in explanation),
        "contribution": personal - sum(each.contribution for each in explanation),
    }


class ExplanationWriter:
    """Writes explanations of one answer, each memory row once."""

    def __init__(self) -> None:
        self._rows: dict[int, AttendedEventOut] = {}  # by the identity of the row

    def write(self, explanation: Sequence[Contribution]) -> list[ContributionOut]:
        """Return contributions as an answer has them. Raises `ArithmeticError` for NaN."""
        check_finite("weights", [each.weight for each in explanation])
        check_finite("contributions", [each.contribution for each in explanation])
        check_finite("effects", [each.effect or 0.0 for each in explanation])
        return [self._written(each) for each in explanation]

    def _written(self, of: Contribution) -> ContributionOut:
        row = self._rows.get(id(of.row))
        if row is None:
            row = self._rows[id(of.row)] = of.row.written
        out = cast("ContributionOut", row.copy())
        out |= {"events": of.events, "weight": of.weight, "contribution": of.contribution}
        if of.effect is not None:
            out |= {"effect": of.effect, "effect_is_exact": of.effect_is_exact}
        return out


def _merged(group: Sequence[Contribution]) -> Contribution:
    if len(group) == 1:
        return group[0]
    effects = [each.effect for each in group if each.effect is not None]
    return Contribution(
        max((each.row for each in group), key=lambda row: row.timestamp or 0),
        sum(each.weight for each in group),
        sum(each.contribution for each in group),
        sum(effects) if len(effects) == len(group) else None,
        all(each.effect_is_exact for each in group),
        sum(each.events for each in group),
    )


class NamedRows(NamedTuple):
    """The ids of memory rows, and what they stand for."""

    ids: tuple[str, ...]  # "" of an event that is not stored, or whose id could not be read
    events: tuple[MemoryRow, ...]
    is_degraded: bool  # as in `NamedReasons`


async def name_rows(
    store: Store, snapshot: Snapshot, events: EventColumns, sources: Sequence[int]
) -> NamedRows:
    """Name memory rows by their sources: events, and profile entries."""
    event_ids = await _event_ids(store, events, dict.fromkeys(sources))
    known = event_ids or {}
    ids = tuple(
        events.interests[-1 - source] if source < 0 else known.get(source) or ""
        for source in sources
    )
    rows = tuple(_memory_row(snapshot, events, source, known) for source in sources)
    return NamedRows(ids, rows, event_ids is None)


async def _event_ids(
    store: Store, events: EventColumns, sources: Iterable[int]
) -> Mapping[int, str | None] | None:
    """Ids of those events that are stored, by their place in the columns.

    None where the store cannot be reached, or could not when the events were read.
    """
    if events.is_stale:
        return None
    stored = [at for at in sources if at >= 0 and events.seqs[at] > 0]
    if not stored:
        return {}
    try:
        ids = await store.event_ids(
            events.user_id,
            events.seqs[stored].tolist(),
            events.timestamps[stored].tolist(),
        )
    except StoreUnreachable:
        return None
    return dict(zip(stored, ids, strict=True))


def _memory_row(
    snapshot: Snapshot, events: EventColumns, source: int, event_ids: Mapping[int, str | None]
) -> MemoryRow:
    titles = snapshot.catalogue.titles
    if source < 0:
        interest = events.interests[-1 - source]
        row = snapshot.catalogue.row(interest)
        if snapshot.catalogue.withheld(np.array([row]))[0]:
            return _HIDDEN
        if row < 0:
            return MemoryRow(None, None, interest, "profile", None)
        return MemoryRow(None, interest, titles[row], "profile", None)
    row = int(events.rows[source])
    if snapshot.catalogue.withheld(np.array([row]))[0]:
        return _HIDDEN
    return MemoryRow(
        event_ids.get(source),
        snapshot.catalogue.vocabulary.id(row),
        titles[row] if row < len(titles) else "",
        events.type_names[events.types[source]],
        int(events.timestamps[source]),
    )


# ------------------------------------------------------------------------------ reasons

_SPARE = 8  # events beyond twice as many as reasons that are looked at for events of one item
_MOST_OF_LONG = 2_000  # events of a long history that are looked at, each of which is costly

_Key = tuple[int, int]  # row and type of the item's events; -1 and the entry of a profile


def explain_items(
    snapshot: Snapshot,
    user: UserMemory,
    rows: NDArray[np.integer],
    scores: Scores,
    *,
    options: AttentionOptions,
    top: int,
    effects: Effects,
    events: EventColumns,
    places: Sequence[int] | None = None,
) -> list[list[Reason]]:
    """Explain the scores of items by the events that contribute most; [] without `top`.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory` with the same snapshot.
        rows: item rows [L].
        scores: of these rows, or of more.
        options: as the scores were made.
        top: reasons of each item.
        effects: how the effects of these are found.
        events: of the memory.
        places: [L] of the rows among the scores, -1 = not scored, which has no reasons; by default
            in order.
    """
    if not top:
        return []
    where = np.arange(len(rows)) if places is None else np.asarray(places)
    scored = np.flatnonzero(where >= 0)
    partial = scores.partial
    if partial is not None:
        among = torch.from_numpy(where[scored])
        partial = PartialSoftmax(*(part[:, among] for part in partial))
    found = foremost_reasons(
        snapshot,
        user,
        events,
        rows[scored],
        top,
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
    `merge_events` puts together. Their effects add up to the
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

    At most `_MOST_OF_LONG` of a long history are looked at.
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

    If fewer raise it, those that lower it most follow, as in `explain`.
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
