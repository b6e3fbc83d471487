"""Namespaces of a PostgreSQL database: rows that number them, for every table's key."""

from __future__ import annotations

import time

from psycopg import Connection

_FIND = "SELECT namespace_no FROM heed.namespaces WHERE name = %s"


def find_namespace(connection: Connection, name: str) -> int | None:
    """Return the number of a namespace, None where there is none of this name."""
    row = connection.execute(_FIND, (name,)).fetchone()
    return None if row is None else int(row[0])


def create_namespace(connection: Connection, name: str) -> int:
    """Create a namespace, unless there is one of this name; return its number."""
    found = find_namespace(connection, name)
    if found is not None:
        return found
    with connection.transaction():
        row = connection.execute(
            "INSERT INTO heed.namespaces (namespace_no, name, created)"
            " VALUES (nextval('heed.namespace_numbers'), %s, %s)"
            " ON CONFLICT (name) DO NOTHING RETURNING namespace_no",
            (name, time.time_ns() // 1000),
        ).fetchone()
        if row is not None:
            # Numbers of users are small, so that followers of the log index arrays by them.
            connection.execute(f"CREATE SEQUENCE heed.user_numbers_{int(row[0])}".encode())
            return int(row[0])
    return create_namespace(connection, name)  # another process was faster


def read_namespaces(connection: Connection) -> dict[str, int]:
    """Return when each namespace was created, microseconds UTC, by name; none in a new database."""
    if connection.execute("SELECT to_regclass('heed.namespaces')").fetchone() == (None,):
        return {}
    return dict(connection.execute("SELECT name, created FROM heed.namespaces").fetchall())
