"""Imports of a PostgreSQL store: their records, and how one is undone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from psycopg import AsyncConnection

from service.domain.errors import Invalid
from service.stores.encoding import Document, document_digest
from service.stores.postgres.catalogue import Replacement, replace_items
from service.stores.postgres.database.transaction import Changed, NamespaceTransaction, Rows
from service.stores.postgres.events.tallies import (
    EVENT_BYTES,
    Tally,
    add_tallies,
    negative_types,
)
from service.stores.postgres.forgetting import drop_user
from service.stores.postgres.imports.claims import Place, claimants, drop_claims
from service.stores.postgres.users import rewrite_history
from service.stores.protocols.import_store import ImportRecord

FIRST: Place = (-1, 0, 0)

_PLACES = "unnest(%s::bigint[], %s::bigint[], %s::integer[]) AS place (user_key, timestamp, seq)"
_AT_PLACE = """\
 WHERE namespace_no = %s AND events.user_key = place.user_key
   AND events.timestamp = place.timestamp AND events.seq = place.seq"""
_EVENTS = """\
SELECT user_key, timestamp, seq FROM heed.events
 WHERE namespace_no = %s AND (user_key, timestamp, seq) > (%s, %s, %s) AND import_no = %s
 ORDER BY user_key, timestamp, seq LIMIT %s"""
_LOCK_USER = """\
SELECT profile FROM heed.users WHERE namespace_no = %s AND user_key = %s FOR UPDATE"""
_HAND_OVER = f"""\
UPDATE heed.events SET import_no = place.heir
  FROM (SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::integer[]))
       AS place (user_key, timestamp, seq, heir){_AT_PLACE}"""  # noqa: S608
_DELETE = f"""\
DELETE FROM heed.events USING {_PLACES}{_AT_PLACE}
RETURNING item_no, type_no, event_key"""  # noqa: S608
_DELETE_IDS = """\
WITH gone AS (DELETE FROM heed.event_ids WHERE namespace_no = %s AND event_key = ANY(%s)
              RETURNING 1)
SELECT count(*) FROM gone"""
_DELETE_VECTORS = """\
DELETE FROM heed.vectors USING unnest(%s::bigint[], %s::integer[]) AS place (user_key, seq)
 WHERE namespace_no = %s AND vectors.user_key = place.user_key AND vectors.seq = place.seq
