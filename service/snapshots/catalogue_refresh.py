"""The served catalogue brought up to date with the store, beside requests."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch

from models.catalogue.catalogue import Catalogue
from service.runtime.daemon_thread import run_in_daemon_thread
from service.snapshots.catalogue_updates import CatalogueUpdates
from service.snapshots.index_refresh import IndexRefresh, ServedSnapshot
from service.stores.base import OnCatalogueChange, Store

_log = logging.getLogger(__name__)

_READ_BATCH = 20_000  # items that are read at once at the start
_REFRESH_BATCH = 2_000  # items that one refresh takes over, about
_SERVING_WAIT = 10.0  # seconds after which a write is acknowledged although it is not served
_ENCODING_WAIT = 0.5  # and although a slow encoder has not yet read its texts
_TRACKED_WRITES = 256  # of all processes, at once
_PROGRESS_INTERVAL = 5.0  # seconds between two log lines while the catalogue is read

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class CatalogueWrite(Protocol[T_co]):
    """A write of the store's catalogue."""

    async def __call__(self, *, on_change: OnCatalogueChange) -> T_co:
        """Write, and call `on_change` as the store says."""
        ...


class CatalogueRefresh:
    """Takes over the changes of the store's catalogue, batch by batch, on a thread of its own.

    A write is acknowledged once its changes are served, and a request waits for acknowledged
    changes alone: writers wait for refreshes, and requests hardly ever do.

    Args:
        store: holds the items.
        served: holds the snapshot.
        updates: applies changes to the catalogue.
        indexes: are scheduled after each refresh.
        version: of the catalogue that is served.
        unacknowledged: what the processes that serve this catalogue are writing.
    """

    def __init__(
        self,
        store: Store,
        served: ServedSnapshot,
        updates: CatalogueUpdates,
        indexes: IndexRefresh,
        *,
        version: int,
        unacknowledged: UnacknowledgedWrites,
    ) -> None:
        self.version = version
        # Has other processes serve what is stored; a write is acknowledged after that.
        self.refresh_peers: Callable[[], Coroutine[None, None, object]] | None = None
        self._store = store
        self._served = served
        self._updates = updates
        self._indexes = indexes
        # Not the threads of requests, which would queue behind a refresh.
        self._thread = ThreadPoolExecutor(
            1, "heed-catalogue", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._refreshing: asyncio.Task[None] | None = None
        self._encoding: asyncio.Task[None] | None = None
        self._waiters = VersionWaiters()
        self.unacknowledged = unacknowledged

    async def read(self, catalogue: Catalogue, executor: Executor) -> Catalogue:
        """Return an empty catalogue filled with all that is stored, read batch by batch."""
        loop = asyncio.get_running_loop()
        total = (await self._store.counts())["items"]
        logged = time.monotonic()
        while await self._store.catalogue_version() != self.version:
            changes = await self._store.catalogue_changes(self.version, _READ_BATCH)
            apply = partial(self._updates.apply, catalogue, changes, defer=False)
            catalogue = await loop.run_in_executor(executor, apply)
            self.version = changes.version
            if time.monotonic() > logged + _PROGRESS_INTERVAL:
                logged = time.monotonic()
                _log.info("read %s of %s items", f"{len(catalogue):,}", f"{total:,}")
        return catalogue

    async def wait(self) -> None:
        """Return when every acknowledged change is served. Raises what a refresh raised."""
        stored = await self._store.catalogue_version()
        if stored > self.version:
            await self._reach(self.unacknowledged.acknowledged_at(stored))

    async def catch_up(self) -> None:
        """Return when everything that is stored by now is served, acknowledged or not."""
        await self._reach(await self._store.catalogue_version())

    async def follow(self) -> None:
        """Begin to take over the changes of other processes, where there are any."""
        if await self._store.catalogue_version() > self.version:
            self._begin()

    async def write(self, write: CatalogueWrite[T]) -> T:
        """Return the result of a write of the catalogue once it is served, by peers too.

        So it is a bulk import that waits for refreshes, and not the requests that come after it.
        It is acknowledged unserved after `_SERVING_WAIT`.
        """
        with self.unacknowledged.track() as on_change:
            try:
                result = await write(on_change=on_change)
                with suppress(Exception):  # the write is durable, whatever becomes of its refresh
                    await self._serve()
            finally:
                self._begin()  # also for a write whose request was given up
        return result

    async def _serve(self) -> None:
        # Of all that is stored, for a write that changed nothing may repeat another one's.
        waits: list[Coroutine[None, None, object]] = [self.catch_up()]
        if self.refresh_peers is not None:
            waits.append(self.refresh_peers())
        async with asyncio.timeout(_SERVING_WAIT):
            await asyncio.gather(*waits)
        if self._encoding is not None:
            await asyncio.wait([self._encoding], timeout=_ENCODING_WAIT)

    def close(self) -> None:
        """Abandon the refresh in progress."""
        for task in (self._refreshing, self._encoding):
            if task is not None:
                task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _reach(self, version: int) -> None:
        if self.version < version:
            self._begin()
            await self._waiters.wait(version)

    def _begin(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        """Take over changes until there are none left."""
        try:
            while await self._store.catalogue_version() > self.version:
                async with self._served.lock:
                    changes = await self._store.catalogue_changes(self.version, _REFRESH_BATCH)
                    await self._update(partial(self._updates.apply, changes=changes, defer=True))
                    self.version = changes.version
                self._waiters.wake(self.version)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            _log.exception("the catalogue was not refreshed")
            self._waiters.fail(error)

    async def _update(self, update: Callable[[Catalogue], Catalogue]) -> None:
        """Serve a snapshot of the updated catalogue. Call it under the lock."""
        base, counts = self._served.snapshot, self._served.counts
        await self._served.replace(
            self._thread, lambda: base.refreshed(update(base.catalogue), counts)
        )
        if self._updates.deferred and self._encoding is None:
            self._encoding = asyncio.create_task(self._encode_deferred())
        self._indexes.schedule()

    async def _encode_deferred(self) -> None:
        """Encode the texts that refreshes left out, and give their items the keys."""
        try:
            while self._updates.deferred:
                await run_in_daemon_thread(self._updates.encode_deferred, "heed-encoding")
                async with self._served.lock:
                    await self._update(self._updates.apply_encoded)
        except Exception:  # noqa: BLE001 - the items are found by their words
            _log.exception("texts of %d items were not encoded", self._updates.deferred)
        finally:
            self._encoding = None


class UnacknowledgedWrites:
    """Tells which catalogue versions an answer may still lack.

    A version is entered by the store's writer before its transaction is committed, so that no
    reader sees a version that is missing here, and is removed when the write is acknowledged.
    Processes that are forked share the table, and with it what each of them is writing.
    """

    def __init__(self) -> None:
        # Rows of (the version before, version); version 0 is a free row.
        memory = mmap.mmap(-1, _TRACKED_WRITES * 2 * 8)
        self._table = np.frombuffer(memory, np.int64).reshape(_TRACKED_WRITES, 2)
        self._rows: dict[int, int] = {}  # version -> its row; of this process

    @contextmanager
    def track(self) -> Iterator[OnCatalogueChange]:
        """Track the changes of one write, whose acknowledgement is the end of the block.

        Yields:
            A callback for the store, to be called on any thread while no other process writes.
        """
        versions: list[int] = []

        def on_change(previous: int, version: int) -> None:
            # Writes of one transaction share its version: the first knows the one before.
            if previous < version and version not in self._rows:
                table = self._table
                table[table[:, 1] == version] = 0  # left by a process that was killed
                free = np.flatnonzero(table[:, 1] == 0)
                if len(free):  # else requests wait for the write, as for one of another program
                    table[free[0]] = previous, version
                    self._rows[version] = int(free[0])
                    versions.append(version)

        try:
            yield on_change
        finally:
            for version in versions:
                self._table[self._rows.pop(version)] = 0

    def acknowledged_at(self, version: int) -> int:
        """Return the latest version, up to this one, that a client may have been told of."""
        previous = {own: before for before, own in self._table.tolist() if own}
        while (before := previous.get(version)) is not None:
            version = before
        return version


class VersionWaiters:
    """Tasks of one event loop that wait until a version of the catalogue is served."""

    def __init__(self) -> None:
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, version: int) -> None:
        """Return when this version is served. Raises the error that `fail` is given."""
        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((version, served))
        await served

    def wake(self, version: int) -> None:
        """Resume the tasks that wait for this version or an earlier one."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            awaited, served = waiter
            if awaited > version:
                self._waiters.append(waiter)
            elif not served.done():  # else its task was cancelled
                served.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise an error in every waiting task."""
        waiters, self._waiters = self._waiters, []
        for _, served in waiters:
            if not served.done():
                served.set_exception(error)
