"""The installation in a database: opened with its schema and ticks up to date, or refused."""

from __future__ import annotations

from psycopg import Connection

from service.domain.errors import Conflict, Corrupt
from service.stores.postgres.database.migrations import migrate
from service.stores.postgres.database.ticks.base import raise_base

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
            "with that backup again, which goes on, or drop the database and create it anew"
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
