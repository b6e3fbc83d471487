"""The horizon of a database: the tick up to which every transaction has ended and can be seen.

A reader that knows all changes up to the horizon misses none that is committed later.

In PostgreSQL it lies below the oldest transaction in progress. In a distributed database a
transaction is committed in two phases: the coordinator commits it, and only then tells the workers
to commit what they have prepared. In between, or for as long as a worker that was cut off then is
not reached again, the coordinator counts the transaction among those that have ended while a worker
does not show its rows. Of such a transaction the coordinator has a record, which its commit made
visible, for each worker on which it wrote; the worker lists what is prepared. So the horizon lies
also below every recorded transaction that is still prepared on its worker, or whose worker does not
answer. Where the record is deleted, the worker has committed.

Three readings follow one another: which transactions are in progress, which are prepared, and then,
by the caller, the rows. What was not in progress any more at the first one has a record, and what
is not prepared any more at the second one can be seen at the third.
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from service.stores.postgres.database.ticks.base import TICKS

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
