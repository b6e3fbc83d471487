"""Forgetting in a SQLite store: the user's rows, their names, and the ledger.

Deleted rows are overwritten in the database (`secure_delete`), but the write-ahead log still holds
earlier pages: `Transaction.scrub` has the writer empty it. Names that were interned for events are
candidates for deletion once a user of them is forgotten. Finding out needs a look at all events,
which `collect_names` takes later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import apsw
import numpy as np

from service.stores.encoding import cursor_of, position_of
from service.stores.sqlite.imports.import_claims import drop_claims_on
from service.stores.sqlite.reads import INTERNED, read_transaction
from service.stores.sqlite.registers.popularity import discount_user
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.values import ForgottenUser, user_digest

Interned = Literal["items", "types"]
Unused = dict[Interned, set[int]]
"""Numbers of names that no event uses, by table."""

_SALT_BYTES = 16
_ENTRIES = "SELECT digest, salt, forgotten, events FROM forgotten"
_TABLES: tuple[Interned, ...] = ("items", "types")


# ------------------------------------------------------------------------------ changes


def forget(transaction: SQLiteTransaction, user_id: str, now: int) -> int:
    """`Store.forget`."""
    connection = transaction.connection
    user_no = connection.execute("SELECT user_no FROM users WHERE user_id = ?", (user_id,)).get
    if user_no is None:
        return 0
    events = delete_user(transaction, user_no)
    salt = connection.execute("SELECT salt FROM forgotten LIMIT 1").get or os.urandom(_SALT_BYTES)
    add_entries(transaction, [ForgottenUser(user_digest(salt, user_id), salt, now, events)])
    return events


def delete_user(transaction: SQLiteTransaction, user_no: int) -> int:
    """Delete a user with everything that is stored of them; return the number of events."""
    connection = transaction.connection
    note_names(transaction, "user_no = ?", (user_no,))
    discount_user(transaction, user_no)
    connection.execute("DELETE FROM events WHERE user_no = ?", (user_no,))
    events: int = connection.changes()
    connection.execute("DELETE FROM vectors WHERE user_no = ?", (user_no,))
    drop_user(transaction, user_no)
    connection.execute("UPDATE state SET events = events - ?", (events,))
    return events


def drop_user(transaction: SQLiteTransaction, user_no: int) -> None:
    """Delete a user without events, with the profiles that imports have replaced and claims."""
    drop_claims_on(transaction, user_no)
    execute = transaction.connection.execute
    execute("DELETE FROM users WHERE user_no = ?", (user_no,))
    execute("DELETE FROM replaced WHERE kind = 'user' AND row_no = ?", (user_no,))
    execute("INSERT OR REPLACE INTO gone_users VALUES (?, ?)", (user_no, transaction.tick()))
    execute("UPDATE state SET users = users - 1")
    transaction.scrub()


def note_names(transaction: SQLiteTransaction, where: str, values: tuple[Any, ...]) -> None:
    """Note the names that events use, before these events are deleted."""
    execute, tick = transaction.connection.execute, transaction.tick()
    execute(
        "INSERT OR REPLACE INTO unused_names SELECT DISTINCT 'items', item_no, ? FROM events"
        f" JOIN items USING (item_no) WHERE {where} AND change IS NULL",
        (tick, *values),
    )
    execute(
        "INSERT OR REPLACE INTO unused_names SELECT DISTINCT 'types', type_no, ? FROM events"
        f" WHERE {where}",
        (tick, *values),
    )


def add_entries(transaction: SQLiteTransaction, entries: Sequence[ForgottenUser]) -> None:
    """Add entries to the ledger; those that it has are left out."""
    transaction.connection.executemany(
        "INSERT OR IGNORE INTO forgotten VALUES (?, ?, ?, ?)",
        ((each.digest, each.forgotten, each.salt, each.events) for each in entries),
    )


def forget_entry(
    transaction: SQLiteTransaction, user_id: str, entry: ForgottenUser, now: int
) -> int | None:
    """Forget a user for an entry of another ledger, and add it; None if the user is unknown."""
    known = transaction.connection.execute("SELECT 1 FROM users WHERE user_id = ?", (user_id,)).get
    events = forget(transaction, user_id, now)
    add_entries(transaction, [entry])
    return None if known is None else events


# ------------------------------------------------------------------------------ names


def has_noted_names(connection: apsw.Connection) -> bool:
    """Report whether there are names to be looked at."""
    return connection.execute("SELECT 1 FROM unused_names LIMIT 1").get is not None


def find_unused(connection: apsw.Connection) -> tuple[int, Unused]:
    """Return the noted names that no event uses, and the tick at which that was so."""
    unused: Unused = {}
    with read_transaction(connection):
        tick: int = connection.execute("SELECT clock FROM state").get
        for table in _TABLES:
            rows: list[Any] = connection.execute(
                "SELECT number FROM unused_names WHERE kind = ?", (table,)
            ).fetchall()
            numbers = {number for (number,) in rows}
            unused[table] = numbers - _used(connection, table, numbers, "events", ())
    return tick, unused


def still_unused(connection: apsw.Connection, since: int, unused: Unused) -> tuple[int, Unused]:
    """Return those of the names that no event uses that was stored after the tick `since`.

    They come with the tick at which that was so.
    """
    changed = "(SELECT user_no FROM users WHERE version > ?) JOIN events USING (user_no)"
    tick: int = connection.execute("SELECT clock FROM state").get
    return tick, {
        table: numbers - _used(connection, table, numbers, changed, (since,))
        for table, numbers in unused.items()
    }


def _used(
    connection: apsw.Connection,
    table: Interned,
    numbers: set[int],
    source: str,
    values: tuple[int, ...],
) -> set[int]:
    """Return the numbers that events of `source` use."""
    if not numbers:
        return set()
    column, _ = INTERNED[table]
    rows: list[Any] = connection.execute(
        f"SELECT DISTINCT {column} FROM {source} WHERE {column} IN carray(?)",
        (*values, apsw.carray(np.array(sorted(numbers), np.int64))),
    ).fetchall()
    return {number for (number,) in rows}


def delete_names(transaction: SQLiteTransaction, noted: int, since: int, unused: Unused) -> None:
    """Delete names that no event used at the tick `since`, and that none uses now.

    The numbers are not used again: other processes may remember what they stood for.

    Args:
        noted: the tick up to which noted names were looked at.
    """
    connection = transaction.connection
    _, unused = still_unused(connection, since, unused)
    for table, numbers in unused.items():
        column, _ = INTERNED[table]
        last = f"last_{table.removesuffix('s')}"
        extra = "AND change IS NULL AND document IS NULL" if table == "items" else ""
        connection.executemany(
            f"DELETE FROM {table} WHERE {column} = ? {extra}",
            ((number,) for number in numbers),
        )
        if table == "items":
            connection.execute(
                "DELETE FROM popularity WHERE item_no NOT IN (SELECT item_no FROM items)"
            )
        connection.execute(
            f"UPDATE state SET {last} = max({last}, ?)",
            (max(numbers, default=0),),
        )
    # Names that were noted since are looked at the next time.
    connection.execute("DELETE FROM unused_names WHERE noted <= ?", (noted,))
    transaction.renumber()
    transaction.scrub()


# ------------------------------------------------------------------------------ ledger


def page(
    connection: apsw.Connection, cursor: str | None, limit: int
) -> tuple[list[ForgottenUser], str | None]:
    """`ForgettingLedger.page_forgotten`."""
    time, digest = (-1, "") if cursor is None else position_of(cursor, int, str)
    rows: list[Any] = connection.execute(
        f"{_ENTRIES} WHERE (forgotten, hex(digest)) > (?, ?)"
        " ORDER BY forgotten, hex(digest) LIMIT ?",
        (time, digest, limit + 1),
    ).fetchall()
    found = [ForgottenUser(*row) for row in rows]
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    return found[:limit], cursor_of(last.forgotten, last.digest.hex().upper())


def find(connection: apsw.Connection, user_id: str) -> list[ForgottenUser]:
    """`ForgettingLedger.find_forgotten`."""
    salts: list[Any] = connection.execute("SELECT DISTINCT salt FROM forgotten").fetchall()
    digests = tuple(user_digest(salt, user_id) for (salt,) in salts)
    found = [
        ForgottenUser(*row)
        for digest in digests
        for row in connection.execute(f"{_ENTRIES} WHERE digest = ?", (digest,))
    ]
    return sorted(found, key=lambda entry: entry.forgotten)


def count(connection: apsw.Connection, since: int) -> int:
    """`ForgettingLedger.count_forgotten`."""
    found: int = connection.execute(
        "SELECT count(*) FROM forgotten WHERE forgotten >= ?", (since,)
    ).get
    return found


def unknown_entries(
    connection: apsw.Connection, entries: Sequence[ForgottenUser]
) -> list[ForgottenUser]:
    """Return the entries that the ledger does not have."""
    has = "SELECT 1 FROM forgotten WHERE digest = ? AND forgotten = ?"
    return [
        each
        for each in entries
        if connection.execute(has, (each.digest, each.forgotten)).get is None
    ]
