"""Record of the copy that a namespace of a PostgreSQL store is the target of.

Every change of users, events, items and keys leaves its tick somewhere, which tells whether
anything but the copy has written.
"""

from __future__ import annotations

from psycopg import Connection

from service.domain.errors import Conflict
from service.stores.postgres.database.ticks.base import TICKS
from service.stores.postgres.database.ticks.versions import LAST_VERSION
from service.stores.postgres.database.transaction import PostgresTransaction
from service.stores.values import CopyRecord

_LAST_CHANGE = f"""\
greatest(({LAST_VERSION}),
         (SELECT max(change) FROM heed.gone_users WHERE namespace_no = %(no)s),
         (SELECT greatest(catalogue, keys, names) FROM heed.namespaces
           WHERE namespace_no = %(no)s))"""
_READ = "SELECT origin, position, written, is_whole FROM heed.copies WHERE namespace_no = %s"
_NOT_WHOLE = "SELECT FROM heed.copies WHERE namespace_no = %s AND is_whole IS DISTINCT FROM true"
_LOCK = "SELECT written FROM heed.copies WHERE namespace_no = %s FOR UPDATE"


def read(connection: Connection, namespace_no: int) -> tuple[CopyRecord, int] | None:
    """Return the record and the last number of the copy; None without a record."""
    values = {"no": namespace_no}
    found = connection.execute(_READ.encode(), (namespace_no,)).fetchone()
    changed = connection.execute(f"SELECT {_LAST_CHANGE}".encode(), values).fetchone()
    if found is None or changed is None:
        return None
    origin, position, written, is_whole = found
    is_untouched = changed[0] <= written
    if is_whole is None:  # written by an earlier Heed
        is_whole = not (position and is_untouched)
    return CopyRecord(origin, position, is_untouched, is_whole), written


def unfinished(connection: Connection, namespace_no: int) -> str | None:
    """Return the origin of an unfinished copy; None without one."""
    if connection.execute(_NOT_WHOLE.encode(), (namespace_no,)).fetchone() is None:
        return None  # no need to look at the changes
    found = read(connection, namespace_no)
    return None if found is None or found[0].is_whole else found[0].origin


async def begin(transaction: PostgresTransaction, origin: str) -> int:
    """`BulkAccess.begin_copy`; return the last number of the transaction."""
    written = transaction.tick() + TICKS - 1
    await transaction.execute(
        "INSERT INTO heed.copies (namespace_no, origin, position, written, is_whole)"
        " VALUES (%s, %s, '', %s, false)",
        origin,
        written,
    )
    return written


async def mark(transaction: PostgresTransaction, *, is_whole: bool) -> None:
    """Record whether the copy is whole."""
    await transaction.connection.execute(
        b"UPDATE heed.copies SET is_whole = %s WHERE namespace_no = %s",
        (is_whole, transaction.namespace_no),
    )


async def check(transaction: PostgresTransaction, written: int) -> None:
    """Raise `Conflict` unless the last change of the store is the copy's own."""
    row = await transaction.row(_LOCK)
    values = {"no": transaction.namespace_no}
    cursor = await transaction.connection.execute(f"SELECT {_LAST_CHANGE}".encode(), values)
    ((changed,),) = await cursor.fetchall()
    if row != (written,) or changed > written:
        raise Conflict("the target was changed by something else while it was copied to")


async def record(transaction: PostgresTransaction, position: str | None = None) -> int:
    """Record a change of the copy, and its position if it has moved; return the last number."""
    written = transaction.tick() + TICKS - 1
    await transaction.connection.execute(
        b"UPDATE heed.copies SET written = %s, position = coalesce(%s, position)"
        b" WHERE namespace_no = %s",
        (written, position, transaction.namespace_no),
    )
    return written
