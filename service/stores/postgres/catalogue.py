"""The catalogue of a PostgreSQL store. Its writers exclude each other, so that versions are final.

A reader who sees a version sees all changes up to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson
from psycopg import AsyncConnection

from service.domain.errors import NotFound
from service.domain.item_patch import ItemPatch
from service.domain.records import Item
from service.stores.encoding import (
    Document,
    cursor_of,
    item_document,
    item_from,
    position_of,
    vector_bytes,
)
from service.stores.jobs import Rows
from service.stores.postgres.database.transaction import PostgresTransaction
from service.stores.postgres.events.names import InternedNames
from service.stores.postgres.events.tallies import ITEM_BYTES
from service.stores.postgres.imports.replaced import keep_replaced_items
from service.stores.values import CatalogueChanges, CatalogueDigest, OnCatalogueChange, PatchResult

Replacement = tuple[int, Document, Document]
"""The number of an item, what is there, and what replaces it."""

_COLUMNS = "SELECT item_id, document, embedding FROM heed.items WHERE namespace_no = %s"
_REPLACE = """\
UPDATE heed.items SET change = new.change, document = new.document, embedding = new.embedding,
                      hidden = new.hidden
  FROM unnest(%b::bigint[], %b::integer[], %b::bytea[], %b::bytea[], %b::boolean[])
       AS new (change, item_no, document, embedding, hidden)
 WHERE namespace_no = %s AND items.item_no = new.item_no"""
_MOVE_VERSION = """\
UPDATE heed.namespaces SET catalogue = %s, items = items + %s, item_bytes = item_bytes + %s
 WHERE namespace_no = %s"""
_VERSION = "SELECT catalogue FROM heed.namespaces WHERE namespace_no = %s"


class CatalogueWrites:
    """Changes of items, in transactions that hold the lock of the catalogue."""

    def __init__(self, names: InternedNames) -> None:
        self._items = names

    async def prepare(self, item_ids: Sequence[str]) -> None:
        """Learn the numbers of items, before the transaction."""
        await self._items.learn(item_ids)

    async def put_items(
        self,
        transaction: PostgresTransaction,
        items: Sequence[Item],
        on_change: OnCatalogueChange | None,
        import_no: int | None,
    ) -> int:
        """`Store.put_items`."""
        new = {item.item_id: (item_document(item), _embedding(item)) for item in items}
        numbers = self._items.numbers(transaction, new)
        old = {row[0]: row[1:] for row in await _items(transaction, list(new))}
        changed = {
            item_id: value
            for item_id, value in new.items()
            if old.get(item_id, (None, None)) != value
        }
        if changed:
            nothing: Document = (None, None)
            replaced = [
                (numbers[item_id], old.get(item_id, nothing), new[item_id]) for item_id in changed
            ]
            if import_no is not None:
                await keep_replaced_items(transaction, import_no, replaced)
            await replace_items(transaction, replaced, on_change)
        return len(new)

    async def patch_items(
        self,
        transaction: PostgresTransaction,
        patches: Sequence[ItemPatch],
        create: bool,
        on_change: OnCatalogueChange | None,
        import_no: int | None,
    ) -> PatchResult:
        """`Store.patch_items`."""
        ids = sorted({patch.item_id for patch in patches})
        rows = await _items(transaction, ids)
        items = {row[0]: item_from(*row) for row in rows if row[1] is not None}
        known = frozenset(items)
        for patch in patches:
            item = items.get(patch.item_id)
            if item is None and not create:
                raise NotFound(f"no item {patch.item_id!r}")
            items[patch.item_id] = patch.apply(item)
        stored = await self.put_items(transaction, list(items.values()), on_change, import_no)
        return PatchResult(stored, tuple(item_id for item_id in items if item_id not in known))


async def delete_item(
    transaction: PostgresTransaction, item_id: str, on_change: OnCatalogueChange | None
) -> bool:
    """`Store.delete_item`."""
    row = await transaction.row(
        "SELECT item_no, document, embedding FROM heed.items"
        " WHERE namespace_no = %s AND item_id = %s AND document IS NOT NULL",
        item_id,
    )
    if row is None:
        return False
    item_no, document, embedding = row
    await replace_items(transaction, [(item_no, (document, embedding), (None, None))], on_change)
    return True


async def replace_items(
    transaction: PostgresTransaction,
    replaced: Sequence[Replacement],
    on_change: OnCatalogueChange | None = None,
    later: Sequence[int] | None = None,
) -> None:
    """Replace items, and move the catalogue's version to this tick.

    Args:
        replaced: items, in ascending order of `later`.
        on_change: see `CatalogueStore`.
        later: how many numbers of this transaction, of which there are `TICKS`, the change of each
            item comes later than its tick; 0 for all if None.
    """
    row = await transaction.row(_VERSION)
    previous = 0 if row is None else int(row[0])
    first, no = max(transaction.tick(), previous + 1), transaction.namespace_no
    versions = [first] * len(replaced) if later is None else [first + each for each in later]
    version = versions[-1]
    await transaction.connection.execute(
        _REPLACE.encode(),
        (
            versions,
            [item_no for item_no, _, _ in replaced],
            [document for _, _, (document, _) in replaced],
            [embedding for _, _, (_, embedding) in replaced],
            [_is_hidden(document) for _, _, (document, _) in replaced],
            no,
        ),
        binary=True,
    )
    added = sum((old[0] is None) - (new[0] is None) for _, old, new in replaced)
    grown = sum(_size(new) - _size(old) for _, old, new in replaced)
    if on_change is not None:
        on_change(previous, version)
    await transaction.connection.execute(_MOVE_VERSION.encode(), (version, added, grown, no))
    await transaction.announce(catalogue=version)


# ------------------------------------------------------------------------------ reads


async def get_items(
    connection: AsyncConnection, namespace_no: int, item_ids: Sequence[str]
) -> list[Item | None]:
    """`Store.get_items`."""
    rows = await _rows(
        connection,
        f"{_COLUMNS} AND item_id = ANY(%s) AND document IS NOT NULL",
        namespace_no,
        list(item_ids),
    )
    by_id = {row[0]: item_from(*row) for row in rows}
    return [by_id.get(item_id) for item_id in item_ids]


async def page_items(
    connection: AsyncConnection, namespace_no: int, cursor: str | None, limit: int, hidden: bool
) -> tuple[list[Item], str | None]:
    """`Store.page_items`."""
    (after,) = ("",) if cursor is None else position_of(cursor, str)
    only = "AND hidden" if hidden else ""
    rows = await _rows(
        connection,
        f"{_COLUMNS} AND item_id > %s AND document IS NOT NULL {only} ORDER BY item_id LIMIT %s",
        namespace_no,
        after,
        limit + 1,
    )
    found = [item_from(*row) for row in rows]
    more = len(found) > limit
    return found[:limit], cursor_of(found[limit - 1].item_id) if more else None


async def catalogue_version(connection: AsyncConnection, namespace_no: int) -> int:
    """`Store.catalogue_version`."""
    rows = await _rows(connection, _VERSION, namespace_no)
    return int(rows[0][0]) if rows else 0


async def catalogue_changes(
    connection: AsyncConnection, namespace_no: int, after: int, limit: int | None
) -> CatalogueChanges:
    """`Store.catalogue_changes`."""
    version = await catalogue_version(connection, namespace_no)
    if limit is not None:
        # Up to the end of a change, which may comprise many items.
        rows = await _rows(
            connection,
            "SELECT max(change) FROM (SELECT change FROM heed.items WHERE namespace_no = %s"
            " AND change > %s AND change <= %s ORDER BY change LIMIT %s) AS next",
            namespace_no,
            after,
            version,
            limit,
        )
        version = version if rows[0][0] is None else rows[0][0]
    rows = await _rows(
        connection,
        f"{_COLUMNS} AND change > %s AND change <= %s ORDER BY change, item_no",
        namespace_no,
        after,
        version,
    )
    return CatalogueChanges(
        version,
        [item_from(*row) for row in rows if row[1] is not None],
        [item_id for item_id, document, _ in rows if document is None],
    )


async def catalogue_digest(connection: AsyncConnection, namespace_no: int) -> CatalogueDigest:
    """`Store.catalogue_digest`."""
    version = await catalogue_version(connection, namespace_no)
    digest = hashlib.sha256()
    # Lengths before contents, so that no two lists of items are the same bytes.
    query = """\
