"""Record of the copy that a SQLite store is the target of.

Its table is made when a copy begins: no other store has one. The clock of the store, which every
other change of events, users, items and keys moves, tells whether anything but the copy has
written.
"""

from __future__ import annotations

import apsw

from service.domain.errors import Conflict
from service.stores.sqlite.reads import read_transaction
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.values import CopyRecord

_CREATE = """
CREATE TABLE IF NOT EXISTS copies (
  only     INTEGER PRIMARY KEY CHECK (only = 1),
  origin   TEXT NOT NULL,
  position TEXT NOT NULL,
  written  INTEGER NOT NULL, -- the tick of the copy's last change
  is_whole INTEGER -- 1: compared with its source and the same; NULL: of an earlier Heed
) STRICT
"""
_COLUMNS = "SELECT group_concat(name) FROM pragma_table_info('copies')"


def read(connection: apsw.Connection) -> tuple[CopyRecord, int] | None:
    """Return the record and the tick of the copy's last change; None without a record."""
    with read_transaction(connection):
        columns: str | None = connection.execute(_COLUMNS).get
        if columns is None:
            return None
        whole = "is_whole" if "is_whole" in columns else "NULL"
        row = connection.execute(
            f"SELECT origin, position, written, clock, {whole} FROM copies, state"
        ).fetchone()
    if row is None:
        return None
    origin, position, written, clock, is_whole = row
    is_untouched = written == clock
    if is_whole is None:
        is_whole = not (position and is_untouched)
    return CopyRecord(origin, position, is_untouched, bool(is_whole)), written


def unfinished(connection: apsw.Connection) -> str | None:
    """Return the origin of an unfinished copy; None without one."""
    found = read(connection)
    return None if found is None or found[0].is_whole else found[0].origin


def begin(transaction: SQLiteTransaction, origin: str) -> int:
    """`BulkAccess.begin_copy`; return the tick."""
    connection, tick = transaction.connection, transaction.tick()
    connection.execute(_CREATE)
    connection.execute("INSERT INTO copies VALUES (1, ?, '', ?, 0)", (origin, tick))
    return tick


def mark(transaction: SQLiteTransaction, *, is_whole: bool) -> None:
    """Record whether the copy is whole."""
    connection = transaction.connection
    if "is_whole" not in connection.execute(_COLUMNS).get:
        connection.execute("ALTER TABLE copies ADD COLUMN is_whole INTEGER")
    connection.execute("UPDATE copies SET is_whole = ?", (is_whole,))


def check(transaction: SQLiteTransaction, written: int) -> None:
    """Raise `Conflict` unless the last change of the store is the copy's own."""
    if written != transaction.clock or transaction.has_ticked:
        raise Conflict("the target was changed by something else while it was copied to")


def record(transaction: SQLiteTransaction, position: str | None = None) -> int:
    """Record a change of the copy, and its position if it has moved; return the tick."""
    tick = transaction.tick()
    transaction.connection.execute(
        "UPDATE copies SET written = ?, position = coalesce(?, position)", (tick, position)
    )
    return tick
