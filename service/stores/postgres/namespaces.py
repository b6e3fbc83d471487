"""Namespaces of a PostgreSQL database: rows that number them, for every table's key.

A removed namespace loses its name first, which all processes notice, and then its rows. A process
that is killed in between leaves a row without a valid name, which the next change of any namespace
removes.
"""

from __future__ import annotations

import time

from psycopg import Connection

from service.domain.errors import Conflict, NotFound
from service.domain.names import DEFAULT_NAMESPACE
from service.stores.postgres.database.notices import NOTIFY
from service.stores.postgres.shared.jobs import is_leased

_FIND = "SELECT namespace_no FROM heed.namespaces WHERE name = %s"
_REMOVED = "removed:"  # no name: a colon is not allowed in one
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


def create_namespace(connection: Connection, name: str) -> int:
    """Create a namespace and return its number. Raises `Conflict` where there is one already."""
    _finish_removals(connection)
    with connection.transaction():
        row = connection.execute(
            "INSERT INTO heed.namespaces (namespace_no, name, created)"
            " VALUES (nextval('heed.namespace_numbers'), %s, %s)"
            " ON CONFLICT (name) DO NOTHING RETURNING namespace_no",
            (name, time.time_ns() // 1000),
        ).fetchone()
        if row is None:
            raise Conflict(f"there is a namespace {name!r} already")
        # Numbers of users are small, so that followers of the log index arrays by them.
        connection.execute(f"CREATE SEQUENCE heed.user_numbers_{int(row[0])}".encode())
        connection.execute(NOTIFY.encode())
        return int(row[0])


def find_or_create_namespace(connection: Connection, name: str) -> int:
    """Return the number of a namespace, which is created where there is none of this name."""
    while True:
        found = find_namespace(connection, name)
        if found is not None:
            return found
        try:
            return create_namespace(connection, name)
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
        "SELECT name, created FROM heed.namespaces WHERE NOT starts_with(name, %s)", (_REMOVED,)
    )
    return dict(rows.fetchall())


def is_unused(connection: Connection) -> bool:
    """Whether there is no namespace but an empty `default`, without records, models and jobs."""
    if set(read_namespaces(connection)) - {DEFAULT_NAMESPACE}:
        return False
    rows = " UNION ALL ".join(f"(SELECT FROM heed.{table} LIMIT 1)" for table in _RECORDS)
    return connection.execute(f"SELECT EXISTS ({rows})".encode()).fetchone() == (False,)


def remove_namespace(connection: Connection, name: str) -> None:
    """Remove a namespace with all of its rows.

    Raises:
        NotFound: there is none of this name.
        Conflict: a training runs in it, on any machine.
    """
    with connection.transaction():
        number = find_namespace(connection, name)
        if number is not None and is_leased(connection, number):
            raise Conflict(f"a training runs in the namespace {name!r}: cancel it first")
        removed = connection.execute(
            "UPDATE heed.namespaces SET name = %s || namespace_no WHERE name = %s", (_REMOVED, name)
        )
        if removed.rowcount == 0:
            raise NotFound(f"there is no namespace {name!r}")
        connection.execute(NOTIFY.encode())
    _finish_removals(connection)


def _finish_removals(connection: Connection) -> None:
    rows = connection.execute(
        "SELECT namespace_no FROM heed.namespaces WHERE starts_with(name, %s)", (_REMOVED,)
    ).fetchall()
    for (number,) in rows:
        connection.execute("SET statement_timeout = 0")
        for table in _TABLES:
            connection.execute(
                f"DELETE FROM heed.{table} WHERE namespace_no = %s".encode(),  # noqa: S608
                (number,),
            )
        connection.execute(f"DROP SEQUENCE IF EXISTS heed.user_numbers_{int(number)}".encode())
        connection.execute("DELETE FROM heed.namespaces WHERE namespace_no = %s", (number,))
