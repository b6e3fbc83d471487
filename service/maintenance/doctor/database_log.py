"""Summary of the event log and catalogue of a namespace in a PostgreSQL database."""

from __future__ import annotations

from typing import Any

from psycopg import Connection

from service.maintenance.doctor.log_summary import MOST_WEIGHTS, LogSummary

_BY_TYPE = """\
SELECT type, count(*), count(*) FILTER (WHERE document IS NULL), min(timestamp), max(timestamp),
       count(*) FILTER (WHERE timestamp > %(tomorrow)s), sum(weight), max(weight)
  FROM heed.events JOIN heed.types USING (namespace_no, type_no)
  LEFT JOIN heed.items USING (namespace_no, item_no)
 WHERE namespace_no = %(no)s GROUP BY type"""
_BY_USER = """\
SELECT count(*), coalesce(max(n), 0) FROM (
  SELECT count(*) AS n FROM heed.events WHERE namespace_no = %(no)s GROUP BY user_key) AS users"""
_BY_ITEM = """\
SELECT coalesce(max(n), 0) FROM (
  SELECT count(*) AS n FROM heed.events WHERE namespace_no = %(no)s GROUP BY item_no) AS items"""
_WEIGHTS = f"""\
SELECT DISTINCT weight FROM heed.events WHERE namespace_no = %(no)s LIMIT {MOST_WEIGHTS + 1}"""  # noqa: S608
_STATED = """\
SELECT items, (SELECT coalesce(sum(events), 0)::bigint FROM heed.tallies
                WHERE tallies.namespace_no = namespaces.namespace_no)
  FROM heed.namespaces WHERE namespace_no = %(no)s"""


def summarise_database(connection: Connection, namespace_no: int, tomorrow: int) -> LogSummary:
    """Read the summary; events after `tomorrow` are those of the future.

    Args:
        connection: in a transaction that sees one state of the database. The server reads the
            whole log of the namespace.
        namespace_no: number of the namespace.
        tomorrow: microseconds UTC.
    """
    values = {"no": namespace_no, "tomorrow": tomorrow}

    def rows(query: str) -> list[tuple[Any, ...]]:
        return connection.execute(query.encode(), values).fetchall()

    ((items, stated),) = rows(_STATED)
    types = rows(_BY_TYPE)
    ((users, largest_user),) = rows(_BY_USER)
    ((largest_item,),) = rows(_BY_ITEM)
    weights = sorted(weight for (weight,) in rows(_WEIGHTS))
    events = sum(row[1] for row in types)
    return LogSummary(
        stated_events=stated,
        events=events,
        users=users,
        items=items,
        events_by_type={row[0]: row[1] for row in types},
        unknown_item_events=sum(row[2] for row in types),
        oldest=min((row[3] for row in types), default=0),
        newest=max((row[4] for row in types), default=0),
        future_events=sum(row[5] for row in types),
        largest_user=largest_user,
        largest_item=largest_item,
        mean_weight=sum(row[6] for row in types) / max(events, 1),
        largest_weight=max((row[7] for row in types), default=0.0),
        weights=tuple(weights) if len(weights) <= MOST_WEIGHTS else (),
    )
