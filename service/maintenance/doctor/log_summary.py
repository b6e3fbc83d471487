"""Summary of a store's event log and catalogue: a few aggregates, read in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import apsw

MOST_WEIGHTS = 20  # distinct weights that are listed


class LogSummary(NamedTuple):
    """Aggregates of a store. Times are microseconds UTC; 0 where there are no events."""

    stated_events: int  # by the store's counter
    events: int  # counted
    users: int  # with events
    items: int  # in the catalogue
    events_by_type: Mapping[str, int]
    unknown_item_events: int  # whose item is not in the catalogue
    oldest: int
    newest: int
    future_events: int  # later than a day from now
    largest_user: int  # events of the user who has most
    largest_item: int  # events of the item that has most
    mean_weight: float
    largest_weight: float
    weights: tuple[float, ...]  # distinct, ascending; empty where there are more than 20


def summarise(connection: apsw.Connection, tomorrow: int) -> LogSummary:
    """Read the summary; events after `tomorrow` are those of the future.

    Reads the whole log.
    """
    execute = connection.execute
    execute("BEGIN")
    try:
        state: list[tuple[Any, ...]] = execute("SELECT items, events FROM state").fetchall()
        [(items, stated)] = state
        by_type: dict[str, int] = {}
        unknown = future = 0
        oldest = newest = 0
        total = largest_weight = 0.0
        rows: list[tuple[Any, ...]] = execute(
            "SELECT type, count(*), sum(document IS NULL), min(timestamp), max(timestamp),"
            " sum(timestamp > ?), sum(weight), max(weight)"
            " FROM events JOIN items USING (item_no) JOIN types USING (type_no) GROUP BY type_no",
            (tomorrow,),
        ).fetchall()
        for name, count, missing, first, last, late, weight, heaviest in rows:
            oldest = first if not by_type else min(oldest, first)
            newest = last if not by_type else max(newest, last)
            by_type[name] = count
            unknown, future, total = unknown + missing, future + late, total + weight
            largest_weight = max(largest_weight, heaviest)
        by_user: list[tuple[Any, ...]] = execute(
            "SELECT count(*), coalesce(max(n), 0) FROM"
            " (SELECT count(*) AS n FROM events GROUP BY user_no)"
        ).fetchall()
        [(users, largest_user)] = by_user
        largest_item: int = execute(
            "SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM events GROUP BY item_no)"
        ).get
        weights: list[tuple[Any, ...]] = execute(
            f"SELECT DISTINCT weight FROM events LIMIT {MOST_WEIGHTS + 1}"  # noqa: S608
        ).fetchall()
    finally:
        execute("ROLLBACK")
    events = sum(by_type.values())
    return LogSummary(
        stated,
        events,
        users,
        items,
        by_type,
        unknown,
        oldest,
        newest,
        future,
        largest_user,
        largest_item,
        total / max(events, 1),
        largest_weight,
        tuple(sorted(row[0] for row in weights)) if len(weights) <= MOST_WEIGHTS else (),
    )