SELECT item_id, change, octet_length(item_id), octet_length(document), octet_length(embedding),
       document, embedding FROM heed.items
 WHERE namespace_no = %s AND change > 0 AND change <= %s ORDER BY change, item_no"""
    for row in await _rows(connection, query, namespace_no, version):
        item_id, *rest = row
        *numbers, document, embedding = rest
        digest.update(repr(numbers).encode() + item_id.encode())
        digest.update(document or b"")
        digest.update(embedding or b"")
    return CatalogueDigest(version, digest.hexdigest())


async def _items(transaction: PostgresTransaction, item_ids: Sequence[str]) -> Rows:
    return await transaction.rows(f"{_COLUMNS} AND item_id = ANY(%s)", list(item_ids))


async def _rows(connection: AsyncConnection, query: str, *values: Any) -> Rows:
    return await (await connection.execute(query.encode(), values, binary=True)).fetchall()


def _is_hidden(document: bytes | None) -> bool:
    return document is not None and bool(orjson.loads(document).get("hidden"))


def _size(document: Document) -> int:
    if document[0] is None:
        return 0
    return ITEM_BYTES + len(document[0]) + len(document[1] or b"")


def _embedding(item: Item) -> bytes | None:
    return None if item.embedding is None else vector_bytes(item.embedding)
