"""Check of a namespace of a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from service.domain.errors import HeedError
from service.stores.encoding import IS_NEGATIVE, user_key
from service.stores.postgres.connections import Connections
from service.stores.postgres.dialect import run_job_blocking
from service.stores.postgres.namespaces import find_namespace
from service.stores.postgres.ticks import TICKS
from service.stores.records import copying
from service.stores.records.catalogue import ITEM_BYTES
from service.stores.records.users import EVENT_BYTES, USER_BYTES
from service.stores.values import CheckResult, copy_unfinished

_CHUNK = 10_000  # users that are read from a cursor at once

# Each gives what is stored, and what is recorded of it.
_COUNTS = {
    "users": """\
SELECT (SELECT count(*) FROM heed.users WHERE namespace_no = %(no)s),
       (SELECT coalesce(sum(users), 0)::bigint FROM heed.tallies WHERE namespace_no = %(no)s)""",
    "items": """\
SELECT (SELECT count(*) FROM heed.items WHERE namespace_no = %(no)s AND document IS NOT NULL),
       (SELECT items FROM heed.namespaces WHERE namespace_no = %(no)s)""",
    "events": """\
SELECT (SELECT count(*) FROM heed.events WHERE namespace_no = %(no)s),
       (SELECT coalesce(sum(events), 0)::bigint FROM heed.tallies WHERE namespace_no = %(no)s)""",
    "bytes of users and events": f"""\
SELECT (SELECT {EVENT_BYTES} * count(*) FROM heed.events WHERE namespace_no = %(no)s)
       + (SELECT {USER_BYTES} * count(*) + coalesce(sum(octet_length(profile)), 0)::bigint
            FROM heed.users WHERE namespace_no = %(no)s)
       + (SELECT coalesce(sum(coalesce(octet_length(key), 0)
                              + coalesce(octet_length(value), 0)), 0)::bigint
            FROM heed.vectors WHERE namespace_no = %(no)s),
       (SELECT coalesce(sum(bytes), 0)::bigint FROM heed.tallies WHERE namespace_no = %(no)s)""",
    "bytes of items": f"""\
SELECT (SELECT coalesce(sum({ITEM_BYTES} + octet_length(document)
                            + coalesce(octet_length(embedding), 0)), 0)::bigint
          FROM heed.items WHERE namespace_no = %(no)s AND document IS NOT NULL),
       (SELECT item_bytes FROM heed.namespaces WHERE namespace_no = %(no)s)""",
}
# Each counts rows that must not be.
_FAULTS = {
    "items whose numbers of events differ from those that popularity is read from": f"""\
SELECT count(*) FROM (
  SELECT item_no, count(*) AS events, count(*) FILTER (WHERE {IS_NEGATIVE}) AS dislikes
    FROM heed.events LEFT JOIN heed.types USING (namespace_no, type_no)
   WHERE namespace_no = %(no)s GROUP BY item_no) AS stored
  FULL JOIN (
  SELECT item_no, sum(events)::bigint AS events, sum(dislikes)::bigint AS dislikes
    FROM heed.tallies WHERE namespace_no = %(no)s AND item_no > 0 GROUP BY item_no
  HAVING sum(events) <> 0 OR sum(dislikes) <> 0) AS recorded USING (item_no)
 WHERE (stored.events, stored.dislikes) IS DISTINCT FROM (recorded.events, recorded.dislikes)""",
    "events of users who are not stored": """\
SELECT count(*) FROM heed.events WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.users WHERE users.namespace_no = %(no)s AND users.user_key = events.user_key)""",
    "events of items without a name": """\
SELECT count(*) FROM heed.events WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.items WHERE items.namespace_no = %(no)s AND items.item_no = events.item_no)""",
    "events of types without a name": """\
SELECT count(*) FROM heed.events WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.types WHERE types.namespace_no = %(no)s AND types.type_no = events.type_no)""",
    "events without their id, which can be stored twice": """\
SELECT count(*) FROM heed.events AS e WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.event_ids AS i
   WHERE i.namespace_no = %(no)s AND i.event_key = e.event_key AND i.user_key = e.user_key
     AND i.timestamp = e.timestamp AND i.seq = e.seq)""",
    "ids of events that are not stored": """\
SELECT count(*) FROM heed.event_ids AS i WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.events AS e
   WHERE e.namespace_no = %(no)s AND e.user_key = i.user_key AND e.timestamp = i.timestamp
     AND e.seq = i.seq AND e.event_key = i.event_key)""",
    "seqs that several events of a user have": """\
SELECT count(*) FROM (
  SELECT FROM heed.events WHERE namespace_no = %(no)s
   GROUP BY user_key, seq HAVING count(*) > 1) AS doubled""",
    "events with a seq that their user has yet to give": """\
SELECT count(*) FROM heed.events JOIN heed.users USING (namespace_no, user_key)
 WHERE namespace_no = %(no)s AND (seq < 1 OR seq >= next_seq)""",
    "vectors without their event": """\
SELECT count(*) FROM heed.vectors AS v WHERE namespace_no = %(no)s AND NOT EXISTS (
  SELECT FROM heed.events AS e
   WHERE e.namespace_no = %(no)s AND e.user_key = v.user_key AND e.seq = v.seq)""",
    "users whose vectors are not read": """\
SELECT count(*) FROM heed.users AS u WHERE namespace_no = %(no)s AND NOT has_vectors AND EXISTS (
  SELECT FROM heed.vectors AS v WHERE v.namespace_no = %(no)s AND v.user_key = u.user_key)""",
    "events, claims or replaced records of imports that are not recorded": """\
