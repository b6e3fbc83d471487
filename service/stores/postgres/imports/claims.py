"""Claims of imports on events that were stored before them in a PostgreSQL store.

`events.import_no` is the import that an event goes with; NULL, if it was written without one. Of
the other imports that contain it, each has a claim, as a range of the user's seqs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from service.stores.claim_ranges import claim_ranges, find_claimants
from service.stores.postgres.database.transaction import PostgresTransaction

Place = tuple[int, int, int]
"""Key of an event in the namespace: user_key, timestamp, seq."""

_HAS_IMPORTS = "SELECT FROM heed.imports WHERE namespace_no = %s LIMIT 1"
_OWNERS = """\
SELECT user_key, seq, import_no FROM heed.events
  JOIN unnest(%s::bigint[], %s::bigint[], %s::integer[]) AS place (user_key, timestamp, seq)
       USING (user_key, timestamp, seq)
 WHERE namespace_no = %s AND import_no IS NOT NULL"""
_RELEASE = """\
UPDATE heed.events SET import_no = NULL
  FROM unnest(%s::bigint[], %s::bigint[], %s::integer[]) AS place (user_key, timestamp, seq)
 WHERE namespace_no = %s AND import_no IS NOT NULL AND events.user_key = place.user_key
   AND events.timestamp = place.timestamp AND events.seq = place.seq"""
_ADD = """\
INSERT INTO heed.claims (namespace_no, import_no, user_key, first_seq, last_seq)
SELECT %s, %s, * FROM unnest(%s::bigint[], %s::integer[], %s::integer[])
ON CONFLICT (namespace_no, user_key, import_no, first_seq)
DO UPDATE SET last_seq = greatest(claims.last_seq, excluded.last_seq)"""


async def add_claims(
    transaction: PostgresTransaction, import_no: int | None, stored: Sequence[Place]
) -> None:
    """Claim stored events for an import, or, without one, for good."""
    if not stored or await transaction.row(_HAS_IMPORTS) is None:
        return
    columns = [list(column) for column in zip(*sorted(stored), strict=True)]
    values = (*columns, transaction.namespace_no)
    if import_no is None:
        await transaction.connection.execute(_RELEASE.encode(), values)
        return
    cursor = await transaction.connection.execute(_OWNERS.encode(), values)
    owners = await cursor.fetchall()
    ranges = list(claim_ranges((key, seq) for key, seq, owner in owners if owner != import_no))
    if ranges:
        await transaction.execute(_ADD, import_no, *map(list, zip(*ranges, strict=True)))


async def claimants(
    transaction: PostgresTransaction, user_key: int, seqs: Iterable[int]
) -> dict[int, int]:
    """Return one import that claims the event, for each of a user's seqs that has any."""
    ranges = await transaction.rows(
        "SELECT first_seq, last_seq, import_no FROM heed.claims"
        " WHERE namespace_no = %s AND user_key = %s ORDER BY first_seq",
        user_key,
    )
    return find_claimants([(first, last, no) for first, last, no in ranges], seqs)


async def drop_claims(transaction: PostgresTransaction, import_no: int) -> None:
    """Delete the claims of an import."""
    await transaction.execute(
        "DELETE FROM heed.claims WHERE namespace_no = %s AND import_no = %s", import_no
    )
