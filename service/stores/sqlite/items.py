"""Changes of the catalogue of a SQLite store: each runs as one job on the writer's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from service.domain.errors import NotFound
from service.domain.item_patch import ItemPatch
from service.domain.records import Item
from service.stores.encoding import item_document, item_from, vector_bytes
from service.stores.sqlite.imports.replaced_records import Replacement, keep_replaced
from service.stores.sqlite.reads import SELECT_ITEMS
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.sqlite.writes import Names
from service.stores.values import OnCatalogueChange, PatchResult


class ItemWrites:
    """Changes of items, named as the methods of `Store`. Only the writer's thread runs them."""

    def __init__(self, names: Names) -> None:
        self._items = names

    def put_items(
        self,
        transaction: SQLiteTransaction,
        items: Sequence[Item],
        on_change: OnCatalogueChange | None,
        import_no: int | None,
    ) -> int:
        connection = transaction.connection
        new = {item.item_id: (item_document(item), _embedding(item)) for item in items}
        numbers = self._items.numbers(transaction, new)
        old = {
            item_id: (document, embedding)
            for item_id, document, embedding in connection.execute(
                "SELECT item_id, document, embedding FROM items WHERE item_id IN carray(?)",
                (apsw.carray(tuple(new)),),
            )
        }
        changed = {item_id: value for item_id, value in new.items() if old[item_id] != value}
        if changed:
            replaced = [(numbers[item_id], old[item_id], new[item_id]) for item_id in changed]
            if import_no is not None:
                keep_replaced(transaction, import_no, "item", replaced)
            replace_items(transaction, replaced, on_change)
        return len(new)

    def patch_items(
        self,
        transaction: SQLiteTransaction,
        patches: Sequence[ItemPatch],
        create: bool,
        on_change: OnCatalogueChange | None,
        import_no: int | None,
    ) -> PatchResult:
        ids = tuple({patch.item_id for patch in patches})
        rows: list[tuple[Any, ...]] = transaction.connection.execute(
            f"{SELECT_ITEMS} WHERE item_id IN carray(?) AND document IS NOT NULL",
            (apsw.carray(ids),),
        ).fetchall()
        items = {row[0]: item_from(*row) for row in rows}
        known = frozenset(items)
        for patch in patches:
            item = items.get(patch.item_id)
            if item is None and not create:
                raise NotFound(f"no item {patch.item_id!r}")
            items[patch.item_id] = patch.apply(item)
        stored = self.put_items(transaction, list(items.values()), on_change, import_no)
        return PatchResult(stored, tuple(item_id for item_id in items if item_id not in known))

    def delete_item(
        self, transaction: SQLiteTransaction, item_id: str, on_change: OnCatalogueChange | None
    ) -> bool:
        execute = transaction.connection.execute
        item_no = execute(
            "SELECT item_no FROM items WHERE item_id = ? AND document IS NOT NULL", (item_id,)
        ).get
        if item_no is None:
            return False
        old = execute("SELECT document, embedding FROM items WHERE item_no = ?", (item_no,)).get
        replace_items(transaction, [(item_no, old, (None, None))], on_change)
        return True


def replace_items(
    transaction: SQLiteTransaction,
    replaced: Sequence[Replacement],
    on_change: OnCatalogueChange | None = None,
    later: Sequence[int] | None = None,
) -> None:
    """Replace items, and move the catalogue's version to this tick.

    Args:
        replaced: items, in ascending order of `later`.
        on_change: see `CatalogueStore`.
        later: how many ticks later than now the change of each item is, one after another; 0 for
            all if None.
    """
    connection, tick = transaction.connection, transaction.tick()
    ticks = [tick] * len(replaced) if later is None else [tick + each for each in later]
    transaction.advance(ticks[-1] - tick)
    connection.executemany(
        "UPDATE items SET change = ?, document = ?, embedding = ? WHERE item_no = ?",
        (
            (change, *new, item_no)
            for change, (item_no, _, new) in zip(ticks, replaced, strict=True)
        ),
    )
    added = sum((old[0] is None) - (new[0] is None) for _, old, new in replaced)
    if on_change is not None:
        on_change(connection.execute("SELECT catalogue FROM state").get, ticks[-1])
    connection.execute("UPDATE state SET catalogue = ?, items = items + ?", (ticks[-1], added))


def _embedding(item: Item) -> bytes | None:
    return None if item.embedding is None else vector_bytes(item.embedding)
