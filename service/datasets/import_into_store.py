"""A data set into a store, with a progress bar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from service.datasets import Dataset, batches
from service.stores.base import Store

_BATCH = 20_000  # events a transaction: one fsync for many


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a data set."""

    name: str
    items: int
    events: int
    duplicates: int
    seconds: float
    bad: int  # rows that were left out
    skipped: Sequence[str]  # the first of them, described


def load(store: Store, source: Dataset, console: Console) -> Imported:
    """Store all items, then all events; a row that is there already changes nothing."""
    return asyncio.run(_load(store, source, console))


async def _load(store: Store, source: Dataset, console: Console) -> Imported:
    started = time.monotonic()
    items = events = duplicates = 0
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{source.name}: items", rows=0)
        for batch in batches(source.items(), 1_000):
            items += await store.put_items(batch)
            bar.update(
                task, completed=source.progress.done, total=source.progress.total, rows=items
            )
        bar.update(task, description=f"{source.name}: events", completed=0, rows=0)
        ahead: asyncio.Task[tuple[int, int]] | None = None
        for batch_of_events in source.event_batches(_BATCH):
            # While the writer's thread stores one batch, the next is being read.
            if ahead is not None:
                stored, again = await ahead
                events, duplicates = events + stored, duplicates + again
            ahead = asyncio.create_task(_append(store, batch_of_events))
            await asyncio.sleep(0)
            bar.update(
                task,
                completed=source.progress.done,
                total=source.progress.total,
                rows=events + duplicates,
            )
        if ahead is not None:
            stored, again = await ahead
            events, duplicates = events + stored, duplicates + again
    skipped = getattr(source, "skipped", None)
    return Imported(
        source.name,
        items,
        events,
        duplicates,
        time.monotonic() - started,
        0 if skipped is None else skipped.count,
        () if skipped is None else skipped.first,
    )


async def _append(store: Store, events: Sequence[object]) -> tuple[int, int]:
    appended = await store.append(events)  # type: ignore[arg-type]
    return appended.stored, appended.duplicates