SELECT count(*) FROM (
  SELECT import_no FROM heed.events WHERE namespace_no = %(no)s AND import_no IS NOT NULL
  UNION ALL SELECT import_no FROM heed.claims WHERE namespace_no = %(no)s
  UNION ALL SELECT import_no FROM heed.replaced_items WHERE namespace_no = %(no)s
  UNION ALL SELECT import_no FROM heed.replaced_profiles WHERE namespace_no = %(no)s) AS used
 WHERE import_no NOT IN (SELECT import_no FROM heed.imports WHERE namespace_no = %(no)s)""",
    "ids that several users have": """\
SELECT count(*) FROM (
  SELECT FROM heed.users WHERE namespace_no = %(no)s
   GROUP BY user_id HAVING count(*) > 1) AS doubled""",
    "numbers that several users have, or had": """\
SELECT count(*) FROM (
  SELECT FROM (
    SELECT user_no FROM heed.users WHERE namespace_no = %(no)s
    UNION ALL SELECT user_no FROM heed.gone_users WHERE namespace_no = %(no)s) AS numbers
   GROUP BY user_no HAVING count(*) > 1) AS doubled""",
    "numbers that a sequence will give again": """\
SELECT count(*) FROM (
  SELECT max(item_no) AS last, 'heed.item_numbers' AS name FROM heed.items
  UNION ALL SELECT max(type_no), 'heed.type_numbers' FROM heed.types
  UNION ALL SELECT max(set_no), 'heed.file_set_numbers' FROM heed.file_sets
  UNION ALL SELECT max(namespace_no), 'heed.namespace_numbers' FROM heed.namespaces
  UNION ALL SELECT max(user_no), 'heed.user_numbers_' || %(no)s FROM (
    SELECT user_no FROM heed.users WHERE namespace_no = %(no)s
    UNION ALL SELECT user_no FROM heed.gone_users WHERE namespace_no = %(no)s) AS users) AS used
 WHERE last > coalesce(pg_sequence_last_value(name::regclass), 0)""",
    "versions that the clock has not reached": f"""\
SELECT count(*) FROM (
  SELECT version FROM heed.users WHERE namespace_no = %(no)s
  UNION ALL SELECT change FROM heed.items WHERE namespace_no = %(no)s
  UNION ALL SELECT change FROM heed.gone_users WHERE namespace_no = %(no)s
  UNION ALL SELECT greatest(catalogue, keys, names) FROM heed.namespaces
             WHERE namespace_no = %(no)s) AS used, heed.installation
 WHERE version >= tick_base
       + {TICKS} * pg_snapshot_xmax(pg_current_snapshot())::text::bigint""",
}
_USER_KEYS = "SELECT user_id, user_key FROM heed.users WHERE namespace_no = %s"
_CHECKSUMS = """\
SELECT current_setting('data_checksums') = 'on',
       (SELECT coalesce(sum(checksum_failures), 0)::bigint FROM pg_stat_database)"""


def check_database(url: str, namespace: str, *, full: bool = False) -> Iterator[CheckResult]:
    """Check a namespace of a database, which may be in use: all as of one moment.

    Args:
        url: of the database.
        namespace: its name.
        full: also check each reference from one table to another, numbers and keys, which reads
            every row several times.
    """
    connections = Connections(url)
    place = f"namespace {namespace} of {connections.name}"
    try:
        with connections.snapshot() as connection:
            number = find_namespace(connection, namespace)
            if number is None:
                yield CheckResult("problem", f"there is no {place}")
                return
            if (origin := run_job_blocking(connection, number, copying.unfinished())) is not None:
                yield CheckResult("problem", copy_unfinished(place, origin).detail)
            yield from _check_counts(connection, number, place)
            if full:
                yield from _check_rows(connection, number, place)
            yield from _check_pages(connection, connections.name)
    except HeedError as error:  # a damaged page among them
        yield CheckResult("problem", f"{place}: {error.detail}")
    finally:
        connections.abandon()


def _check_counts(connection: Connection, number: int, place: str) -> Iterator[CheckResult]:
    for what, query in _COUNTS.items():
        ((stored, recorded),) = connection.execute(query.encode(), {"no": number}).fetchall()
        if stored == recorded:
            yield CheckResult("ok", f"{stored:,} {what}")
        else:
            yield CheckResult(
                "problem", f"{place}: {stored:,} {what} are stored, {recorded:,} recorded"
            )


def _check_rows(connection: Connection, number: int, place: str) -> Iterator[CheckResult]:
    for what, query in _FAULTS.items():
        ((count,),) = connection.execute(query.encode(), {"no": number}).fetchall()
        if count:
            yield CheckResult("problem", f"{place}: {count:,} {what}")
    wrong = 0
    with connection.cursor("keys", binary=True) as cursor:
        cursor.execute(_USER_KEYS.encode(), (number,))
        while chunk := cursor.fetchmany(_CHUNK):
            wrong += sum(user_key(user_id) != key for user_id, key in chunk)
    if wrong:
        yield CheckResult("problem", f"{place}: {wrong:,} users who are not found by their ids")


def _check_pages(connection: Connection, name: str) -> Iterator[CheckResult]:
    row: tuple[Any, ...] | None = connection.execute(_CHECKSUMS.encode()).fetchone()
    has_checksums, failures = row or (False, 0)
    if failures:
        yield CheckResult(
            "problem",
            f"{name}: the server has read {failures:,} damaged pages; its log names their files",
        )
    if has_checksums:
        yield CheckResult(
            "note",
            "the server verifies the checksum of each page that it reads from disk; pg_amcheck "
            "compares indexes with their tables, and pg_checksums --check reads all pages of a "
            "server that is stopped",
        )
    else:
        yield CheckResult(
            "note",
            f"{name}: pages have no checksums, so that damage by a disk is not found; "
            "pg_checksums --enable adds them while the server is stopped",
        )
