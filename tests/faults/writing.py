"""Writers of the fault matrix, and what their journals and stores have in common afterwards."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

from service.domain.records import Event
from service.stores.sqlite.store import SQLiteStore
from tests.support import doomed_writer

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([doomed_writer.__name__])


class Journal:
    """Batches that a writer attempted, and those that were acknowledged."""

    def __init__(self, path: Path) -> None:
        self.lines = [line.split() for line in path.read_text().splitlines()]
        self.tried = {line[1]: int(line[2]) for line in self.lines if line[0] == "try"}
        self.acked = {line[1] for line in self.lines if line[0] == "ack"}

    def acks_after_error(self) -> int:
        """Return the number of acknowledgements after the first error of a commit.

        With those of batches that were attempted after an attempt was refused without a commit.
        """
        failed = refused = False
        late, count = set(), 0
        for head, *rest in self.lines:
            failed = failed or head == "err"
            refused = refused or head == "refused"
            if head == "try" and refused:
                late.add(rest[0])
            count += head == "ack" and (failed or rest[0] in late)
        return count


def lost(path: Path, journal: Path) -> int:
    """Return the number of acknowledged batches that the store lacks.

    Raises:
        AssertionError: events are there twice, in parts of a batch, or were never attempted; or
            the store does not go on.
    """
    notes = Journal(journal)

    async def look() -> Counter[str]:
        store = SQLiteStore(path)
        names = [str(event.event_id) for event in store.scan_events()]
        assert len(set(names)) == len(names) == (await store.counts())["events"], "doubled"
        await store.append([Event("after", "i")])
        await store.forget("after")
        await store.close()
        return Counter(name.rpartition("-")[0] for name in names)

    stored = asyncio.run(look())
    assert stored.keys() <= notes.tried.keys(), "never attempted"
    assert all(notes.tried[name] == size for name, size in stored.items()), "half a batch"
    return len(notes.acked - stored.keys())


def start(path: Path, journal: Path, seed: int, mode: str = "full") -> Any:
    """Start a writer in a process of its own; return the process."""
    child = FORKS.Process(target=doomed_writer.write, args=(str(path), str(journal), seed, mode))
    child.start()
    return child
