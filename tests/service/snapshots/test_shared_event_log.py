"""The event log that one process reads and others map."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from models.data.event_log import EventLog
from models.data.vocabulary import Vocabulary
from service.domain.records import Event
from service.runtime.workers import SharedArrays
from service.snapshots.live_event_log import LiveEventLog
from service.stores.sqlite.store import SQLiteStore

COMMON = ("a", "b")  # items whose rows are the same in all processes


def log_of(count: int, first: int = 0) -> list[Event]:
    """Events of three users on five items; every seventh is a purchase."""
    return [
        Event(
            f"user-{n % 3}",
            "abcde"[n % 5],
            timestamp=1_000 * (n % 40),
            type="view" if n % 7 else "purchase",
            event_id=str(n),
        )
        for n in range(first, first + count)
    ]


def rows_of(log: EventLog, items: Vocabulary) -> list[tuple[object, ...]]:
    """All events of a log by the ids of their items, sorted."""
    events = log.between(None, None)
    return sorted(zip(events.users.tolist(), items.ids_of(events.items), events.types.tolist(),
                      events.timestamps.tolist(), strict=True))  # fmt: skip


async def test_the_second_process_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that was published is answered by all, as if each had read it; only news are read."""
    store, executor = SQLiteStore(tmp_path / "heed.db"), ThreadPoolExecutor(1)
    await store.append(log_of(300))
    alone, first_items, second_items = (Vocabulary(COMMON) for _ in range(3))
    shared = SharedArrays()
    first = LiveEventLog(store, first_items, executor, shared=shared)
    second = LiveEventLog(store, second_items, executor, shared=shared)
    second_items.extend(["z", "e"])  # which the other process numbers otherwise
    published = await first.current()
    read = []
    log_changes = store.log_changes

    async def counted(*arguments: object) -> object:
        changes = await log_changes(*arguments)  # type: ignore[arg-type]
        read.append(len(changes.events))
        return changes

    monkeypatch.setattr(store, "log_changes", counted)
    mapped = await second.current()
    assert sum(read) == 0
    every = rows_of(await LiveEventLog(store, alone, executor).current(), alone)
    assert len(every) == 300
    read.clear()
    for step in range(3):
        assert rows_of(published, first_items) == every
        assert rows_of(mapped, second_items) == every
        assert mapped.sizes == published.sizes
        for item_id in "abcde":
            one, other = first_items.row(item_id), second_items.row(item_id)
            times = [
                log.of_item(row).timestamps for log, row in ((published, one), (mapped, other))
            ]
            assert len(times[0]) > 0
            assert np.array_equal(np.sort(times[0]), np.sort(times[1]))
        assert np.array_equal(np.sort(first.type_codes(None)), np.sort(second.type_codes(None)))
        if step == 0:
            await store.append(log_of(5, first=300))
        else:
            await store.forget("user-1")
        published, mapped = await first.current(), await second.current()
        every = rows_of(await LiveEventLog(store, alone, executor).current(), alone)
    executor.shutdown()
    await store.close()
