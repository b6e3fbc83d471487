"""Explanation of scores by events: which ones, by name, and what is lost without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

# -------------------------------------------------------------------------------- names


class Contribution(NamedTuple):
    """Contribution to one target's score: of one memory row, or of all on one item and type."""

    row: AttendedEventOut  # the newest; one object for all contributions of a row
    time: int  # of its event, microseconds UTC; 0 for an interest
    weight: float  # mean over heads of the softmax weight
    contribution: float  # signed; all rows' contributions and the prior sum to the score
    effect: float | None = None  # what the score loses without this row; None: not requested
    effect_is_exact: bool = False  # False: estimated
    events: int = 1  # that are summed up


class NamedReasons(NamedTuple):
    """The contributions behind the scores of some items."""

    of_items: list[tuple[Contribution, ...]]
    is_degraded: bool  # the store cannot be reached: event ids, or newer events, may be missing


class NamedRows(NamedTuple):
    """The ids of memory rows, and what they stand for."""

    ids: tuple[str, ...]  # "" of an event that is not stored, or whose id could not be read
    events: list[AttendedEventOut]
    is_degraded: bool  # as in `NamedReasons`


async def name_reasons(
    store: Store, snapshot: Snapshot, events: EventColumns, reasons: Sequence[Sequence[Reason]]
) -> NamedReasons:
    """Name the requester's events and interests behind the reasons of each of some items.

    The events of one item and type are one contribution, as `merge_events` has it.
    """
    named = await name_events(store, snapshot, events, reasons)
    return named._replace(of_items=[merge_events(of_item) for of_item in named.of_items])


async def name_events(
    store: Store, snapshot: Snapshot, events: EventColumns, reasons: Sequence[Sequence[Reason]]
) -> NamedReasons:
    """Name events as `name_reasons` does, each of them; those of hidden items are no reasons."""
    sources = dict.fromkeys(reason.source for of_item in reasons for reason in of_item)
    event_ids = await _event_ids(store, events, sources)
    rows = {source: _row(snapshot, events, source, event_ids or {}) for source in sources}
    named = [
        tuple(
            Contribution(row, _time(events, reason.source), *reason[1:])
            for reason in of_item
            if (row := rows[reason.source]) is not _HIDDEN
        )
        for of_item in reasons
    ]
    return NamedReasons(named, event_ids is None)


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
    rows = [_row(snapshot, events, source, known) for source in sources]
    return NamedRows(ids, rows, event_ids is None)


def merge_events(contributions: Sequence[Contribution]) -> tuple[Contribution, ...]:
    """Sum up the contributions of the events of each item and type, by falling contribution.

    The newest event stands for all of them. The sum of several estimated effects is an estimate.
    """
    groups: dict[tuple[str | None, str, str, bool], list[Contribution]] = {}
    for part in contributions:
        row = part.row
        interest = row["title"] if row["item_id"] is None else ""
        key = (row["item_id"], interest, row["type"], row["timestamp"] is None)
        groups.setdefault(key, []).append(part)
    if len(groups) == len(contributions):
        return tuple(contributions)
    return tuple(sorted(map(_merged, groups.values()), key=lambda part: -part.contribution))


def _merged(group: Sequence[Contribution]) -> Contribution:
    newest = max(group, key=lambda part: part.time)
    effects = [part.effect for part in group if part.effect is not None]
    return Contribution(
        newest.row,
        newest.time,
        sum(part.weight for part in group),
        sum(part.contribution for part in group),
        sum(effects) if len(effects) == len(group) else None,
        all(part.effect_is_exact for part in group),
        sum(part.events for part in group),
    )


def remainder_of(
    explanation: Sequence[Contribution], personal: float, memory_rows: int
) -> RemainderOut:
    """Count the rows that an explanation of a score does not name, of all that make up `personal`.

    `personal` is the score without its prior and rules.
    """
    return {
        "events": memory_rows - sum(part.events for part in explanation),
        "contribution": personal - sum(part.contribution for part in explanation),
    }


def write_explanation(explanation: Sequence[Contribution]) -> list[ContributionOut]:
    """Return contributions as an answer has them. Raises `ArithmeticError` for NaN."""
    check_finite("weights", [part.weight for part in explanation])
    check_finite("contributions", [part.contribution for part in explanation])
    check_finite("effects", [part.effect or 0.0 for part in explanation])
    written = []
    for part in explanation:
        out = cast("ContributionOut", part.row.copy())
        out |= {"events": part.events, "weight": part.weight, "contribution": part.contribution}
        if part.effect is not None:
            out |= {"effect": part.effect, "effect_is_exact": part.effect_is_exact}
        written.append(out)
    return written


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


