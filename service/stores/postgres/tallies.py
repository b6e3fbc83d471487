"""Counts of a PostgreSQL store: users, events, bytes, and events by item.

A count is the sum of rows. Each change adds rows of its own, so that no writer waits for another,
and `fold` replaces them by sums.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from service.stores.jobs import Insert, Job, Run
from service.stores.quota import StoreUsage

NO_ITEM = 0
FOLD_FROM = 20_000  # rows of one namespace

_POPULARITY = """\
SELECT item_id, votes FROM (
  SELECT item_no, sum(events)::bigint AS events, sum(events - dislikes)::bigint AS votes
    FROM heed.tallies WHERE $here AND item_no > 0 GROUP BY item_no) AS counted
  JOIN heed.items ON $here(items) AND items.item_no = counted.item_no
 WHERE events > 0 ORDER BY counted.item_no"""
# Summed before they are joined, so that workers of a distributed database send sums and no rows.
_USAGE = """\
SELECT coalesce(events, 0)::bigint, items, coalesce(bytes, 0)::bigint, item_bytes,
       coalesce(users, 0)::bigint
  FROM heed.namespaces,
       (SELECT sum(events) AS events, sum(bytes) AS bytes, sum(users) AS users
          FROM heed.tallies WHERE $here) AS summed
 WHERE $here"""
_TAKE = """\
DELETE FROM heed.tallies WHERE $here
RETURNING item_no, users, events, dislikes, bytes"""


def popularity() -> Job[tuple[list[str], NDArray[np.int64]]]:
    """`Store.popularity`."""
    rows = yield Run(_POPULARITY)
    counts = np.fromiter((votes for _, votes in rows), np.int64, len(rows))
    return [item_id for item_id, _ in rows], counts


def counts() -> Job[dict[str, int]]:
    """`Store.counts`."""
    rows = yield Run(_USAGE)
    events, items, _, _, users = rows[0] if rows else (0, 0, 0, 0, 0)
    return {"users": users, "items": items, "events": events}


def usage() -> Job[StoreUsage]:
    """Read the contents of the store, with those of the transaction."""
    rows = yield Run(_USAGE)
    events, items, size, item_bytes, _ = rows[0] if rows else (0, 0, 0, 0, 0)
    return StoreUsage(events, items, size + item_bytes)


def fold() -> Job[None]:
    """Replace rows by their sums, where they are many. No other transaction may fold."""
    ((count,),) = yield Run("SELECT count(*) FROM heed.tallies WHERE $here")
    if count < FOLD_FROM:
        return
    rows = yield Run(_TAKE)
    numbers = np.array(rows, np.int64).reshape(-1, 5)
    item_nos, codes = np.unique(numbers[:, 0], return_inverse=True)
    sums = np.zeros((len(item_nos), 4), np.int64)
    np.add.at(sums, codes, numbers[:, 1:])
    kept = np.flatnonzero(np.any(sums != 0, axis=1))
    yield Insert(
        "tallies",
        "user_key item_no users events dislikes bytes",
        [(0, *row) for row in np.column_stack((item_nos[kept], sums[kept])).tolist()],
        key="user_key",
    )
