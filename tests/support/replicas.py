"""Machines that serve one namespace of a PostgreSQL database, each with a data directory.

This file is also the program of such a machine: `python -m tests.support.replicas URL NAMESPACE
DATA` follows what is current, and prints a line of JSON whenever it serves something else.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from models.text.encoders import StaticEncoder
from service.snapshots.live_snapshot import LiveSnapshot, Served
from service.snapshots.shared_registry import open_registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.postgres.store import PostgresStore
from tests.support.heed_process import PATIENCE, ROOT

_POLL = 0.05  # seconds between two looks


@asynccontextmanager
async def served(url: str, namespace: str, data: Path) -> AsyncIterator[LiveSnapshot]:
    """Open the snapshot that a machine serves."""
    store = PostgresStore(url, namespace=namespace)
    try:
        with ThreadPoolExecutor(1) as pool:
            registry = open_registry(data, store)
            live = LiveSnapshot(store, registry, Served(EmbeddingCache(StaticEncoder())), pool)
            await live.open()
            yield live
            live.close()
    finally:
        await store.close()


class ReplicaProcess:
    """A machine as a process of its own, until the block ends."""

    def __init__(self, url: str, namespace: str, data: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.replicas", url, namespace, str(data)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._said: dict[str, Any] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return what the machine serves once that is as it should be."""
        with self._changed:
            assert self._changed.wait_for(lambda: reached(self._said), PATIENCE), self._said
            return self._said

    def kill(self) -> None:
        """End the process as a loss of power does."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._said = json.loads(line)
                    self._changed.notify_all()


async def _follow(url: str, namespace: str, data: Path) -> None:
    said = None
    async with served(url, namespace, data) as live:
        while True:
            now = {"version": live.snapshot.version, "fault": live.served.fault}
            if now != said:
                sys.stdout.write(json.dumps(now) + "\n")
                sys.stdout.flush()
                said = now
            await asyncio.sleep(_POLL)
            await live.follow_registry()


if __name__ == "__main__":
    asyncio.run(_follow(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