def _row(
    snapshot: Snapshot, events: EventColumns, source: int, event_ids: Mapping[int, str | None]
) -> AttendedEventOut:
    """Return what a row of a memory stands for; `_HIDDEN` for an item that must not be named."""
    catalogue, interest = snapshot.catalogue, None
    if source < 0:
        interest = events.interests[-1 - source]
        row = catalogue.row(interest)
    else:
        row = int(events.rows[source])
    if catalogue.withheld(np.array([row]))[0]:
        return _HIDDEN
    if interest is not None:
        item_id, title = (None, interest) if row < 0 else (interest, catalogue.titles[row])
        return _written(None, item_id, title, "profile", None)
    return _written(
        event_ids.get(source),
        catalogue.vocabulary.id(row),
        catalogue.titles[row] if row < len(catalogue.titles) else "",
        events.type_names[events.types[source]],
        to_rfc3339(_time(events, source)),
    )


def _time(events: EventColumns, source: int) -> int:
    return 0 if source < 0 else int(events.timestamps[source])


def _written(
    event_id: str | None, item_id: str | None, title: str, kind: str, time: str | None
) -> AttendedEventOut:
    return {
        "event_id": event_id,
        "item_id": item_id,
        "title": title,
        "type": kind,
        "timestamp": time,
    }


_HIDDEN = _written(None, None, "", "hidden", None)  # of every item that must not be named

# ------------------------------------------------------------------------------ reasons

_SPARE = 8  # events beyond twice as many as reasons that are looked at for events of one item
_MOST_OF_LONG = 2_000  # events of a long history that are looked at; each is costly


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
    """Explain the scores of item rows [L] by the `top` events that contribute most; [] for 0.

    Args:
        user: from `build_memory` with the same snapshot.
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
    foremost = foremost_reasons(
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
    for place, of_item in zip(scored.tolist(), foremost, strict=True):
        reasons[place] = of_item
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
    The events of one item and type are still reasons of their own, which `merge_events` puts
    together. Their effects add up to the effect of all of them, where that is computed, and are
    else those of each.

    The arguments are those of `models.ranking.explanation.explain`, and the `events` of the memory.
    """
    explainer = _Explainer(snapshot, user, events, options, top)
    if user.collapsed is not None:  # which other events count depends on how many are looked at
        found = explainer.explained(rows, partial, effects)
        return [explainer.inexact(explainer.foremost(of_item)) for of_item in found]
    if explainer.distinct == len(events):  # nothing is to be put together
        return explain(snapshot, user, rows, top, options, partial=partial, effects=effects)
    found = explainer.explained(rows, partial, "none")
    chosen = [explainer.foremost(of_item) for of_item in found]
    if effects == "none" or not any(chosen):
        return chosen
    if effects == "exact":
        return explainer.with_exact_effects(rows, chosen)
    depth = max(map(_depth, found, chosen))
    estimated = explain(snapshot, user, rows, depth, options, effects=effects)
    completed = []
    for of_item, of_chosen in zip(estimated, chosen, strict=True):
        by_source = {reason.source: reason for reason in of_item}
        completed.append([by_source[reason.source] for reason in of_chosen])
    return [explainer.inexact(of_item) for of_item in completed]


def _depth(reasons: Sequence[Reason], chosen: Sequence[Reason]) -> int:
    """Return how many reasons must be named for the chosen ones to be among them."""
    ranks = {part.source: (part.contribution <= 0, -abs(part.contribution)) for part in reasons}
    last = max((ranks[part.source] for part in chosen), default=(False, 0.0))
    return sum(rank <= last for rank in ranks.values())


