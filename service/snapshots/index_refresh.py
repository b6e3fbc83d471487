"""The snapshot that requests read, and new indexes of it built beside requests."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.index.faiss_structures import StructureCache
from service.runtime import durable_files
from service.runtime.logs import log_failure
from service.runtime.threads import run_in_daemon_thread

_log = logging.getLogger(__name__)

_STEADY = 1.0  # seconds without a change of the catalogue after which indexes are built
_CHANGING = 5  # times as many rows may stand beside the indexes while the catalogue changes


@dataclass
class ServedSnapshot:
    """The snapshot that requests read. A snapshot never changes; under `lock` it is replaced."""

    current: Snapshot | None
    counts: NDArray[np.int64]  # popularity by item row
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    replaced_at: float = field(default_factory=time.monotonic)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot. Raises RuntimeError before there is one."""
        if self.current is None:
            raise RuntimeError("not opened")
        return self.current

    async def replace(self, executor: Executor, make: Callable[[], Snapshot]) -> None:
        """Serve the snapshot that `make` returns on the executor. Call it under the lock."""
        self.current = await asyncio.get_running_loop().run_in_executor(executor, make)
        self.replaced_at = time.monotonic()


class IndexRefresh:
    """Builds new indexes where they are due, on a thread of their own.

    Args:
        executor: where the indexes are put into the snapshot of then.
        index_from: number of rows from which on an index is built, as in `Snapshot.build`.
        lock: a file that processes of one catalogue lock, to build one after the other.
        cache: of indexes that were built before.
    """

    def __init__(
        self,
        served: ServedSnapshot,
        executor: Executor,
        *,
        index_from: int,
        lock: Path | None,
        cache: StructureCache | None,
    ) -> None:
        self._served = served
        self._executor = executor
        self._index_from = index_from
        self._lock = lock
        # Of this process, since it started.
        self.builds = 0
        self.failures = 0
        self.build_seconds = 0.0
        self._cache = cache
        self._timer: asyncio.TimerHandle | None = None
        self._building: asyncio.Task[None] | None = None

    def schedule(self) -> None:
        """Have indexes built that are due, once the catalogue has stopped changing.

        During a bulk import, indexes of a moment would take the processor from requests: they are
        built only when many more rows stand beside them.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._building is None and self._are_due():
            delay = 0.0 if self._are_due(_CHANGING) else _STEADY
            self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    @property
    def is_building(self) -> bool:
        """True while indexes are built."""
        return self._building is not None

    async def wait(self) -> None:
        """Return when no indexes are being built."""
        if self._building is not None:
            await asyncio.wait([self._building])

    def close(self) -> None:
        """Abandon the indexes that are being built."""
        for each in (self._timer, self._building):
            if each is not None:
                each.cancel()

    def _are_due(self, times: int = 1) -> bool:
        return self._served.snapshot.needs_reindex(index_from=times * self._index_from)

    def _begin(self) -> None:
        if self._building is None and self._are_due():
            self._building = asyncio.create_task(self._build())

    async def _build(self) -> None:
        base = self._served.snapshot
        started = time.monotonic()
        try:
            indexed = await run_in_daemon_thread(partial(self._indexed, base), "heed-indexing")
            async with self._served.lock:
                now = self._served.snapshot
                if now.model is base.model:  # another model comes with its own indexes
                    adopt = partial(now.with_indexes, base, indexed)
                    await self._served.replace(self._executor, adopt)
            took = time.monotonic() - started
            self.builds += 1
            self.build_seconds += took
            _log.info("indexed %s items anew in %.0f s", f"{len(indexed.catalogue):,}", took)
        except Exception as error:  # noqa: BLE001 - the old ones still answer
            self.failures += 1
            log_failure(_log, "the catalogue was not indexed; the old indexes answer", error)
        finally:
            self._building = None

    def _indexed(self, base: Snapshot) -> Snapshot:
        lock = self._lock
        with nullcontext() if lock is None else durable_files.locked(lock, math.inf):
            return base.reindexed(index_from=self._index_from, cache=self._cache)
