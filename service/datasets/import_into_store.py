"""Import of a data set or of profiles into a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from service.datasets.base import Dataset, batches
from service.datasets.files.record_files import ItemsFile, UsersFile
from service.domain.records import Event, Item
from service.stores.base import Store
from service.stores.values import AppendResult

T = TypeVar("T")
Through = Callable[[Iterable[T]], Iterator[T]]

_BATCH = 4_000  # events of one transaction, ~0.1 s: other processes that write wait for it
_GAP = 0.004  # seconds between two transactions, in which a process that waits can begin its own
_PATCHES = 1_000  # items of one transaction
_USERS = 1_000  # profiles stored concurrently


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Outcome of an import."""

    items: int
    events: int
    duplicates: int
    seconds: float

    def __str__(self) -> str:
        """Return the counts of what the source has."""
        parts = []
        if self.events or self.duplicates:
            parts = [f"{self.events:,} events stored", f"{self.duplicates:,} were there already"]
        if self.items:
            parts.insert(0, f"{self.items:,} items" if parts else f"{self.items:,} items stored")
        return f"{', '.join(parts) or 'nothing to store'}, in {self.seconds:.1f} s"


async def import_dataset(
    store: Store,
    source: Dataset,
    progress: Callable[[str, int], None] = lambda *_: None,
    *,
    import_id: int | None = None,
    items_through: Through[Item] = iter,
    events_through: Through[Event] = iter,
) -> ImportResult:
    """Store all items, then all events; rows that are already stored change nothing.

    Args:
        store: the store.
        source: the data set.
        progress: called after each batch with "items" or "events" and the number of rows handled.
        import_id: of `Store.begin_import`.
        items_through: through which the items pass.
        events_through: through which the events pass.
    """
    started = time.monotonic()
    items = stored = duplicates = 0
    for batch in batches(items_through(source.items()), 1_000, source.progress):
        items += await store.put_items(batch, import_id=import_id)
        progress("items", items)
        await asyncio.sleep(_GAP)
    # While the writer's thread stores one batch, the next is read.
    storing: asyncio.Task[AppendResult] | None = None
    for events in chain(batches(events_through(source.events()), _BATCH, source.progress), [None]):
        if storing is not None:
            appended = await storing
            stored, duplicates = stored + appended.stored, duplicates + appended.duplicates
            progress("events", stored + duplicates)
            await asyncio.sleep(_GAP)
        if events is not None:
            storing = asyncio.create_task(store.append(events, import_id=import_id))
            await asyncio.sleep(0)
    return ImportResult(items, stored, duplicates, time.monotonic() - started)


async def import_patches(store: Store, source: ItemsFile, *, import_id: int | None = None) -> int:
    """Apply the rows of a file as changes of items, and return the number of rows."""
    count = 0
    for batch in batches(source.patches(), _PATCHES, source.progress):
        await store.patch_items(batch, import_id=import_id)
        count += len(batch)
        await asyncio.sleep(_GAP)
    return count


async def import_users(store: Store, source: UsersFile, *, import_id: int | None = None) -> int:
    """Store all profiles and return their number. Of one user the last one wins."""
    count = 0
    for batch in batches(source.records(), _USERS, source.progress):
        # Concurrently, since writes that wait together share a commit; the writer keeps the order.
        await asyncio.gather(*(store.put_user(user, import_id=import_id) for user in batch))
        count += len(batch)
        await asyncio.sleep(_GAP)
    return count
