"""Import of a data set into a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from service.datasets.base import Dataset, batches
from service.datasets.files import RecordFile, SkippedRows
from service.stores.base import AppendResult, Store

_BATCH = 20_000  # events of one transaction, which share an fsync


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Outcome of an import."""

    name: str
    items: int
    events: int
    duplicates: int
    seconds: float
    skipped: SkippedRows


def import_dataset(
    store: Store, source: Dataset, progress: Callable[[str, int], None] = lambda *_: None
) -> ImportResult:
    """Store all items, then all events; rows that are already stored change nothing.

    Args:
        store: to import into.
        source: the data set.
        progress: called with "items" or "events" and the number of rows handled, after each batch.
    """
    return asyncio.run(_import_dataset(store, source, progress))


async def _import_dataset(
    store: Store, source: Dataset, progress: Callable[[str, int], None]
) -> ImportResult:
    started = time.monotonic()
    items = 0
    for batch in batches(source.items(), 1_000):
        items += await store.put_items(batch)
        progress("items", items)
    events, duplicates = await _append_all(store, source, progress)
    skipped = source.skipped if isinstance(source, RecordFile) else SkippedRows()
    seconds = time.monotonic() - started
    return ImportResult(source.name, items, events, duplicates, seconds, skipped)


async def _append_all(
    store: Store, source: Dataset, progress: Callable[[str, int], None]
) -> AppendResult:
    """Append all events; while the writer's thread stores one batch, the next is read."""
    stored = duplicates = 0
    storing: asyncio.Task[AppendResult] | None = None
    for batch in chain(source.event_batches(_BATCH), [None]):
        if storing is not None:
            appended = await storing
            stored, duplicates = stored + appended.stored, duplicates + appended.duplicates
            progress("events", stored + duplicates)
        if batch is not None:
            storing = asyncio.create_task(store.append(batch))
            await asyncio.sleep(0)
    return AppendResult(stored, duplicates)
