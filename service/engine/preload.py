"""Data that several workers share: loaded by one process, which is then safe to fork."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from dataclasses import replace
from pathlib import Path

from models.catalogue import cow
from service.domain.errors import Unavailable
from service.domain.settings import Settings
from service.engine.compose import compose
from service.runtime.memory import trim
from service.runtime.workers import SharedArrays
from service.snapshots.served import Served

_THREAD_EXIT_TIMEOUT = 10.0  # seconds for threads to end that were told to
_TASKS = Path("/proc/self/task")


def preload(settings: Settings) -> Served:
    """What is served, in a process that has no thread but this one and no file of the store open.

    A fork copies only the thread that asks for it: a lock that another held would stay held for
    ever, and a pool would wait for threads that are not there. SQLite's locks do not survive one.

    Raises what `compose` and `LiveSnapshot.open` raise; `Unavailable` when a thread does not end.
    """
    # Tokenizers would start threads of their own, which never end.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Not uvloop, whose library never ends its threads.
    loaded = asyncio.run(_load(settings))
    # What earlier states of the catalogue held is let go of, so that files hold the latest.
    gc.collect()
    cow.seal()
    trim()
    _wait_until_single_threaded()
    # The collector writes to each object that it looks at, and a page that is written to is shared
    # no more.
    gc.freeze()
    return loaded


async def _load(settings: Settings) -> Served:
    parts = compose(settings, threads=1)
    try:
        await parts.live.open()
        parts.embeddings.load()
    finally:
        await parts.close()
    index = parts.live.snapshot.catalogue.bm25_writer
    if index is not None:
        index.rest()
    # The log is read by a worker: it would make the start longer with every event.
    return replace(parts.live.served, event_log=SharedArrays())


def _wait_until_single_threaded() -> None:
    """Wait until this is the only thread. Raises `Unavailable`, naming those that stay."""
    deadline = time.monotonic() + _THREAD_EXIT_TIMEOUT
    while len(names := _threads()) > 1:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"workers cannot be forked beside running threads ({', '.join(names)}); "
                "serve with HEED_WORKERS=1"
            )
        time.sleep(0.01)


def _threads() -> list[str]:
    """The names of this process' threads, those of libraries among them."""
    names = []
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return names
