"""Forgetting in a PostgreSQL store: the user's rows, their names, and the ledger.

Deleted rows stay in the files of the server until it vacuums them, and in its write-ahead log and
base backups for as long as the operator keeps these.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from psycopg import AsyncConnection

from service.stores.encoding import cursor_of, position_of
from service.stores.event_identity import user_key
from service.stores.postgres.database.ticks.horizon import has_unseen, read_horizon
from service.stores.postgres.database.ticks.versions import changed_between
from service.stores.postgres.database.transaction import Changed, NamespaceTransaction
from service.stores.postgres.events.names import INTERNED, Interned
from service.stores.postgres.events.tallies import (
    EVENT_BYTES,
    USER_BYTES,
    Tally,
    add_tallies,
    negative_types,
)
from service.stores.protocols.forgetting_ledger import ForgottenUser, user_digest

Unused = dict[Interned, list[int]]
"""Numbers of names that no event uses, by table."""

_SALT_BYTES = 16
_ENTRIES = "SELECT digest, salt, forgotten, events FROM heed.forgotten WHERE namespace_no = %s"
_LOCK_USER = """\
SELECT user_no, octet_length(profile) FROM heed.users
 WHERE namespace_no = %s AND user_key = %s AND user_id = %s FOR UPDATE"""
_COUNT_NAMES = """\
SELECT item_no, type_no, count(*) FROM heed.events
 WHERE namespace_no = %(no)s AND user_key = %(key)s GROUP BY item_no, type_no"""
_DELETE_IDS = """\
WITH gone AS (
  DELETE FROM heed.event_ids WHERE namespace_no = %(no)s AND event_key = ANY(ARRAY(
    SELECT event_key FROM heed.events WHERE namespace_no = %(no)s AND user_key = %(key)s))
  RETURNING 1)
SELECT count(*) FROM gone"""
_DELETE_EVENTS = """\
WITH gone AS (DELETE FROM heed.events WHERE namespace_no = %(no)s AND user_key = %(key)s
              RETURNING 1)
SELECT count(*) FROM gone"""
_DELETE_VECTORS = """\
WITH gone AS (DELETE FROM heed.vectors WHERE namespace_no = %(no)s AND user_key = %(key)s
              RETURNING coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0) AS size)
SELECT coalesce(sum(size), 0)::bigint FROM gone"""
_DROP = (
    "DELETE FROM heed.claims WHERE namespace_no = %(no)s AND user_key = %(key)s",
    "DELETE FROM heed.replaced_profiles WHERE namespace_no = %(no)s AND user_key = %(key)s",
    "DELETE FROM heed.users WHERE namespace_no = %(no)s AND user_key = %(key)s",
    """\
INSERT INTO heed.gone_users (namespace_no, user_key, user_no, change)
VALUES (%(no)s, %(key)s, %(user_no)s, %(tick)s)""",
)
_NOTE = """\
INSERT INTO heed.unused_names (namespace_no, kind, number, noted)
SELECT namespace_no, 'items', item_no, %(tick)s FROM heed.items
 WHERE namespace_no = %(no)s AND item_no = ANY(%(items)s::integer[]) AND change IS NULL
