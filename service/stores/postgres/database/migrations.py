"""The schema of a PostgreSQL store, brought up to date by numbered migrations.

Each file of `migrations/` is applied once, in one transaction with its record. Heed's tables are
in the schema `heed`, beside whatever else the database holds.
"""

from __future__ import annotations

from importlib.resources import files

import psycopg

from service.domain.errors import Incompatible, Invalid

# Prefix of the name of a namespace that is being removed; no valid name has it.
REMOVED = "removed:"
IS_THERE = f"NOT starts_with(name, '{REMOVED}')"

PARTITIONS = 64  # of the events, by user
_LOCK = 0x68656564  # "heed": held while migrations are applied
_HAS_CITUS = "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')"
_IS_DISTRIBUTED = """\
SELECT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = 'heed.users'::regclass)"""
_CREATE = """
CREATE SCHEMA IF NOT EXISTS heed;
CREATE TABLE IF NOT EXISTS heed.migrations (
  number  integer PRIMARY KEY,
  applied timestamptz NOT NULL DEFAULT now()
);
"""


def _migrations() -> dict[int, str]:
    """Return the statements of each migration by its number, in order."""
    folder = files(__package__) / "migrations"
    found = {int(each.name.split(".")[0]): each.read_text("utf-8") for each in folder.iterdir()}
    return dict(sorted(found.items()))


def schema_version() -> int:
    """Return the number of the last migration that this version of Heed knows."""
    return max(_migrations())


def migrate(connection: psycopg.Connection, partitions: int = PARTITIONS) -> int:
    """Apply the migrations that are missing; return the schema's version.

    Args:
        connection: with autocommit, to a primary.
        partitions: of the events, when they are created.

    Raises:
        Invalid: the database's encoding is not UTF8.
        Incompatible: a newer version of Heed has migrated the database.
    """
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise Invalid("", f"the database must have the encoding UTF8; it has {encoding}")
    known = _migrations()
    current = applied_version(connection)
    if current == max(known):
        return current
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        connection.execute(_CREATE)  # type: ignore[arg-type, unused-ignore]
        current = applied_version(connection)  # another process may have been faster
        if current > max(known):
            raise Incompatible(
                f"the database has version {current} of Heed's schema, and this version of Heed "
                f"knows {max(known)}: run a newer Heed"
            )
        for number, statements in known.items():
            if number > current:
                connection.execute(statements.encode())
                if number == 1:
                    _partition(connection, partitions)
                connection.execute("INSERT INTO heed.migrations VALUES (%s)", (number,))
    return max(known)


def is_distributed(connection: psycopg.Connection) -> bool:
    """Report whether the tables, which exist, are distributed over the workers of Citus."""
    has_citus = connection.execute(_HAS_CITUS).fetchone() == (True,)
    return has_citus and connection.execute(_IS_DISTRIBUTED).fetchone() == (True,)


def applied_version(connection: psycopg.Connection) -> int:
    """Return the number of the last migration that was applied; 0 where there was none."""
    if connection.execute("SELECT to_regclass('heed.migrations')").fetchone() == (None,):
        return 0
    row = connection.execute("SELECT coalesce(max(number), 0) FROM heed.migrations").fetchone()
    return 0 if row is None else int(row[0])


def _partition(connection: psycopg.Connection, count: int) -> None:
    for number in range(count):
        connection.execute(
            f"CREATE TABLE heed.events_{number:03d} PARTITION OF heed.events"
            f" FOR VALUES WITH (MODULUS {count}, REMAINDER {number})".encode()
        )
