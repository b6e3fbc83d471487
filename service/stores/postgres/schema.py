"""The schema of a PostgreSQL database: migrated, and refused while a restore is unfinished.

Each file of `migrations/` is applied once, in one transaction with its record. Heed's tables are
in the schema `heed`, beside whatever else the database holds.
"""

from __future__ import annotations

from importlib.resources import files

import psycopg
from psycopg import Connection

from service.domain.errors import Conflict, Corrupt, Incompatible, Invalid
from service.stores.postgres.ticks import raise_base

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


_RESTORING = b"SELECT restoring FROM heed.installation"


def open_installation(connection: Connection, *, restoring: str | None = None) -> None:
    """Bring the schema of a database, and the base of its ticks, up to date.

    Args:
        connection: with autocommit, to a primary.
        restoring: the backup whose restore opens it; others are refused until that is finished.

    Raises:
        Invalid, Incompatible: as `migrate`.
        Corrupt: the database holds part of a backup.
    """
    migrate(connection)
    raise_base(connection)
    found = unfinished_restore(connection)
    if found is not None and found != restoring:
        raise Corrupt(
            f"the database holds a part of {found}: its restore was interrupted. Run heed restore "
            "with that backup again, which goes on, or drop the database and create it again"
        )


def unfinished_restore(connection: Connection) -> str | None:
    """Return the backup whose restore was begun and not finished, None where there is none."""
    row = connection.execute(_RESTORING).fetchone()
    return None if row is None else row[0]


def begin_restore(connection: Connection, backup: str) -> None:
    """Refuse the database to everybody but the restore of a backup, until it is finished.

    The caller must have found the database empty, or holding a part of this backup.

    Raises:
        Conflict: another process has begun to restore another backup.
    """
    changed = connection.execute(
        b"UPDATE heed.installation SET restoring = %s WHERE coalesce(restoring, %s) = %s",
        (backup, backup, backup),
    )
    if not changed.rowcount:
        raise Conflict("another backup is being restored into the database")


def finish_restore(connection: Connection) -> None:
    """Open the database to everybody."""
    connection.execute(b"UPDATE heed.installation SET restoring = NULL")
