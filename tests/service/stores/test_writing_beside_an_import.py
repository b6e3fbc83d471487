"""Writes of a service while another process imports into the same file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.datasets.base import Dataset
from service.datasets.imports import import_dataset
from service.domain.records import Event
from service.stores.sqlite.store import SQLiteStore

pytestmark = pytest.mark.verify

EVENTS = 40_000


class Log(Dataset):
    """A data set of events alone."""

    def events(self) -> Iterator[Event]:
        """Events of a thousand users."""
        for number in range(EVENTS):
            user, item = f"u{number % 1_000}", f"i{number % 100}"
            yield Event(user, item, f"e{number}", timestamp=number + 1)


async def test_single_events_are_stored_between_the_transactions_of_an_import(
    tmp_path: Path,
) -> None:
    """An import leaves the lock often enough for other writers to be acknowledged meanwhile."""
    importing, serving = (SQLiteStore(tmp_path / "heed.db") for _ in range(2))
    stored = 0

    async def write_singly() -> None:
        nonlocal stored
        while True:
            await serving.append([Event("someone", "i0", f"single-{stored}")])
            stored += 1
            await asyncio.sleep(0)

    writing = asyncio.create_task(write_singly())
    done = await import_dataset(importing, Log("log"))
    meanwhile = stored
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert (done.events, done.duplicates) == (EVENTS, 0)
    assert meanwhile >= 6  # with SQLite's own waiting and large transactions, one or two
    assert (await serving.counts())["events"] >= EVENTS + meanwhile
    await importing.close()
    await serving.close()
