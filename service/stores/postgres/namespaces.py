"""Namespaces of a PostgreSQL database: rows that number them, for every table's key.

A removed namespace loses its name first, which all processes notice, and then its rows. A process
that is killed in between leaves a row without a valid name, which the next change of any namespace
removes.
"""

from __future__ import annotations

import secrets
import time

from psycopg import Connection

from service.domain.errors import Conflict, NotFound
from service.domain.names import DEFAULT_NAMESPACE
from service.runtime.data_layout import ID_BYTES
from service.stores.jobs import KEYS, NAMES
from service.stores.postgres.notices import NOTIFY
from service.stores.postgres.schema import REMOVED
from service.stores.postgres.shared_parts import is_leased
from service.stores.postgres.ticks import TICKS

_FIND = "SELECT namespace_no FROM heed.namespaces WHERE name = %s"
# Keys are in the namespace `default`; their version moves as in `records.keys`.
_REVOKE = f"""\
WITH moved AS (
  UPDATE heed.namespaces
     SET keys = greatest(keys + 1, tick_base + {TICKS} * pg_current_xact_id()::text::bigint)
    FROM heed.installation WHERE name = '{DEFAULT_NAMESPACE}')
UPDATE heed.keys SET revoked = %s WHERE namespace = %s AND revoked IS NULL"""
_LOCK = "SELECT pg_advisory_xact_lock(%s, %s)"
# In the order of their sizes, the greatest last: what remains of an interrupted removal is found.
_TABLES = (
    "copies",
    "rate_windows",
    "active_sets",
    "file_sets",
    "file_chunks",
    "jobs",
    "job_leases",
    "scenarios",
    "keys",
    "imports",
    "claims",
    "replaced_items",
    "replaced_profiles",
    "unused_names",
    "forgotten",
    "gone_users",
    "tallies",
    "types",
    "items",
    "vectors",
    "users",
    "event_ids",
    "events",
)
# Tables without rows in a namespace that nobody has used. One that was served has indexes of
# nothing among its files, and none of these is ever active.
_RECORDS = (
    "users",
    "items",
    "scenarios",
    "keys",
    "imports",
    "forgotten",
    "jobs",
    "active_sets",
    "copies",
)


def find_namespace(connection: Connection, name: str) -> int | None:
    """Return the number of a namespace, None where there is none of this name."""
    row = connection.execute(_FIND, (name,)).fetchone()
    return None if row is None else int(row[0])


def create_namespace(connection: Connection, name: str, namespace_id: str | None = None) -> int:
    """Create a namespace and return its number. Raises `Conflict` if it exists.

    Args:
        connection: with autocommit.
        name: of the namespace.
        namespace_id: id of the namespace that it copies; a new one by default.
    """
    if name == DEFAULT_NAMESPACE:  # which is never removed
        namespace_id = ""
    elif namespace_id is None:
        namespace_id = secrets.token_hex(ID_BYTES)
    _finish_removals(connection)
    with connection.transaction():
        row = connection.execute(
            "INSERT INTO heed.namespaces (namespace_no, name, created, namespace_id)"
            " VALUES (nextval('heed.namespace_numbers'), %s, %s, %s)"
            " ON CONFLICT (name) DO NOTHING RETURNING namespace_no",
            (name, time.time_ns() // 1000, namespace_id),
        ).fetchone()
        if row is None:
            raise Conflict(f"there is a namespace {name!r} already")
        # Numbers of users are small, so that followers of the log index arrays by them.
        connection.execute(f"CREATE SEQUENCE heed.user_numbers_{int(row[0])}".encode())
        connection.execute(NOTIFY.encode())
        return int(row[0])


def find_or_create_namespace(
    connection: Connection, name: str, namespace_id: str | None = None
) -> int:
    """Return the number of a namespace, which is created where there is none of this name."""
    while True:
        found = find_namespace(connection, name)
        if found is not None:
            return found
        try:
            return create_namespace(connection, name, namespace_id)
        except Conflict:
            continue  # another process was faster


def namespace_names(connection: Connection) -> list[str]:
    """Return the names of all namespaces, `default` first."""
    return sorted(read_namespaces(connection), key=lambda name: (name != DEFAULT_NAMESPACE, name))


def read_namespaces(connection: Connection) -> dict[str, int]:
    """Return when each namespace was created, microseconds UTC, by name; none in a new database."""
    if connection.execute("SELECT to_regclass('heed.namespaces')").fetchone() == (None,):
        return {}
    rows = connection.execute(
        "SELECT name, created FROM heed.namespaces WHERE NOT starts_with(name, %s)", (REMOVED,)
    )
    return dict(rows.fetchall())


def namespace_ids(connection: Connection) -> dict[str, str]:
    """Return the id of each namespace, by name."""
    return dict(connection.execute("SELECT name, namespace_id FROM heed.namespaces").fetchall())


def is_unused(connection: Connection) -> bool:
    """True if there is no namespace but an empty `default`, without records, models and jobs."""
    if set(read_namespaces(connection)) - {DEFAULT_NAMESPACE}:
        return False
    rows = " UNION ALL ".join(f"(SELECT FROM heed.{table} LIMIT 1)" for table in _RECORDS)
    return connection.execute(f"SELECT EXISTS ({rows})".encode()).fetchone() == (False,)


def remove_namespace(connection: Connection, name: str) -> None:
    """Remove a namespace with all of its rows, and revoke its keys.

    Raises:
        NotFound: there is none of this name.
        Conflict: a training runs in it, on any machine.
    """
    with connection.transaction():
        number = find_namespace(connection, name)
        if number is None:
            raise NotFound(f"there is no namespace {name!r}")
        connection.execute(_LOCK, (NAMES, number))  # once no write is in progress
        connection.execute(_LOCK, (KEYS, find_namespace(connection, DEFAULT_NAMESPACE)))
        removed = connection.execute(
            "UPDATE heed.namespaces SET name = %s || namespace_no WHERE name = %s", (REMOVED, name)
        )
        if removed.rowcount == 0:  # another process was faster
            raise NotFound(f"there is no namespace {name!r}")
        if is_leased(connection, number):
            raise Conflict(f"a training runs in the namespace {name!r}: cancel it first")
        connection.execute(_REVOKE.encode(), (time.time_ns() // 1000, name))
        connection.execute(NOTIFY.encode())
    _finish_removals(connection)


def _finish_removals(connection: Connection) -> None:
    rows = connection.execute(
        "SELECT namespace_no FROM heed.namespaces WHERE starts_with(name, %s)", (REMOVED,)
    ).fetchall()
    for (number,) in rows:
        connection.execute("SET statement_timeout = 0")
        for table in _TABLES:
            connection.execute(
                f"DELETE FROM heed.{table} WHERE namespace_no = %s".encode(),
                (number,),
            )
        connection.execute(f"DROP SEQUENCE IF EXISTS heed.user_numbers_{int(number)}".encode())
        connection.execute("DELETE FROM heed.namespaces WHERE namespace_no = %s", (number,))
