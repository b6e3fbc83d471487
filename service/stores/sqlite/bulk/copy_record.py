"""Record of the copy that a SQLite store is the target of.

Its table is made when a copy begins: no other store has one. The clock of the store, which every
other change of events, users, items and keys moves, tells whether anything but the copy has
written.
"""

from __future__ import annotations

import apsw

from service.domain.errors import Conflict
from service.stores.protocols.bulk_access import CopyRecord
from service.stores.sqlite.reads import read_transaction
from service.stores.sqlite.writer import Transaction

_CREATE = """
CREATE TABLE IF NOT EXISTS copies (
  only     INTEGER PRIMARY KEY CHECK (only = 1),
  origin   TEXT NOT NULL,
  position TEXT NOT NULL,
  written  INTEGER NOT NULL -- the tick of the copy's last change
) STRICT
"""
_READ = "SELECT origin, position, written, clock FROM copies, state"


def read(connection: apsw.Connection) -> tuple[CopyRecord, int] | None:
    """Return the record and the tick of the copy's last change; None without a record."""
    with read_transaction(connection):
        if not connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'copies'").get:
            return None
        row = connection.execute(_READ).fetchone()
    if row is None:
        return None
    origin, position, written, clock = row
    return CopyRecord(origin, position, written == clock), written


def begin(transaction: Transaction, origin: str) -> int:
    """`BulkAccess.begin_copy`; return the tick."""
    connection, tick = transaction.connection, transaction.tick()
    connection.execute(_CREATE)
    connection.execute("INSERT INTO copies VALUES (1, ?, '', ?)", (origin, tick))
    return tick


def check(transaction: Transaction, written: int) -> None:
    """Raise `Conflict` unless the last change of the store is the copy's own."""
    if written != transaction.clock or transaction.has_ticked:
        raise Conflict("the target was changed by something else while it was copied to")


def record(transaction: Transaction, position: str | None = None) -> int:
    """Record a change of the copy, and its position if it has moved; return the tick."""
    tick = transaction.tick()
    transaction.connection.execute(
        "UPDATE copies SET written = ?, position = coalesce(?, position)", (tick, position)
    )
    return tick