RETURNING coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)"""
_EMPTY_USER = """\
SELECT user_no FROM heed.users WHERE namespace_no = %s AND user_key = %s AND profile IS NULL
   AND NOT EXISTS (SELECT FROM heed.events WHERE events.namespace_no = users.namespace_no
                                             AND events.user_key = users.user_key)"""


async def begin(transaction: NamespaceTransaction, source: str, now: int) -> int:
    """`Store.begin_import`."""
    found = await transaction.row(
        "SELECT coalesce(max(import_no), 0) FROM heed.imports WHERE namespace_no = %s"
    )
    import_no = 1 if found is None else int(found[0]) + 1
    await transaction.execute(
        "INSERT INTO heed.imports (namespace_no, import_no, started, source, undone)"
        " VALUES (%s, %s, %s, %s, false)",
        import_no,
        now,
        source,
    )
    return import_no


async def put_records(transaction: NamespaceTransaction, imports: Iterable[ImportRecord]) -> None:
    """Insert the records of imports, or replace those of the same ids."""
    for each in imports:
        await transaction.execute(
            "INSERT INTO heed.imports (namespace_no, import_no, started, source, undone)"
            " VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (namespace_no, import_no) DO UPDATE SET undone = excluded.undone",
            *each,
        )


async def records(connection: AsyncConnection, namespace_no: int) -> list[ImportRecord]:
    """`Store.imports`."""
    cursor = await connection.execute(
        b"SELECT import_no, started, source, undone FROM heed.imports"
        b" WHERE namespace_no = %s ORDER BY import_no",
        (namespace_no,),
    )
    return [ImportRecord(*row) for row in await cursor.fetchall()]


async def begin_undo(transaction: NamespaceTransaction, import_no: int) -> Place:
    """Give up the import's claims, and return the place before all events.

    Raises `Invalid` unless the import can be undone.
    """
    row = await transaction.row(
        "SELECT undone FROM heed.imports WHERE namespace_no = %s AND import_no = %s", import_no
    )
    if row is None:
        raise Invalid("/import_id", f"there is no import {import_no}")
    if row[0]:
        raise Invalid("/import_id", f"import {import_no} is undone already")
    # First: until the end no event may be handed to the import.
    await drop_claims(transaction, import_no)
    return FIRST


async def undo_events(
    transaction: NamespaceTransaction, import_no: int, after: Place, limit: int
) -> tuple[int, int, Place | None]:
    """Take back up to `limit` events of an import: delete them, or hand them to another import.

    Returns:
        Numbers of deleted events and of those handed over, and the place of the last one, or None
        after the last event of all.
    """
    rows: Rows = await transaction.rows(_EVENTS, *after, import_no, limit)
    for key in sorted({key for key, _, _ in rows}):
        await transaction.execute(_LOCK_USER, key)
    deleted: Rows = []
    handed: Rows = []
    for key, events in groupby(rows, key=itemgetter(0)):
        places = list(events)
        heirs = await claimants(transaction, key, (seq for _, _, seq in places))
        handed += [(*place, heirs[place[2]]) for place in places if place[2] in heirs]
        deleted += [place for place in places if place[2] not in heirs]
    execute, no = transaction.connection.execute, transaction.namespace_no
    if handed:
        await execute(_HAND_OVER.encode(), (*_columns(handed), no))
    if deleted:
        await _delete(transaction, deleted)
    for key in dict.fromkeys(key for key, _, _ in deleted):
        await rewrite_history(transaction, key)
        await _drop_if_empty(transaction, key)
    last = None if len(rows) < limit else (rows[-1][0], rows[-1][1], rows[-1][2])
    return len(deleted), len(handed), last


async def _delete(transaction: NamespaceTransaction, places: Rows) -> None:
    execute, no = transaction.connection.execute, transaction.namespace_no
    keys, timestamps, seqs = _columns(places)
    cursor = await execute(_DELETE.encode(), (keys, timestamps, seqs, no))
    rows = await cursor.fetchall()
    tally = Tally(bytes=-EVENT_BYTES * len(rows))
    negative = await negative_types(transaction)
    for item_no, type_no, _ in rows:
        tally.add(item_no, type_no in negative, -1)
    ids = await transaction.row(_DELETE_IDS, [event_key for _, _, event_key in rows])
    if ids != (len(places),):
        raise Changed  # events that are gone, or ids that cannot be seen everywhere yet
    cursor = await execute(_DELETE_VECTORS.encode(), (keys, seqs, no))
    tally.bytes -= sum(size for (size,) in await cursor.fetchall())
    await add_tallies(transaction, keys[0], tally)


async def undo_documents(transaction: NamespaceTransaction, import_no: int) -> tuple[int, int, int]:
    """Restore what an import has replaced, and record that the import is undone.

    The transaction must hold the lock of the catalogue.

    Returns:
        Numbers of restored items, of restored profiles, and of both that were changed since.
    """
    items, kept_items = await _undo_items(transaction, import_no)
    profiles, kept_profiles = await _undo_profiles(transaction, import_no)
    await transaction.execute(
        "UPDATE heed.imports SET undone = true WHERE namespace_no = %s AND import_no = %s",
        import_no,
    )
    return items, profiles, kept_items + kept_profiles


async def _undo_items(transaction: NamespaceTransaction, import_no: int) -> tuple[int, int]:
    """Restore the items that an import has replaced; return these and those changed since."""
    restored: list[Replacement] = []
    kept = 0
    rows = await transaction.rows(
        "SELECT item_no, written, replaced_items.document, replaced_items.embedding,"
        " items.document, items.embedding"
        " FROM heed.replaced_items JOIN heed.items USING (namespace_no, item_no)"
        " WHERE namespace_no = %s AND import_no = %s",
        import_no,
    )
    for item_no, written, *documents in rows:
        before: Document = (documents[0], documents[1])
        current: Document = (documents[2], documents[3])
        later = await transaction.row(
            "SELECT import_no, document, embedding FROM heed.replaced_items WHERE namespace_no = %s"
            " AND item_no = %s AND import_no > %s ORDER BY import_no LIMIT 1",
            item_no,
            import_no,
        )
        if later is not None:
            # That import restores what was there before both, if nothing came between them.
            if document_digest((later[1], later[2])) == written:
                await transaction.connection.execute(
                    b"UPDATE heed.replaced_items SET document = %s, embedding = %s"
                    b" WHERE namespace_no = %s AND item_no = %s AND import_no = %s",
                    (*before, transaction.namespace_no, item_no, later[0]),
                )
            else:
                kept += 1
        elif document_digest(current) == written:
            restored.append((item_no, current, before))
        else:
            kept += 1
    if restored:
        await replace_items(transaction, restored)
    await transaction.execute(
        "DELETE FROM heed.replaced_items WHERE namespace_no = %s AND import_no = %s", import_no
    )
    return len(restored), kept


async def _undo_profiles(transaction: NamespaceTransaction, import_no: int) -> tuple[int, int]:
    """Restore the profiles that an import has replaced; return these and those changed since."""
    restored = kept = 0
    no, execute = transaction.namespace_no, transaction.connection.execute
    rows = await transaction.rows(
        "SELECT user_key, written, document FROM heed.replaced_profiles"
        " WHERE namespace_no = %s AND import_no = %s ORDER BY user_key",
        import_no,
    )
    for key, written, before in rows:
        user = await transaction.row(_LOCK_USER, key)
        if user is None:
            raise Changed  # forgotten since
        (current,) = user
        later = await transaction.row(
            "SELECT import_no, document FROM heed.replaced_profiles WHERE namespace_no = %s"
            " AND user_key = %s AND import_no > %s ORDER BY import_no LIMIT 1",
            key,
            import_no,
        )
        if later is not None:
            if document_digest((later[1], None)) == written:
                await execute(
                    b"UPDATE heed.replaced_profiles SET document = %s"
                    b" WHERE namespace_no = %s AND user_key = %s AND import_no = %s",
                    (before, no, key, later[0]),
                )
            else:
                kept += 1
        elif document_digest((current, None)) == written:
            restored += 1
            await execute(
                b"UPDATE heed.users SET version = greatest(version + 1, %s), profile = %s"
                b" WHERE namespace_no = %s AND user_key = %s",
                (transaction.tick, before, no, key),
            )
            grown = len(before or b"") - len(current or b"")
            await add_tallies(transaction, key, Tally(bytes=grown))
            await _drop_if_empty(transaction, key)
        else:
            kept += 1
    await transaction.execute(
        "DELETE FROM heed.replaced_profiles WHERE namespace_no = %s AND import_no = %s", import_no
    )
    return restored, kept


async def _drop_if_empty(transaction: NamespaceTransaction, key: int) -> None:
    """Delete a user without events and profile."""
    row = await transaction.row(_EMPTY_USER, key)
    if row is not None:
        await drop_user(transaction, key, row[0], 0)


def _columns(rows: Rows) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]
