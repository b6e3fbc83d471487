"""Events one by one, with their ids and vectors, as pages and exports have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from service.domain.records import Event
from service.stores.encoding import cursor_of, position_of, vectors_from
from service.stores.event_identity import user_key
from service.stores.jobs import Job, Run

_HERE = "$[|namespace_no, ]"
_COLUMNS = f"""\
SELECT timestamp, seq, user_id, item_id, type, weight, key, value,
       $[event_id|coalesce(event_id, event_key::text)]
  FROM heed.users JOIN heed.events USING ({_HERE}$user)
  JOIN heed.items USING ({_HERE}item_no) JOIN heed.types USING ({_HERE}type_no)
  LEFT JOIN heed.vectors USING ({_HERE}$user, seq) WHERE $here"""

ALL_EVENTS = f"{_COLUMNS} ORDER BY $user, timestamp, seq"
_LAST = 2**63 - 1, 2**31 - 1


def page(user_id: str, cursor: str | None, limit: int) -> Job[tuple[list[Event], str | None]]:
    """`Store.page`."""
    time, seq = _LAST if cursor is None else position_of(cursor, int, int)
    rows = yield Run(
        f"{_COLUMNS} AND $[|user_key = :key AND ]user_id = :id"
        " AND (timestamp, seq) < (CAST(:time AS bigint), CAST(:seq AS bigint))"
        " ORDER BY timestamp DESC, seq DESC LIMIT :most",
        key=user_key(user_id),
        id=user_id,
        time=time,
        seq=seq,
        most=limit + 1,
    )
    events = list(build_events(rows[:limit]))
    return events, cursor_of(*rows[limit - 1][:2]) if len(rows) > limit else None


def build_events(rows: Iterable[tuple[Any, ...]]) -> Iterator[Event]:
    """Build the events of rows as `ALL_EVENTS` selects them."""
    for timestamp, _, user_id, item_id, type_, weight, key, value, event_id in rows:
        vectors = vectors_from(key, value)
        yield Event(user_id, item_id, event_id, type_, weight, timestamp, *vectors)
