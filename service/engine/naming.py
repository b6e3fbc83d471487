"""The names of memory rows in answers: event ids, items, types, interests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models.catalogue.snapshot import Snapshot
from models.ranking.explain import Reason
from service.domain.queries import Contribution
from service.histories.event_columns import EventColumns
from service.stores.base import Store


async def name_reasons(
    store: Store, snapshot: Snapshot, events: EventColumns, reasons: Sequence[Sequence[Reason]]
) -> list[tuple[Contribution, ...]]:
    """Name the requester's events and interests behind the reasons of each of some items."""
    sources = [reason.source for each in reasons for reason in each]
    event_ids = await _event_ids(store, events, sources)
    return [
        tuple(_contribution(snapshot, events, reason, event_ids) for reason in each)
        for each in reasons
    ]


async def name_rows(store: Store, events: EventColumns, sources: Sequence[int]) -> tuple[str, ...]:
    """The ids of memory rows by their sources: of events, and the interests of profile entries."""
    event_ids = await _event_ids(store, events, sources)
    return tuple(
        events.interests[-1 - source] if source < 0 else event_ids.get(source) or ""
        for source in sources
    )


async def _event_ids(
    store: Store, events: EventColumns, sources: Sequence[int]
) -> Mapping[int, str | None]:
    """Ids of those events that are stored, by their place in the columns."""
    stored = [at for at in dict.fromkeys(sources) if at >= 0 and events.seqs[at] > 0]
    if not stored:
        return {}
    ids = await store.event_ids(
        events.user_id,
        events.seqs[stored].tolist(),
        events.timestamps[stored].tolist(),
    )
    return dict(zip(stored, ids, strict=True))


def _contribution(
    snapshot: Snapshot, events: EventColumns, reason: Reason, event_ids: Mapping[int, str | None]
) -> Contribution:
    numbers = (reason.weight, reason.contribution, reason.effect, reason.effect_is_exact)
    titles = snapshot.catalogue.titles
    if reason.source < 0:
        interest = events.interests[-1 - reason.source]
        row = snapshot.catalogue.row(interest)
        if row < 0:
            return Contribution(None, None, interest, "profile", None, *numbers)
        return Contribution(None, interest, titles[row], "profile", None, *numbers)
    row = int(events.rows[reason.source])
    return Contribution(
        event_ids.get(reason.source),
        snapshot.catalogue.vocabulary.id(row),
        titles[row] if row < len(titles) else "",
        events.type_names[events.types[reason.source]],
        int(events.timestamps[reason.source]),
        *numbers,
    )
