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

# Each is the end of an index.
_STORED = """\
SELECT coalesce(max(greatest(
         catalogue, keys, names,
         (SELECT max(version) FROM heed.users AS one WHERE one.namespace_no = each.namespace_no),
         (SELECT max(change) FROM heed.gone_users AS one
           WHERE one.namespace_no = each.namespace_no),
         (SELECT max(change) FROM heed.items AS one WHERE one.namespace_no = each.namespace_no),
         (SELECT max(written) FROM heed.copies AS one
           WHERE one.namespace_no = each.namespace_no))), 0)
  FROM heed.namespaces AS each"""
_LOCAL = b"SET LOCAL synchronous_commit = local"
# Nothing that is stored is as high as the next tick, unless it comes from other servers. Without a
# row to change, the statement takes no transaction id.
_RAISE = f"""\
WITH found AS (
  SELECT %(system)s::bigint AS system, %(timeline)s::integer AS line, ({_STORED}) AS stored,
         {TICKS} * pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next)
UPDATE heed.installation
   SET tick_base = CASE WHEN stored >= tick_base + next OR system <> system_identifier
                             OR line > timeline
                        THEN greatest(tick_base, stored + {MARGIN} - next) ELSE tick_base END,
       system_identifier = coalesce(system, system_identifier),
       timeline = coalesce(line, timeline)
  FROM found
 WHERE stored >= tick_base + next OR system <> system_identifier OR line > timeline
    OR system_identifier IS NULL AND system IS NOT NULL"""  # noqa: S608


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
        connection.execute(_RAISE.encode(), _values(row))


async def raise_base_async(connection: AsyncConnection, row: tuple[Any, ...]) -> None:
    """Do as `raise_base` does, on a connection of an event loop."""
    async with connection.transaction():
        # Without a standby this must not wait: whoever waits for one has it in what comes later.
        await connection.execute(_LOCAL)
        await connection.execute(_RAISE.encode(), _values(row))


def _values(row: tuple[Any, ...] | None) -> dict[str, Any]:
    return {"system": row and row[0], "timeline": row and row[1]}
