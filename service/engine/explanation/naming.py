"""The names of memory rows in answers: event ids, items, types, interests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.catalogue.snapshot import Snapshot
from models.ranking.explanation import Reason
from service.domain.errors import StoreUnreachable
from service.domain.queries import Contribution, MemoryRow, Remainder
from service.histories.event_columns import EventColumns
from service.stores.base import Store

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
) -> Remainder:
    """Count the rows that an explanation of a score does not name, of all that make up `personal`.

    `personal` is the score without its prior and rules.
    """
    return {
        "events": memory_rows - sum(each.events for each in explanation),
        "contribution": personal - sum(each.contribution for each in explanation),
    }


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