class _Explainer:
    """Reasons of one memory, by the item and type of their events."""

    def __init__(
        self,
        snapshot: Snapshot,
        user: UserMemory,
        events: EventColumns,
        options: AttentionOptions,
        top: int,
    ) -> None:
        self._snapshot, self._user, self._options, self._top = snapshot, user, options, top
        self._interests = len(events.interests)
        # One number for each item and type; an unknown item is row -1.
        self._keys = (events.rows.astype(np.int64) + 1) * len(events.type_names) + events.types
        self.distinct = len(np.unique(self._keys))

    def explained(
        self,
        rows: NDArray[np.integer],
        partial: PartialSoftmax | None,
        effects: Effects,
        wanted: int | None = None,
    ) -> list[list[Reason]]:
        """Return `wanted` reasons of each item, or more until they are of `top` items and types.

        At most `_MOST_OF_LONG` of a long history are looked at.
        """
        wanted = 2 * self._top + _SPARE if wanted is None else wanted
        found = explain(
            self._snapshot,
            self._user,
            rows,
            wanted,
            self._options,
            partial=partial,
            effects=effects,
        )
        named = [len({self._key(reason) for reason in of_item}) for of_item in found]
        short = [
            place
            for place, count in enumerate(named)
            if count < self._top and len(found[place]) == wanted
        ]
        if self._user.collapsed is not None and 4 * wanted > _MOST_OF_LONG:
            return found
        if short and min(named[place] for place in short) < self.distinct + self._interests:
            part = None if partial is None else PartialSoftmax(*(one[:, short] for one in partial))
            more = self.explained(rows[short], part, effects, 4 * wanted)
            for place, of_item in zip(short, more, strict=True):
                found[place] = of_item
        return found

    def foremost(self, reasons: Sequence[Reason]) -> list[Reason]:
        """Keep the reasons of the `top` items and types that raise a score most, in their order.

        If fewer raise it, those that lower it most follow, as in `explain`.
        """
        sums: dict[int, float] = {}
        for reason in reasons:
            key = self._key(reason)
            sums[key] = sums.get(key, 0.0) + reason.contribution
        if len(sums) <= self._top:
            return list(reasons)
        best = sorted(sums, key=lambda key: (sums[key] <= 0, -abs(sums[key])))[: self._top]
        return [reason for reason in reasons if self._key(reason) in best]

    def inexact(self, reasons: list[Reason]) -> list[Reason]:
        """Mark the effects of several events on one item as estimates: their sum is no more."""
        for group in self._groups(reasons):
            if len(group) > 1:
                for place in group:
                    reasons[place] = reasons[place]._replace(effect_is_exact=False)
        return reasons

    def with_exact_effects(
        self, rows: NDArray[np.integer], chosen: list[list[Reason]]
    ) -> list[list[Reason]]:
        """Set the effects: what each score loses without all events of an item and type at once.

        The first of several events has the effect of all, so that they add up.
        """
        left_out: dict[tuple[int, ...], list[int]] = {}  # sources -> targets
        groups = [
            [(tuple(sorted(reasons[place].source for place in group)), group)
             for group in self._groups(reasons)]
            for reasons in chosen
        ]  # fmt: skip
        for row, of_item in zip(rows.tolist(), groups, strict=True):
            for sources, _ in of_item:
                left_out.setdefault(sources, []).append(row)
        totals = self._totals(self._user, rows)
        without = self._scores_without_all(left_out)
        for row, total, of_item, reasons in zip(rows.tolist(), totals, groups, chosen, strict=True):
            for sources, group in of_item:
                lost = total - without[sources, row]
                for effect, place in zip([lost] + [0.0] * len(group), group, strict=False):
                    reason = reasons[place]
                    reasons[place] = reason._replace(effect=effect, effect_is_exact=True)
        return chosen

    def _scores_without_all(
        self, left_out: Mapping[tuple[int, ...], Sequence[int]]
    ) -> dict[tuple[tuple[int, ...], int], float]:
        """Score targets without some events of the history at once, by (sources, target)."""
        user, snapshot = self._user, self._snapshot
        single = {sources[0]: rows for sources, rows in left_out.items() if len(sources) == 1}
        alone = scores_without(snapshot, user, single, self._options)
        found: dict[tuple[tuple[int, ...], int], float] = {
            ((source,), row): total for (source, row), total in alone.items()
        }
        for sources, rows in left_out.items():
            if len(sources) > 1:
                history = user.history
                for source in reversed(sources):  # the last first: places before it stay
                    history = history.without(source)
                totals = self._totals(build_memory(snapshot, history, user.at), rows)
                found |= {(sources, row): total for row, total in zip(rows, totals, strict=True)}
        return found

    def _totals(self, user: UserMemory, rows: Sequence[int] | NDArray[np.integer]) -> list[float]:
        targets = np.asarray(rows, np.int64)
        totals: list[float] = score(self._snapshot, user, targets, self._options).total.tolist()
        return totals

    def _key(self, reason: Reason) -> int:
        return reason.source if reason.source < 0 else int(self._keys[reason.source])

    def _groups(self, reasons: Sequence[Reason]) -> list[list[int]]:
        """Return the places of the reasons of each item and type."""
        groups: dict[int, list[int]] = {}
        for place, reason in enumerate(reasons):
            groups.setdefault(self._key(reason), []).append(place)
        return [*groups.values()]
