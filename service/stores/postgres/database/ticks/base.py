"""Ticks: numbers of transactions, by which versions only ever grow.

A tick is made of the id of a transaction, which grows for as long as a server, or a standby that
has everything of it, goes on. It does not where a dump is restored into other servers, which count
for themselves, nor where a standby that lacks something is promoted or a base backup is recovered
to an earlier moment: then ids come again. So the base that is added to all ticks is raised where
the servers are others than before, or are on a newer timeline.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from psycopg import AsyncConnection, Connection, errors

from service.stores.postgres.database.ticks.versions import LAST_RANGE, LAST_VERSION

TICKS = 1_024  # numbers of one transaction: more than transactions can be in progress

# Versions that were given out and lost are in the caches of replicas, and must not come again with
# other content: this leaves room for a billion lost transactions.
MARGIN = TICKS << 30

# The number of a timeline is the beginning of the names of its files. 0: not a primary.
TIMELINE = b"""\
SELECT system_identifier, CASE WHEN pg_is_in_recovery() THEN 0
       ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END,
       pg_postmaster_start_time()
  FROM pg_control_system()"""

_NAMESPACES = b"SELECT namespace_no FROM heed.namespaces"
# Of one namespace, since distributed tables join with no others.
_STORED = """\
SELECT greatest(
         (SELECT greatest(catalogue, keys, names) FROM heed.namespaces WHERE namespace_no = %(no)s),
         (%s),
         (SELECT max(change) FROM heed.gone_users WHERE namespace_no = %(no)s),
         (SELECT max(change) FROM heed.items WHERE namespace_no = %(no)s),
         (SELECT max(written) FROM heed.copies WHERE namespace_no = %(no)s), 0)"""
_EXACTLY, _AT_MOST = (_STORED.replace("%s", users) for users in (LAST_VERSION, LAST_RANGE))
_LOCAL = b"SET LOCAL synchronous_commit = local"
# Nothing that is stored is as high as the next tick, unless it comes from other servers. Without a
# row to change, the statement takes no transaction id.
_RAISE = f"""\
WITH found AS (
  SELECT %(system)s::bigint AS system, %(timeline)s::integer AS line, %(stored)s::bigint AS stored,
         {TICKS} * pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next)
UPDATE heed.installation
   SET tick_base = CASE WHEN stored >= tick_base + next OR system <> system_identifier
                             OR line > timeline
                        THEN greatest(tick_base, stored + {MARGIN} - next) ELSE tick_base END,
       system_identifier = coalesce(system, system_identifier),
       timeline = coalesce(line, timeline)
  FROM found
 WHERE stored >= tick_base + next OR system <> system_identifier OR line > timeline
    OR system_identifier IS NULL AND system IS NOT NULL"""


def raise_base(connection: Connection, row: tuple[Any, ...] | None = None) -> None:
    """Raise the base of ticks where ids of transactions may come again.

    Args:
        connection: with autocommit, to a primary whose schema is up to date.
        row: as `TIMELINE` returned it; read where it is not given.
    """
    if row is None:
        with suppress(errors.InsufficientPrivilege):  # then the stored ticks alone tell
            row = connection.execute(TIMELINE).fetchone()
    with connection.transaction():
        connection.execute(_LOCAL)
        stored = 0
        for namespace in connection.execute(_NAMESPACES).fetchall():
            values = {"no": namespace[0]}
            try:
                with connection.transaction():
                    found = connection.execute(_EXACTLY.encode(), values).fetchone()
            except errors.DataCorrupted:  # which a database is opened with, to say where
                found = connection.execute(_AT_MOST.encode(), values).fetchone()
            stored = max(stored, *(found or (0,)))
        connection.execute(_RAISE.encode(), _values(row, stored))


async def raise_base_async(connection: AsyncConnection, row: tuple[Any, ...]) -> None:
    """Do as `raise_base` does, on a connection of an event loop."""
    async with connection.transaction():
        # Without a standby this must not wait: whoever waits for one has it in what comes later.
        await connection.execute(_LOCAL)
        stored = 0
        for namespace in await (await connection.execute(_NAMESPACES)).fetchall():
            values = {"no": namespace[0]}
            try:
                async with connection.transaction():
                    cursor = await connection.execute(_EXACTLY.encode(), values)
            except errors.DataCorrupted:
                cursor = await connection.execute(_AT_MOST.encode(), values)
            stored = max(stored, *(await cursor.fetchone() or (0,)))
        await connection.execute(_RAISE.encode(), _values(row, stored))


def _values(row: tuple[Any, ...] | None, stored: int) -> dict[str, Any]:
    return {"system": row and row[0], "timeline": row and row[1], "stored": stored}
