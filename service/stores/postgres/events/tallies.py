"""Counts of a PostgreSQL store: users, events, bytes, and events by item.

A count is the sum of rows. Each change adds rows of its own, so that no writer waits for another,
and `fold` replaces them by sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncConnection

from service.domain.records import NEGATIVE
from service.stores.postgres.database.arrays import bigints, integers
from service.stores.postgres.database.transaction import NamespaceTransaction
from service.stores.quota import StoreUsage

EVENT_BYTES = 280  # of an event with its ids and indexes, measured
USER_BYTES = 400
ITEM_BYTES = 300  # beside the document and the embedding
NO_ITEM = 0
FOLD_FROM = 20_000  # rows of one namespace

_ADD = """\
INSERT INTO heed.tallies (namespace_no, user_key, users, bytes, item_no, events, dislikes)
SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::bigint[],
                             %s::bigint[])"""
_POPULARITY = b"""\
SELECT item_id, votes FROM (
  SELECT item_no, sum(events)::bigint AS events, sum(events - dislikes)::bigint AS votes
    FROM heed.tallies WHERE namespace_no = %(no)s AND item_no > 0 GROUP BY item_no) AS counted
  JOIN heed.items ON items.namespace_no = %(no)s AND items.item_no = counted.item_no
 WHERE events > 0 ORDER BY counted.item_no"""
# Summed before they are joined, so that workers of a distributed database send sums and no rows.
_USAGE = b"""\
SELECT coalesce(events, 0)::bigint, items, coalesce(bytes, 0)::bigint, item_bytes,
       coalesce(users, 0)::bigint
  FROM heed.namespaces,
       (SELECT sum(events) AS events, sum(bytes) AS bytes, sum(users) AS users
          FROM heed.tallies WHERE namespace_no = %(no)s) AS summed
 WHERE namespace_no = %(no)s"""
_COUNT_ROWS = "SELECT count(*) FROM heed.tallies WHERE namespace_no = %s"
_TAKE = """\
DELETE FROM heed.tallies WHERE namespace_no = %s
RETURNING item_no, users, events, dislikes, bytes"""


@dataclass
class Tally:
    """What one change adds to the counts, or takes from them."""

    users: int = 0
    bytes: int = 0
    items: dict[int, list[int]] = field(default_factory=dict)  # all and negative ones by item_no

    def add(self, item_no: int, is_negative: bool, events: int = 1) -> None:
        """Count events on an item; fewer than 0 are taken from it."""
        count = self.items.setdefault(item_no, [0, 0])
        count[0] += events
        count[1] += events * is_negative


async def add_tallies(transaction: NamespaceTransaction, user_key: int, tally: Tally) -> None:
    """Add a change to the counts."""
    rows = [(0, 0, item_no, *counts) for item_no, counts in tally.items.items() if any(counts)]
    if tally.users or tally.bytes:
        rows.append((tally.users, tally.bytes, NO_ITEM, 0, 0))
    if rows:
        await _add(transaction, user_key, np.array(rows, np.int64))


async def negative_types(transaction: NamespaceTransaction) -> frozenset[int]:
    """Return the numbers of the negative types that the namespace has had."""
    rows = await transaction.rows(
        "SELECT type_no FROM heed.types WHERE namespace_no = %s AND type = ANY(%s)",
        sorted(NEGATIVE),
    )
    return frozenset(int(number) for (number,) in rows)


async def popularity(
    connection: AsyncConnection, namespace_no: int
) -> tuple[list[str], NDArray[np.int64]]:
    """`Store.popularity`."""
    cursor = await connection.execute(_POPULARITY, {"no": namespace_no}, binary=True)
    rows = await cursor.fetchall()
    counts = np.fromiter((votes for _, votes in rows), np.int64, len(rows))
    return [item_id for item_id, _ in rows], counts


async def counts(connection: AsyncConnection, namespace_no: int) -> dict[str, int]:
    """`Store.counts`."""
    events, items, _, _, users = await _sums(connection, namespace_no)
    return {"users": users, "items": items, "events": events}


async def usage(transaction: NamespaceTransaction) -> StoreUsage:
    """Read the contents of the store, with those of the transaction."""
    events, items, own, item_bytes, _ = await _sums(
        transaction.connection, transaction.namespace_no
    )
    return StoreUsage(events, items, own + item_bytes)


async def fold(transaction: NamespaceTransaction) -> None:
    """Replace rows by their sums, where they are many. No other transaction may fold."""
    found = await transaction.row(_COUNT_ROWS)
    if found is None or found[0] < FOLD_FROM:
        return
    rows = await transaction.rows(_TAKE)
    numbers = np.array(rows, np.int64).reshape(-1, 5)
    item_nos, codes = np.unique(numbers[:, 0], return_inverse=True)
    sums = np.zeros((len(item_nos), 4), np.int64)
    np.add.at(sums, codes, numbers[:, 1:])
    kept = np.flatnonzero(np.any(sums != 0, axis=1))
    users, events, dislikes, own = sums[kept].T
    await _add(transaction, 0, np.stack((users, own, item_nos[kept], events, dislikes), axis=1))


async def _add(transaction: NamespaceTransaction, user_key: int, rows: NDArray[np.int64]) -> None:
    """Insert rows [n, 5]: users, bytes, item_no, events and dislikes."""
    users, own, item_nos, events, dislikes = rows.T
    columns = (bigints(users), bigints(own), integers(item_nos), bigints(events))
    await transaction.execute(_ADD, user_key, *columns, bigints(dislikes))


async def _sums(connection: AsyncConnection, namespace_no: int) -> tuple[int, ...]:
    cursor = await connection.execute(_USAGE, {"no": namespace_no}, binary=True)
    row = await cursor.fetchone()
    return (0, 0, 0, 0, 0) if row is None else tuple(row)
