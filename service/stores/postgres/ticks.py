"""Ticks, by which versions only ever grow: their base, the versions of users, and the horizon.

A tick is made of the id of a transaction, which grows for as long as a server, or a standby that
has everything of it, goes on. It does not where a dump is restored into other servers, which count
for themselves, nor where a standby that lacks something is promoted or a base backup is recovered
to an earlier moment: then ids come again. So the base that is added to all ticks is raised where
the servers are others than before, or are on a newer timeline.

A version is the tick of the user's last change. The index has no versions but ranges of them, which
are the same for changes that follow one another closely: see the migration that made it.

A reader that knows all changes up to the horizon misses none that is committed later.

In PostgreSQL it lies below the oldest transaction in progress. In a distributed database a
transaction is committed in two phases: the coordinator commits it, and only then tells the workers
to commit what they have prepared. In between, or for as long as a worker that was cut off then is
not reached again, the coordinator counts the transaction among those that have ended while a worker
does not show its rows. The coordinator has a record of such a transaction, which its commit made
visible, for each worker on which it wrote; the worker lists what is prepared. So the horizon lies
also below every recorded transaction that is still prepared on its worker, or whose worker does not
answer. Once the record is deleted, the worker has committed.

Three readings follow one another: which transactions are in progress, which are prepared, and then,
by the caller, the rows. A transaction that is not in progress any more at the first one has a
record, and one that is not prepared any more at the second one can be seen at the third.
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

RANGE_BITS = 17  # of a version, that its range leaves out

LAST_VERSION = """\
SELECT version FROM heed.users WHERE namespace_no = %(no)s
 ORDER BY version_range DESC, version DESC LIMIT 1"""
"""Statement that reads the greatest version of all users, and the rows of its range."""

LAST_RANGE = f"""\
SELECT ((max(version_range) + 1) << {RANGE_BITS}) - 1 FROM heed.users WHERE namespace_no = %(no)s"""
"""Statement that reads the end of its range, which no version exceeds, from the index."""

_NAMESPACES = b"SELECT namespace_no FROM heed.namespaces"
# In one namespace, since distributed tables join with no others.
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
        with suppress(errors.InsufficientPrivilege):  # then only the stored ticks tell
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
        # Without a standby this must not wait: a write that waits for one commits later.
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


def changed_between(after: str, until: str | None = None) -> str:
    """Return the condition that users have changed after a tick, up to another.

    Args:
        after: the tick, in SQL.
        until: the other tick, in SQL; None: until now.
    """
    condition = f"version_range >= {after}::bigint >> {RANGE_BITS} AND version > {after}::bigint"
    if until is None:
        return condition
    return (
        f"{condition} AND version_range <= {until}::bigint >> {RANGE_BITS}"
        f" AND version <= {until}::bigint"
    )


_IN_PROGRESS = "pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
# Records hold the lower 32 bits of a transaction's number, as all rows do that it has written.
_PREPARED = """\
SELECT min(next - ((next - record.xmin::text::bigint) & 4294967295))
  FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) AS snapshot,
       run_command_on_workers($command$
         SELECT coalesce(jsonb_agg(gid), '[]') FROM pg_prepared_xacts
          WHERE database = current_database()
       $command$) AS worker JOIN pg_dist_node USING (nodename, nodeport),
       LATERAL (
         SELECT own.xmin FROM jsonb_array_elements_text(CASE WHEN success THEN result::jsonb END)
           AS prepared (gid) JOIN pg_dist_transaction AS own USING (gid)
          WHERE own.groupid = pg_dist_node.groupid
         UNION ALL
         SELECT own.xmin FROM pg_dist_transaction AS own
          WHERE own.groupid = pg_dist_node.groupid AND NOT success) AS record
 WHERE EXISTS (SELECT FROM pg_dist_transaction)"""


UNSEEN = f"SELECT tick_base + {TICKS} * ({_PREPARED}) < :tick FROM heed.installation"
"""Statement that tells whether a worker may not show yet what was committed before a tick."""


def horizon_query(is_distributed: bool) -> str:
    """Return the statement that reads the horizon, without values."""
    first = f"least({_IN_PROGRESS}, ({_PREPARED}))" if is_distributed else _IN_PROGRESS
    return f"SELECT tick_base + {TICKS} * {first} - 1 FROM heed.installation"


async def read_horizon(connection: AsyncConnection, is_distributed: bool) -> int:
    """Return the tick up to which later statements see all changes.

    Transactions of the whole server count.
    """
    row: tuple[Any, ...] | None = await (
        await connection.execute(horizon_query(is_distributed).encode())
    ).fetchone()
    return 0 if row is None else int(row[0])
