"""The console script as tests call it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore


class Said(NamedTuple):
    """Exit code, output and errors of a command."""

    code: int
    out: str
    err: str


Heed = Callable[..., Said]


def counts(data: Path) -> dict[str, int]:
    """Return the counts of a data directory's store."""

    async def look() -> dict[str, int]:
        store = SQLiteStore(data / STORE_FILE)
        try:
            return await store.counts()
        finally:
            await store.close()

    return asyncio.run(look())
