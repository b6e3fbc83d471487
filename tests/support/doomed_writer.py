"""A process that appends until it is killed, and says what it tried and what was acknowledged.

It imports little, so that a fork server can start many; see test_durability.
"""

import asyncio
import os
import random

from service.domain.records import Event, Item
from service.stores.sqlite.store import SQLiteStore

USERS = 4  # each written to by a task of its own


def write(path: str, journal: str, seed: int) -> None:
    """Append batches of 1 to 20 events for ever; one line in `journal` before and after each."""
    asyncio.run(_write(path, journal, seed))


async def _write(path: str, journal: str, seed: int) -> None:
    # One write(2) per line: a killed process has lost none of those it has made.
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
            await store.append(events)
            os.write(notes, f"ack {name} {size}\n".encode())
            if batch % 8 == 0:
                await store.put_items([Item(f"i{rng.randrange(50)}", name)])

    await asyncio.gather(*(user(number) for number in range(USERS)))
