"""Import of a data set into a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from service.datasets.base import Dataset, batches
from service.stores.base import AppendResult, Store

_BATCH = 20_000  # events of one transaction, which share an fsync


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Outcome of an import."""

    items: int
    events: int
    duplicates: int
    seconds: float


async def import_dataset(
    store: Store, source: Dataset, progress: Callable[[str, int], None] = lambda *_: None
) -> ImportResult:
    """Store all items, then all events; rows that are already stored change nothing.

    After each batch `progress` is called with "items" or "events" and the number of rows handled.
    """
    started = time.monotonic()
    items = stored = duplicates = 0
    for batch in batches(source.items(), 1_000):
        items += await store.put_items(batch)
        progress("items", items)
    # While the writer's thread stores one batch, the next is read.
    storing: asyncio.Task[AppendResult] | None = None
    for events in chain(batches(source.events(), _BATCH), [None]):
        if storing is not None:
            appended = await storing
            stored, duplicates = stored + appended.stored, duplicates + appended.duplicates
            progress("events", stored + duplicates)
        if events is not None:
            storing = asyncio.create_task(store.append(events))
            await asyncio.sleep(0)
    return ImportResult(items, stored, duplicates, time.monotonic() - started)
