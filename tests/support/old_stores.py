"""SQLite stores with the schemas of earlier versions."""

from __future__ import annotations

from pathlib import Path

import apsw

from service.stores.sqlite.database_file import checksum_vfs

ADDED = {  # by the migration to a version
    2: "DROP TABLE imports; DROP TABLE replaced; ALTER TABLE events DROP COLUMN import_no",
    3: "DROP INDEX users_by_version; DROP TABLE gone_users",
    4: "DROP TABLE scenarios",
    5: "DROP TABLE claims",
    6: "DROP TABLE keys; DROP TABLE forgotten; DROP TABLE unused_names; DROP TABLE popularity;"
    "ALTER TABLE state DROP COLUMN scrub; ALTER TABLE state DROP COLUMN names;"
    "ALTER TABLE state DROP COLUMN last_item; ALTER TABLE state DROP COLUMN last_type",
    7: "ALTER TABLE keys DROP COLUMN namespace_id",
}


def to_version(path: Path, version: int) -> None:
    """Give a closed store the schema of an earlier version, without what came after it."""
    connection = apsw.Connection(str(path), vfs=checksum_vfs())
    for later in range(connection.pragma("user_version"), version, -1):
        connection.execute(ADDED[later])
    connection.pragma("user_version", version)
    connection.close()
