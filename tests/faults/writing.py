"""A process that appends events to a store until it is stopped, and a journal of what it did.

The journal stands outside the faulted place and is written with one write(2) a line, so that a
killed process loses none of its lines. Weaker modes break a promise deliberately: `normal` does
not sync each commit, `unsynced` syncs nothing, `early` acknowledges before the commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import apsw

from service.domain.errors import HeedError
from service.domain.records import Event
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.store import SQLiteStore

USERS = 4
MODES = ("full", "normal", "unsynced", "early")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def write(path: str, journal: str, seed: int, mode: str = "full") -> None:
    """Append batches of 1 to 20 events for ever, with a line in the journal before and after."""
    if mode in ("normal", "unsynced"):
        _weaken(mode)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_write(path, journal, seed, mode))


def _weaken(mode: str) -> None:
    full = DatabaseFile.writer

    def writer(file: DatabaseFile) -> apsw.Connection:
        connection = full(file)
        connection.pragma("synchronous", {"normal": "NORMAL", "unsynced": "OFF"}[mode])
        return connection

    setattr(DatabaseFile, "writer", writer)  # noqa: B010  # a method, which mypy guards


async def _write(path: str, journal: str, seed: int, mode: str) -> None:
    notes = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = SQLiteStore(path)
    os.write(notes, b"open\n")

    async def user(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        for batch in range(1_000_000):
            name, size = f"{seed}-{number}-{batch}", rng.randint(1, 20)
            events = [
                Event(f"u{number}", f"i{k}", f"{name}-{k}", timestamp=rng.randrange(10**6))
                for k in range(size)
            ]
            os.write(notes, f"try {name} {size}\n".encode())
            if mode == "early":
                waiting = asyncio.ensure_future(store.append(events))
                os.write(notes, f"ack {name} {size}\n".encode())
                await asyncio.sleep(0)
                await waiting
                continue
            try:
                await store.append(events)
            except HeedError as error:
                os.write(notes, f"err {type(error).__name__}\n".encode())
                await asyncio.sleep(0.01)
            else:
                os.write(notes, f"ack {name} {size}\n".encode())

    await asyncio.gather(*(user(number) for number in range(USERS)))


class Journal:
    """What a writer attempted and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.lines = [line.split() for line in path.read_text().splitlines()]
        self.tried = {line[1]: int(line[2]) for line in self.lines if line[0] == "try"}
        self.acked = {line[1] for line in self.lines if line[0] == "ack"}

    def acks_after_error(self) -> int:
        """Return the number of acknowledgements after the first error."""
        heads = [line[0] for line in self.lines]
        return heads[heads.index("err") :].count("ack") if "err" in heads else 0


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
    child = FORKS.Process(target=write, args=(str(path), str(journal), seed, mode))
    child.start()
    return child


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
