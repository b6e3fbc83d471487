"""Imports of a SQLite store: their records, and how one is undone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import apsw

from service.domain.errors import Invalid
from service.stores.encoding import Document, document_digest
from service.stores.sqlite.forgetting import drop_user
from service.stores.sqlite.imports.import_claims import claimants, drop_claims
from service.stores.sqlite.imports.replaced_records import Replacement
from service.stores.sqlite.items import replace_items
from service.stores.sqlite.registers.popularity import discount_events
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.sqlite.writes import rewrite_history
from service.stores.values import ImportRecord

Position = tuple[int, int, int]
"""Primary key of an event: user_no, timestamp, seq."""

Kind = Literal["item", "user"]
Rows = list[tuple[Any, ...]]

_FIRST: Position = (-1, 0, 0)
_NEXT = (  # import that replaced the same row
    "SELECT import_no, document, embedding FROM replaced"
    " WHERE kind = ? AND row_no = ? AND import_no > ? ORDER BY import_no LIMIT 1"
)
_HAND_ON = (
    "UPDATE replaced SET document = ?, embedding = ?"
    " WHERE kind = ? AND row_no = ? AND import_no = ?"
)


def begin(transaction: SQLiteTransaction, source: str, now: int) -> int:
    """`Store.begin_import`."""
    connection = transaction.connection
    connection.execute("INSERT INTO imports VALUES (NULL, ?, ?, 0)", (now, source))
    return connection.last_insert_rowid()


def records(connection: apsw.Connection) -> list[ImportRecord]:
    """`Store.imports`."""
    rows: Rows = connection.execute("SELECT * FROM imports ORDER BY import_no").fetchall()
    return [
        ImportRecord(import_no, started, source, bool(undone))
        for import_no, started, source, undone in rows
    ]


def put_records(transaction: SQLiteTransaction, records: Iterable[ImportRecord]) -> None:
    """Insert the records of imports, or replace those of the same ids."""
    transaction.connection.executemany(
        "INSERT OR REPLACE INTO imports VALUES (?, ?, ?, ?)", records
    )


def begin_undo(transaction: SQLiteTransaction, import_no: int) -> Position:
    """Give up the import's claims, and return the position before all events.

    Raises `Invalid` unless the import can be undone.
    """
    row = transaction.connection.execute(
        "SELECT undone FROM imports WHERE import_no = ?", (import_no,)
    ).fetchone()
    if row is None:
        raise Invalid("/import_id", f"there is no import {import_no}")
    if row[0]:
        raise Invalid("/import_id", f"import {import_no} is undone already")
    drop_claims(transaction, import_no)  # first: until the end no event may be handed to the import
    return _FIRST


def undo_events(
    transaction: SQLiteTransaction, import_no: int, after: Position, limit: int
) -> tuple[int, int, Position | None]:
    """Take back up to `limit` events of an import: delete them, or hand them to another import.

    Returns:
        Numbers of deleted events and of those handed over, and the position of the last one, or
        None after the last event of all.
    """
    connection = transaction.connection
    rows: Rows = connection.execute(
        "SELECT user_no, timestamp, seq FROM events"
        " WHERE (user_no, timestamp, seq) > (?, ?, ?) AND import_no = ?"
        " ORDER BY user_no, timestamp, seq LIMIT ?",
        (*after, import_no, limit),
    ).fetchall()
    deleted: Rows = []
    handed: Rows = []
    for user_no, events in groupby(rows, key=itemgetter(0)):
        places = list(events)
        heirs = claimants(transaction, user_no, (seq for _, _, seq in places))
        handed += [(heirs[place[2]], *place) for place in places if place[2] in heirs]
        deleted += [place for place in places if place[2] not in heirs]
    place = "WHERE user_no = ? AND timestamp = ? AND seq = ?"
    connection.executemany(f"UPDATE events SET import_no = ? {place}", handed)
    discount_events(transaction, deleted)
    connection.executemany(f"DELETE FROM events {place}", deleted)
    connection.executemany(
        "DELETE FROM vectors WHERE user_no = ? AND seq = ?",
        ((user_no, seq) for user_no, _, seq in deleted),
    )
    for user_no in dict.fromkeys(user_no for user_no, _, _ in deleted):
        rewrite_history(transaction, user_no)
        _drop_if_empty(transaction, user_no)
    connection.execute("UPDATE state SET events = events - ?", (len(deleted),))
    transaction.scrub()
    return len(deleted), len(handed), _last(rows) if len(rows) == limit else None


def _last(rows: Rows) -> Position:
    user_no, timestamp, seq = rows[-1]
    return user_no, timestamp, seq


def undo_documents(transaction: SQLiteTransaction, import_no: int) -> tuple[int, int, int]:
    """Restore what an import has replaced, and record that the import is undone.

    Returns:
        Numbers of restored items, of restored profiles, and of both that were changed since.
    """
    execute = transaction.connection.execute
    restored = {"item": 0, "user": 0}
    kept = 0
    items: list[Replacement] = []
    rows: Rows = execute(
        "SELECT kind, row_no, written, document, embedding FROM replaced WHERE import_no = ?",
        (import_no,),
    ).fetchall()
    for kind, row_no, written, *old in rows:
        before = (old[0], old[1])
        place = (kind, row_no, import_no)
        later: Rows = execute(_NEXT, place).fetchall()
        current = _current(transaction, kind, row_no)
        if later:
            # That import restores what was there before both, if nothing came between them.
            next_no, *replaced = later[0]
            if document_digest((replaced[0], replaced[1])) == written:
                execute(_HAND_ON, (*before, kind, row_no, next_no))
            else:
                kept += 1
        elif document_digest(current) == written:
            restored[kind] += 1
            if kind == "item":
                items.append((row_no, current, before))
            else:
                _restore_profile(transaction, row_no, before[0])
        else:
            kept += 1
    if items:
        replace_items(transaction, items)
    execute("DELETE FROM replaced WHERE import_no = ?", (import_no,))
    execute("UPDATE imports SET undone = 1 WHERE import_no = ?", (import_no,))
    return restored["item"], restored["user"], kept


def _current(transaction: SQLiteTransaction, kind: Kind, row_no: int) -> Document:
    if kind == "item":
        find = "SELECT document, embedding FROM items WHERE item_no = ?"
    else:
        find = "SELECT profile, NULL FROM users WHERE user_no = ?"
    rows: Rows = transaction.connection.execute(find, (row_no,)).fetchall()
    ((document, embedding),) = rows  # what is kept of a user goes with the user
    return document, embedding


def _restore_profile(transaction: SQLiteTransaction, user_no: int, profile: bytes | None) -> None:
    transaction.connection.execute(
        "UPDATE users SET version = ?, profile = ? WHERE user_no = ?",
        (transaction.tick(), profile, user_no),
    )
    _drop_if_empty(transaction, user_no)


def _drop_if_empty(transaction: SQLiteTransaction, user_no: int) -> None:
    """Delete a user without events and profile."""
    if transaction.connection.execute(
        "SELECT 1 FROM users WHERE user_no = ?1 AND profile IS NULL"
        " AND NOT EXISTS (SELECT 1 FROM events WHERE user_no = ?1)",
        (user_no,),
    ).fetchone():
        drop_user(transaction, user_no)
