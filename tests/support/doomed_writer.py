"""A process that appends events to a store until it is stopped, and a journal of what it did.

The journal stands outside the faulted place and is written with one write(2) a line, so that a
killed process loses none of its lines. Weaker modes break a promise deliberately: `normal` does
not sync each commit, `unsynced` syncs nothing, `early` acknowledges before the commit. The module
imports little, so that a fork server can start many.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys

import apsw

from service.domain.errors import HeedError
from service.domain.records import Event, Item
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.store import SQLiteStore

USERS = 4  # each written to by a task of its own


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
            if batch % 8 == 7:
                with contextlib.suppress(HeedError):
                    await store.put_items([Item(f"i{rng.randrange(50)}", name)])
            if mode == "early":
                waiting = asyncio.ensure_future(store.append(events))
                os.write(notes, f"ack {name} {size}\n".encode())
                await asyncio.sleep(0)
                await waiting
                continue
            queued = asyncio.Event()  # set where the append waits for the writer's thread
            asyncio.get_running_loop().call_soon(queued.set)
            try:
                await store.append(events)
            except HeedError as error:
                # Immediate refusals may come before the acknowledgements, on their way from
                # that thread, of commits before the failure. What was queued comes in order.
                kind = "err" if queued.is_set() else "refused"
                os.write(notes, f"{kind} {type(error).__name__}\n".encode())
                await asyncio.sleep(0.01)
            else:
                os.write(notes, f"ack {name} {size}\n".encode())

    await asyncio.gather(*(user(number) for number in range(USERS)))


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
