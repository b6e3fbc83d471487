"""Bulk writes of items into a PostgreSQL store that is the target of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from service.stores.postgres.catalogue import replace_items
from service.stores.postgres.database.transaction import PostgresTransaction
from service.stores.postgres.events.names import InternedNames
from service.stores.values import StoredItem

# In the given order, so that the sequence is asked in it.
_ADD = """\
INSERT INTO heed.items (namespace_no, item_no, item_id)
SELECT %s, nextval('heed.item_numbers'), item_id
  FROM (SELECT item_id FROM unnest(%b::text[]) WITH ORDINALITY AS new (item_id, place)
         ORDER BY place) AS new"""
_DOCUMENTS = """\
SELECT item_no, document, embedding FROM heed.items
 WHERE namespace_no = %s AND item_no = ANY(%b::integer[])"""
_DELETE_REPLACED = """\
DELETE FROM heed.replaced_items WHERE namespace_no = %s AND item_no = ANY(%b::integer[])"""
_ADD_REPLACED = """\
INSERT INTO heed.replaced_items (namespace_no, item_no, import_no, written, document, embedding)
SELECT %s, * FROM unnest(%b::integer[], %b::integer[], %b::bigint[], %b::bytea[], %b::bytea[])"""
_NOTE = """\
INSERT INTO heed.unused_names (namespace_no, kind, number, noted)
SELECT namespace_no, 'items', item_no, %s FROM heed.items
 WHERE namespace_no = %s AND item_id = ANY(%s) AND change IS NULL
ON CONFLICT (namespace_no, kind, number) DO UPDATE SET noted = excluded.noted"""


async def add_item_names(transaction: PostgresTransaction, item_ids: Sequence[str]) -> None:
    """`BulkAccess.add_item_names`."""
    rows = await transaction.rows(
        "SELECT item_id FROM heed.items WHERE namespace_no = %s AND item_id = ANY(%s)",
        list(item_ids),
    )
    known = {item_id for (item_id,) in rows}
    new = list(dict.fromkeys(item_id for item_id in item_ids if item_id not in known))
    if new:
        await transaction.execute(_ADD, new)


async def put_items(
    transaction: PostgresTransaction, items: Sequence[StoredItem], names: InternedNames
) -> None:
    """`BulkAccess.put_items`, in a transaction that holds the lock of the catalogue."""
    numbers = names.numbers(transaction, [item.item_id for item in items])
    rows = await transaction.rows(_DOCUMENTS, list(numbers.values()))
    old = {item_no: (document, embedding) for item_no, document, embedding in rows}
    changes = groupby((each for each in items if each.was_put), key=lambda item: item.place[0])
    replacements, later = [], []
    for rank, (_, group) in enumerate(changes):
        for item in group:
            number = numbers[item.item_id]
            replacements.append((number, old[number], (item.document, item.embedding)))
            later.append(rank)
    if replacements:
        await replace_items(transaction, replacements, later=later)
    await transaction.execute(_DELETE_REPLACED, list(numbers.values()))
    replaced = [(numbers[item.item_id], *row) for item in items for row in item.replaced]
    if replaced:
        await transaction.execute(_ADD_REPLACED, *map(list, zip(*replaced, strict=True)))


async def discard_item_names(transaction: PostgresTransaction, item_ids: Sequence[str]) -> None:
    """`BulkAccess.discard_item_names`."""
    await transaction.connection.execute(
        _NOTE.encode(), (transaction.tick(), transaction.namespace_no, list(item_ids))
    )
