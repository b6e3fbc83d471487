"""Copying of items: their names in the order of arrival, the catalogue in the order of its changes.

Both orders number items for whoever reads them, and so decide what comes first of equals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from service.stores.records.copying import BulkAccess
from service.stores.values import MAX_ITEMS, StoredItem

_NAMES = 10_000  # in one transaction


async def copy_items(
    source: BulkAccess, target: BulkAccess, progress: Callable[[int, int], None]
) -> None:
    """Bring the items of the target to the state of the source.

    Args:
        source: access to the store that is copied.
        target: access to the store that is copied to.
        progress: called with the items that are written, and all that are to be.
    """
    after = 0
    while names := await source.item_names(after, _NAMES):
        after = names[-1][0]
        await target.add_item_names([name for _, name in names])
    changed, unknown = await _compare(source, target)
    gone = [
        StoredItem(item.item_id, True, None, None, [], (0, 0))
        for item in unknown
        if item.document is not None or item.replaced
    ]
    for start in range(0, len(gone), MAX_ITEMS):
        await target.put_items(gone[start : start + MAX_ITEMS])
    # Also those that the source itself has yet to look at.
    names_alone = [item.item_id for item in unknown if not item.was_put]
    discarded = names_alone + await source.noted_item_names()
    for start in range(0, len(discarded), _NAMES):
        await target.discard_item_names(discarded[start : start + _NAMES])
    ids = [item_id for _, item_id in sorted(changed)]
    progress(0, len(ids))
    for start in range(0, len(ids), MAX_ITEMS):
        items = await source.find_items(ids[start : start + MAX_ITEMS])
        await target.put_items(sorted(items, key=lambda item: item.place))
        progress(start + len(items), len(ids))


async def _compare(
    source: BulkAccess, target: BulkAccess
) -> tuple[list[tuple[tuple[int, int], str]], list[StoredItem]]:
    """Return the places and ids of items that differ, and what the target alone has."""
    changed: list[tuple[tuple[int, int], str]] = []
    unknown: list[StoredItem] = []
    theirs = _items(target)
    other = await anext(theirs, None)
    async for item in _items(source):
        while other is not None and other.item_id < item.item_id:  # by code points, as by bytes
            unknown.append(other)
            other = await anext(theirs, None)
        if other is None or other.item_id != item.item_id:
            changed.append((item.place, item.item_id))  # named since
            continue
        if other != item:
            changed.append((item.place, item.item_id))
        other = await anext(theirs, None)
    while other is not None:
        unknown.append(other)
        other = await anext(theirs, None)
    return changed, unknown


async def _items(store: BulkAccess) -> AsyncIterator[StoredItem]:
    after = ""
    while page := await store.items(after, MAX_ITEMS):
        after = page[-1].item_id
        for item in page:
            yield item
