"""Bulk writes of items into a SQLite store that is the target of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import apsw

from service.stores.sqlite.bulk.record_reads import carray
from service.stores.sqlite.items import replace_items
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.sqlite.writes import Names
from service.stores.values import StoredItem


def put_items(transaction: SQLiteTransaction, items: Sequence[StoredItem], names: Names) -> None:
    """`BulkAccess.put_items`."""
    connection = transaction.connection
    numbers = names.numbers(transaction, (item.item_id for item in items))
    old = {
        item_no: (document, embedding)
        for item_no, document, embedding in connection.execute(
            "SELECT item_no, document, embedding FROM items WHERE item_no IN carray(?)",
            (carray(numbers.values()),),
        )
    }
    changes = groupby((each for each in items if each.was_put), key=lambda item: item.place[0])
    replaced, later = [], []
    for rank, (_, group) in enumerate(changes):
        for item in group:
            number = numbers[item.item_id]
            replaced.append((number, old[number], (item.document, item.embedding)))
            later.append(rank)
    if replaced:
        replace_items(transaction, replaced, later=later)
    connection.execute(
        "DELETE FROM replaced WHERE kind = 'item' AND row_no IN carray(?)",
        (carray(numbers.values()),),
    )
    connection.executemany(
        "INSERT INTO replaced VALUES ('item', ?, ?, ?, ?, ?)",
        ((numbers[item.item_id], *row) for item in items for row in item.replaced),
    )


def discard_item_names(transaction: SQLiteTransaction, item_ids: Sequence[str]) -> None:
    """`BulkAccess.discard_item_names`."""
    transaction.connection.execute(
        "INSERT OR REPLACE INTO unused_names SELECT 'items', item_no, ? FROM items"
        " WHERE item_id IN carray(?) AND change IS NULL",
        (transaction.tick(), apsw.carray(tuple(item_ids))),
    )
