"""The catalogue. Its writers exclude each other: who sees a version sees all changes up to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import orjson

from service.domain.errors import NotFound
from service.domain.records import Item, ItemPatch
from service.stores.encoding import (
    Document,
    blob_from,
    cursor_of,
    document_digest,
    item_document,
    item_from,
    position_of,
)
from service.stores.jobs import Insert, Job, Run, Transaction, Update
from service.stores.values import CatalogueChanges, CatalogueDigest, OnCatalogueChange, PatchResult

Replacement: TypeAlias = tuple[int, Document, Document]
"""The number of an item, what is there, and what replaces it."""

_COLUMNS = "SELECT item_id, document, embedding FROM heed.items WHERE $here"
ALL_ITEMS = f"{_COLUMNS} AND document IS NOT NULL ORDER BY item_id"
_VERSION = "SELECT catalogue FROM $[state|heed.namespaces WHERE $here]"
_HIDDEN = "$[json_extract(CAST(document AS TEXT), '$.hidden')|hidden]"
ITEM_BYTES = 300  # beside the document and the embedding
_DIGESTED = 5_000  # items that are read at once
_NOTHING: Document = (None, None)


# ------------------------------------------------------------------------------ changes


def put_items(
    tx: Transaction,
    items: Sequence[Item],
    on_change: OnCatalogueChange | None,
    import_no: int | None,
) -> Job[int]:
    """`Store.put_items`."""
    new = {item.item_id: (item_document(item), blob_from(item.embedding)) for item in items}
    numbers = tx.item_numbers(new)
    rows = yield Run(f"{_COLUMNS} AND item_id $in(ids)", ids=list(new))
    old = {item_id: (document, embedding) for item_id, document, embedding in rows}
    replaced = [
        (numbers[item_id], old.get(item_id, _NOTHING), value)
        for item_id, value in new.items()
        if old.get(item_id, _NOTHING) != value
    ]
    if replaced:
        if import_no is not None:
            yield from _keep_replaced(import_no, replaced)
        yield from replace_items(tx, replaced, on_change)
    return len(new)


def patch_items(
    tx: Transaction,
    patches: Sequence[ItemPatch],
    create: bool,
    on_change: OnCatalogueChange | None,
    import_no: int | None,
) -> Job[PatchResult]:
    """`Store.patch_items`."""
    ids = sorted({patch.item_id for patch in patches})
    rows = yield Run(f"{_COLUMNS} AND item_id $in(ids) AND document IS NOT NULL", ids=ids)
    items = {row[0]: item_from(*row) for row in rows}
    known = frozenset(items)
    for patch in patches:
        item = items.get(patch.item_id)
        if item is None and not create:
            raise NotFound(f"no item {patch.item_id!r}")
        items[patch.item_id] = patch.apply(item)
    stored = yield from put_items(tx, list(items.values()), on_change, import_no)
    return PatchResult(stored, tuple(item_id for item_id in items if item_id not in known))


def delete_item(tx: Transaction, item_id: str, on_change: OnCatalogueChange | None) -> Job[bool]:
    """`Store.delete_item`."""
    rows = yield Run(
        "SELECT item_no, document, embedding FROM heed.items"
        " WHERE $here AND item_id = :id AND document IS NOT NULL",
        id=item_id,
    )
    for item_no, *old in rows:
        yield from replace_items(tx, [(item_no, (old[0], old[1]), _NOTHING)], on_change)
    return bool(rows)


def replace_items(
    tx: Transaction,
    replaced: Sequence[Replacement],
    on_change: OnCatalogueChange | None = None,
    later: Sequence[int] | None = None,
) -> Job[None]:
    """Replace items, and move the catalogue's version to this tick.

    Args:
        tx: with the lock of the catalogue.
        replaced: items, in ascending order of `later`.
        on_change: see `OnCatalogueChange`.
        later: how many changes later than the first the change of each item is; None: 0 for all.
    """
    previous = yield from version()
    versions = tx.catalogue_versions(previous, later or [0] * len(replaced))
    yield Update(
        "items",
        "item_no change document embedding postgres:hidden",
        [
            (item_no, change, *new, tx.by_key and _is_hidden(new[0]))
            for change, (item_no, _, new) in zip(versions, replaced, strict=True)
        ],
    )
    added = sum((old[0] is None) - (new[0] is None) for _, old, new in replaced)
    grown = sum(_size(new) - _size(old) for _, old, new in replaced)
    if on_change is not None:
        on_change(previous, versions[-1])
    yield from tx.move_catalogue(versions[-1], added, grown)


def _keep_replaced(import_no: int, replaced: Sequence[Replacement]) -> Job[None]:
    """Keep what an import replaces, for undoing it, unless it wrote that itself."""
    yield Insert(
        "$[replaced|replaced_items]",
        "sqlite:kind $[row_no|item_no] import_no written document embedding",
        [
            ("item", item_no, import_no, document_digest(new), *old)
            for item_no, old, new in replaced
        ],
        key="$[kind row_no|item_no] import_no",
        update="written = excluded.written",
    )


# ------------------------------------------------------------------------------ reads


def get_items(item_ids: Sequence[str]) -> Job[list[Item | None]]:
    """`Store.get_items`."""
    rows = yield Run(
        f"{_COLUMNS} AND item_id $in(ids) AND document IS NOT NULL", ids=list(item_ids)
    )
    by_id = {row[0]: item_from(*row) for row in rows}
    return [by_id.get(item_id) for item_id in item_ids]


def page_items(cursor: str | None, limit: int, hidden: bool) -> Job[tuple[list[Item], str | None]]:
    """`Store.page_items`."""
    (after,) = ("",) if cursor is None else position_of(cursor, str)
    only = f"AND {_HIDDEN}" if hidden else ""
    rows = yield Run(
        f"{_COLUMNS} AND item_id > :after AND document IS NOT NULL {only}"
        " ORDER BY item_id LIMIT :most",
        after=after,
        most=limit + 1,
    )
    found = [item_from(*row) for row in rows]
    return found[:limit], cursor_of(found[limit - 1].item_id) if len(found) > limit else None


def version() -> Job[int]:
    """`Store.catalogue_version`."""
    rows = yield Run(_VERSION)
    return int(rows[0][0]) if rows else 0


def changes(after: int, limit: int | None) -> Job[CatalogueChanges]:
    """`Store.catalogue_changes`."""
    until = yield from version()
    if limit is not None:
        # Up to the end of a change, which may comprise many items.
        rows = yield Run(
            "SELECT max(change) FROM (SELECT change FROM heed.items WHERE $here"
            " AND change > :after AND change <= :until ORDER BY change LIMIT :limit) AS next",
            after=after,
            until=until,
            limit=limit,
        )
        until = until if rows[0][0] is None else rows[0][0]
    rows = yield Run(
        f"{_COLUMNS} AND change > :after AND change <= :until ORDER BY change, item_no",
        after=after,
        until=until,
    )
    return CatalogueChanges(
        until,
        [item_from(*row) for row in rows if row[1] is not None],
        [item_id for item_id, document, _ in rows if document is None],
    )


def digest() -> Job[CatalogueDigest]:
    """`Store.catalogue_digest`."""
    until = yield from version()
    sha = hashlib.sha256()
    place, has_more = (0, 0), True
    while has_more:
        rows = yield Run(
            "SELECT change, item_no, item_id, octet_length(item_id), octet_length(document),"
            " octet_length(embedding), document, embedding FROM heed.items WHERE $here"
            " AND (change, item_no) > (:change, :number) AND change > 0 AND change <= :until"
            " ORDER BY change, item_no LIMIT :most",
            change=place[0],
            number=place[1],
            until=until,
            most=_DIGESTED,
        )
        for change, item_no, item_id, *lengths, document, embedding in rows:
            # Lengths before contents, so that no two lists of items are the same bytes.
            sha.update(repr([change, *lengths]).encode() + item_id.encode())
            sha.update(document or b"")
            sha.update(embedding or b"")
            place = (change, item_no)
        has_more = len(rows) == _DIGESTED
    return CatalogueDigest(until, sha.hexdigest())


def _is_hidden(document: bytes | None) -> bool:
    return document is not None and bool(orjson.loads(document).get("hidden"))


def _size(document: Document) -> int:
    if document[0] is None:
        return 0
    return ITEM_BYTES + len(document[0]) + len(document[1] or b"")