UNION ALL
SELECT %(no)s, 'types', type_no, %(tick)s FROM unnest(%(types)s::integer[]) AS type_no
ON CONFLICT (namespace_no, kind, number) DO UPDATE SET noted = excluded.noted"""


# ------------------------------------------------------------------------------ changes


async def forget(transaction: NamespaceTransaction, user_id: str, now: int) -> int:
    """`Store.forget`."""
    key = user_key(user_id)
    user = await transaction.row(_LOCK_USER, key, user_id)
    if user is None:
        return 0
    values = {"no": transaction.namespace_no, "key": key, "tick": transaction.tick}
    execute = transaction.connection.execute
    names = await (await execute(_COUNT_NAMES.encode(), values)).fetchall()
    await note_names(transaction, [row[0] for row in names], [row[1] for row in names])
    negative, tally = await negative_types(transaction), Tally()
    for item_no, type_no, count_ in names:
        tally.add(item_no, type_no in negative, -count_)
    ((ids,),) = await (await execute(_DELETE_IDS.encode(), values)).fetchall()
    ((events,),) = await (await execute(_DELETE_EVENTS.encode(), values)).fetchall()
    if ids != events:
        raise Changed  # ids of a transaction that cannot be seen everywhere yet
    ((size,),) = await (await execute(_DELETE_VECTORS.encode(), values)).fetchall()
    tally.bytes = -EVENT_BYTES * events - size
    await add_tallies(transaction, key, tally)
    await drop_user(transaction, key, user[0], user[1] or 0)
    salt = await transaction.row("SELECT salt FROM heed.forgotten WHERE namespace_no = %s LIMIT 1")
    own = os.urandom(_SALT_BYTES) if salt is None else salt[0]
    await add_entries(transaction, [ForgottenUser(user_digest(own, user_id), own, now, events)])
    return int(events)


async def drop_user(
    transaction: NamespaceTransaction, key: int, user_no: int, profile_bytes: int
) -> None:
    """Delete a user without events, with the profiles that imports have replaced and claims."""
    values = {
        "no": transaction.namespace_no,
        "key": key,
        "user_no": user_no,
        "tick": transaction.tick,
    }
    for statement in _DROP:
        await transaction.connection.execute(statement.encode(), values)
    await add_tallies(transaction, key, Tally(users=-1, bytes=-USER_BYTES - profile_bytes))


async def note_names(
    transaction: NamespaceTransaction, items: Collection[int], types: Collection[int]
) -> None:
    """Note the numbers of names that deleted events used."""
    values = {
        "no": transaction.namespace_no,
        "tick": transaction.tick,
        "items": sorted(set(items)),
        "types": sorted(set(types)),
    }
    await transaction.connection.execute(_NOTE.encode(), values)


async def add_entries(transaction: NamespaceTransaction, entries: Sequence[ForgottenUser]) -> None:
    """Add entries to the ledger; those that it has are left out."""
    if entries:
        columns = map(list, zip(*entries, strict=True))
        await transaction.execute(
            "INSERT INTO heed.forgotten (namespace_no, digest, salt, forgotten, events)"
            " SELECT %s, * FROM unnest(%s::bytea[], %s::bytea[], %s::bigint[], %s::bigint[])"
            " ON CONFLICT DO NOTHING",
            *columns,
        )


async def forget_entry(
    transaction: NamespaceTransaction, user_id: str, entry: ForgottenUser, now: int
) -> int | None:
    """Forget a user for an entry of another ledger, and add it; None if the user is unknown."""
    known = await transaction.row(_LOCK_USER, user_key(user_id), user_id)
    events = await forget(transaction, user_id, now)
    await add_entries(transaction, [entry])
    return None if known is None else events


# ------------------------------------------------------------------------------ names


async def has_noted_names(connection: AsyncConnection, namespace_no: int) -> bool:
    """Report whether there are names to be looked at."""
    cursor = await connection.execute(
        b"SELECT FROM heed.unused_names WHERE namespace_no = %s LIMIT 1", (namespace_no,)
    )
    return await cursor.fetchone() is not None


async def find_unused(
    connection: AsyncConnection, namespace_no: int, is_distributed: bool
) -> tuple[int, int, Unused]:
    """Return the noted names that no event uses.

    Returns:
        The tick up to which names were noted, the tick up to which no event used them, and their
        numbers.
    """
    since = await read_horizon(connection, is_distributed)
    cursor = await connection.execute(
        b"SELECT kind, number, noted FROM heed.unused_names WHERE namespace_no = %s",
        (namespace_no,),
    )
    rows = await cursor.fetchall()
    unused: Unused = {}
    for table in INTERNED:
        numbers = [number for kind, number, _ in rows if kind == table]
        unused[table] = await _without_events(connection, namespace_no, table, numbers, None)
    return max((noted for _, _, noted in rows), default=0), since, unused


async def delete_names(
    transaction: NamespaceTransaction, noted: int, since: int, unused: Unused
) -> bool:
    """Delete names that no event used up to the tick `since`, and that none uses now.

    Returns False, with nothing deleted, where events may be stored that cannot be seen yet.

    Args:
        transaction: that holds the lock of names alone, so that no event is appended meanwhile.
        noted: the tick up to which noted names were looked at.
        since: as `find_unused` returned it.
        unused: likewise.
    """
    connection, no = transaction.connection, transaction.namespace_no
    if transaction.is_distributed and await has_unseen(connection, transaction.tick):
        return False
    for table, (number, _) in INTERNED.items():
        numbers = await _without_events(connection, no, table, unused[table], since)
        extra = "AND change IS NULL AND document IS NULL" if table == "items" else ""
        await transaction.execute(
            f"DELETE FROM heed.{table} WHERE namespace_no = %s"  # noqa: S608
            f" AND {number} = ANY(%s::integer[]) {extra}",
            numbers,
        )
    # InternedNames that were noted since are looked at the next time.
    await transaction.execute(
        "DELETE FROM heed.unused_names WHERE namespace_no = %s AND noted <= %s", noted
    )
    await connection.execute(
        b"UPDATE heed.namespaces SET names = %s WHERE namespace_no = %s", (transaction.tick, no)
    )
    return True


async def _without_events(
    connection: AsyncConnection,
    namespace_no: int,
    table: Interned,
    numbers: list[int],
    since: int | None,
) -> list[int]:
    """Return the numbers that no event uses, or none of users who changed after a tick."""
    if not numbers:
        return []
    column, _ = INTERNED[table]
    source = "heed.events" if since is None else "heed.users JOIN heed.events USING (%s)"
    changed = "" if since is None else f"AND {changed_between(str(since))}"
    cursor = await connection.execute(
        f"SELECT DISTINCT {column} FROM {source.replace('%s', 'namespace_no, user_key')}"  # noqa: S608
        f" WHERE namespace_no = %s AND {column} = ANY(%s::integer[]) {changed}".encode(),
        (namespace_no, numbers),
    )
    used = {number for (number,) in await cursor.fetchall()}
    return [number for number in numbers if number not in used]


# ------------------------------------------------------------------------------ ledger


async def page(
    connection: AsyncConnection, namespace_no: int, cursor: str | None, limit: int
) -> tuple[list[ForgottenUser], str | None]:
    """`ForgettingLedger.page_forgotten`."""
    time, digest = (-1, "") if cursor is None else position_of(cursor, int, str)
    rows = await (
        await connection.execute(
            f"{_ENTRIES} AND (forgotten, encode(digest, 'hex')) > (%s, %s)"
            " ORDER BY forgotten, encode(digest, 'hex') LIMIT %s".encode(),
            (namespace_no, time, digest, limit + 1),
        )
    ).fetchall()
    found = [ForgottenUser(*row) for row in rows]
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    return found[:limit], cursor_of(last.forgotten, last.digest.hex())


async def find(connection: AsyncConnection, namespace_no: int, user_id: str) -> list[ForgottenUser]:
    """`ForgettingLedger.find_forgotten`."""
    salts: list[tuple[Any, ...]] = await (
        await connection.execute(
            b"SELECT DISTINCT salt FROM heed.forgotten WHERE namespace_no = %s", (namespace_no,)
        )
    ).fetchall()
    digests = [user_digest(salt, user_id) for (salt,) in salts]
    rows = await (
        await connection.execute(
            f"{_ENTRIES} AND digest = ANY(%s) ORDER BY forgotten".encode(),
            (namespace_no, digests),
        )
    ).fetchall()
    return [ForgottenUser(*row) for row in rows]


async def count(connection: AsyncConnection, namespace_no: int, since: int) -> int:
    """`ForgettingLedger.count_forgotten`."""
    cursor = await connection.execute(
        b"SELECT count(*) FROM heed.forgotten WHERE namespace_no = %s AND forgotten >= %s",
        (namespace_no, since),
    )
    row = await cursor.fetchone()
    return 0 if row is None else int(row[0])


async def unknown_entries(
    connection: AsyncConnection, namespace_no: int, entries: Sequence[ForgottenUser]
) -> list[ForgottenUser]:
    """Return the entries that the ledger does not have."""
    cursor = await connection.execute(
        b"SELECT digest, forgotten FROM heed.forgotten"
        b" WHERE namespace_no = %s AND digest = ANY(%s)",
        (namespace_no, [entry.digest for entry in entries]),
    )
    known = set(await cursor.fetchall())
    return [each for each in entries if (each.digest, each.forgotten) not in known]
