"""Events one by one, with their ids and vectors, as pages and exports have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from service.domain.records import Event
from service.stores.encoding import cursor_of, position_of, user_key, vectors_from
from service.stores.jobs import Job, Run

_HERE = "$[|namespace_no, ]"
_JOINED = f"""\
heed.events JOIN heed.users USING ({_HERE}$user)
  LEFT JOIN heed.vectors USING ({_HERE}$user, seq)"""
_COLUMNS = """\
timestamp, seq, user_id, weight, key, value, $[event_id|coalesce(event_id, event_key::text)]"""

ALL_EVENTS = f"""\
SELECT item_id, type, {_COLUMNS} FROM {_JOINED}
  JOIN heed.items USING ({_HERE}item_no) JOIN heed.types USING ({_HERE}type_no)
 WHERE $here ORDER BY $user, timestamp, seq"""
_LAST = 2**63 - 1, 2**31 - 1


def page(user_id: str, cursor: str | None, limit: int) -> Job[tuple[list[Event], str | None]]:
    """`Store.page`."""
    time, seq = _LAST if cursor is None else position_of(cursor, int, int)
    rows = yield Run(
        f"SELECT item_no, type_no, {_COLUMNS} FROM {_JOINED}"
        " WHERE $here AND $[|$user = :key AND ]user_id = :id"
        " AND (timestamp, seq) < (CAST(:time AS bigint), CAST(:seq AS bigint))"
        " ORDER BY timestamp DESC, seq DESC LIMIT :most",
        key=user_key(user_id),
        id=user_id,
        time=time,
        seq=seq,
        most=limit + 1,
    )
    shown = rows[:limit]
    # Items and types are elsewhere than events in a distributed database.
    items = yield from find_names("items", "item_no", "item_id", {row[0] for row in shown})
    types = yield from find_names("types", "type_no", "type", {row[1] for row in shown})
    named = [(items[item_no], types[type_no], *rest) for item_no, type_no, *rest in shown]
    last = rows[limit - 1][2:4] if len(rows) > limit else None
    return list(build_events(named)), None if last is None else cursor_of(*last)


def find_names(table: str, number: str, name: str, numbers: Iterable[int]) -> Job[dict[int, str]]:
    """Return the names of interned numbers."""
    rows = yield Run(
        f"SELECT {number}, {name} FROM heed.{table} WHERE $here AND {number} $in(numbers)",
        numbers=sorted(numbers),
    )
    return dict(cast(list[tuple[int, str]], rows))


def build_events(rows: Iterable[tuple[Any, ...]]) -> Iterator[Event]:
    """Build the events of rows as `ALL_EVENTS` selects them."""
    for item_id, type_, timestamp, _, user_id, weight, key, value, event_id in rows:
        vectors = vectors_from(key, value)
        yield Event(user_id, item_id, event_id, type_, weight, timestamp, *vectors)
