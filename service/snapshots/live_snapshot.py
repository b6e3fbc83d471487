"""The served snapshot, kept up with the store's catalogue and with the registry's current model."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import INDEX_FROM, Snapshot
from models.data.vocabulary import Vocabulary
from models.text.bm25 import WordIndex
from service.domain.errors import HeedError
from service.domain.records import Item
from service.runtime import durable_files
from service.runtime.daemon_thread import run_in_daemon_thread
from service.snapshots.catalogue_updates import CatalogueUpdates
from service.snapshots.catalogue_versions import UnacknowledgedWrites, VersionWaiters
from service.snapshots.model_loading import load_snapshot
from service.snapshots.registry import PointerToken, Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import OnCatalogueChange, Store

_log = logging.getLogger(__name__)

_READ_BATCH = 20_000  # items that are read at once at the start
_REFRESH_BATCH = 2_000  # items that one refresh takes over, about
_PROGRESS_INTERVAL = 5.0  # seconds between two log lines while the catalogue is read
_STEADY = 1.0  # seconds without a change after which indexes are brought up to date
_CHANGING = 5  # times as many rows may stand beside the indexes while the catalogue changes

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class _CatalogueWrite(Protocol[T_co]):
    async def __call__(self, *, on_change: OnCatalogueChange) -> T_co: ...


@dataclass(frozen=True, slots=True, eq=False)
class PreloadedSnapshot:
    """State of a `LiveSnapshot` that forked processes start from, and whose memory they share."""

    embeddings: EmbeddingCache
    vocabulary: Vocabulary
    snapshot: Snapshot
    counts: NDArray[np.int64]
    catalogue_version: int
    token: PointerToken | None


class LiveSnapshot:
    """Holds the snapshot that requests read, and replaces it; a snapshot itself never changes.

    Vocabulary rows belong to the process: they keep their meaning across model versions, so
    neither the catalogue's vectors nor the cached histories are rebuilt by a swap.

    Changes of the catalogue are taken over beside requests, batch by batch, on a thread of their
    own. A write is acknowledged once they are, and a request waits for acknowledged changes alone.

    Args:
        store: holds the items.
        registry: holds the models.
        embeddings: of the items' texts.
        executor: where models are loaded.
        index_from: number of rows from which on an index is built.
        preloaded: state to start from, in a forked process.
        indexing_lock: a file that processes of one catalogue lock while they build indexes.
        write_wait: seconds after which a write is acknowledged although its refresh takes longer.
    """

    def __init__(
        self,
        store: Store,
        registry: Registry,
        embeddings: EmbeddingCache,
        executor: Executor,
        *,
        index_from: int = INDEX_FROM,
        preloaded: PreloadedSnapshot | None = None,
        indexing_lock: Path | None = None,
        write_wait: float = 0.5,
    ) -> None:
        self.vocabulary = Vocabulary() if preloaded is None else preloaded.vocabulary
        self._store = store
        self._registry = registry
        self._embeddings = embeddings
        self._executor = executor
        self._index_from = index_from
        self._indexing_lock = indexing_lock  # a file that is locked by whoever makes indexes
        self._lock = asyncio.Lock()
        self._counts = np.zeros(0, dtype=np.int64)
        self._counted_at = -1  # the tick of the store at which they were counted
        self._catalogue_version = 0
        self._token: PointerToken | None = None
        self._snapshot: Snapshot | None = None
        if preloaded is not None:
            self._counts = preloaded.counts
            self._catalogue_version = preloaded.catalogue_version
            self._token = preloaded.token
            self._snapshot = preloaded.snapshot
        self._degraded = False
        self._unfinished: set[asyncio.Task[Snapshot]] = set()
        # Not the executor's threads, where requests would queue behind a refresh.
        self._refresher = ThreadPoolExecutor(
            1, "heed-catalogue", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._refreshing: asyncio.Task[None] | None = None
        self._indexing_timer: asyncio.TimerHandle | None = None
        self._encoding: asyncio.Task[None] | None = None
        self._updates = CatalogueUpdates(embeddings)
        self._waiters = VersionWaiters()
        self._unacknowledged = UnacknowledgedWrites()
        self._write_wait = write_wait
        self._indexing: asyncio.Task[None] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The latest snapshot, which may lag behind the catalogue; see `current`."""
        if self._snapshot is None:
            raise RuntimeError("not opened")
        return self._snapshot

    @property
    def degraded(self) -> bool:
        """True while what was made current cannot be served, and an older version answers."""
        return self._degraded

    async def open(self) -> None:
        """Load the catalogue, popularity and the current model.

        Of what was loaded already only what has changed since: a model that was made current
        meanwhile and cannot be served leaves it `degraded`.

        Raises:
            Corrupt: naming the model file that fails its checks.
            ModelRejected: when the current model does not fit this service.
        """
        if self._snapshot is not None:
            await self.current()
            await self.follow_registry()
            return
        loop = asyncio.get_running_loop()
        self._token = self._registry.current_token()
        await self._count_popularity()
        catalogue = await self._read()

        def build() -> Snapshot:
            self._embeddings.save()
            return self._load(self._registry.current(), catalogue)

        self._snapshot = await loop.run_in_executor(self._executor, build)

    def preloaded(self) -> PreloadedSnapshot:
        """What is served now, for the `LiveSnapshot` of another process to start from."""
        return PreloadedSnapshot(
            self._embeddings,
            self.vocabulary,
            self.snapshot,
            self._counts,
            self._catalogue_version,
            self._token,
        )

    async def wait_for_indexing(self) -> None:
        """Return when no indexes are in the making."""
        if self._indexing is not None:
            await asyncio.wait([self._indexing])

    def close(self) -> None:
        """Abandon indexes and refreshes in the making."""
        for task in (self._indexing, self._refreshing, self._encoding):
            if task is not None:
                task.cancel()
        if self._indexing_timer is not None:
            self._indexing_timer.cancel()
        self._refresher.shutdown(wait=False, cancel_futures=True)

    async def current(self) -> Snapshot:
        """Return the snapshot once it has every acknowledged change of the catalogue.

        Changes that this process has not acknowledged yet are not waited for.
        """
        stored = await self._store.catalogue_version()
        if stored > self._catalogue_version:
            await self._reach(self._unacknowledged.acknowledged_at(stored))
        return self.snapshot

    async def put_items(self, items: Sequence[Item], *, unhurried: bool = False) -> int:
        """`Store.put_items`, acknowledged once the snapshot has the items.

        Where that takes longer than `write_wait`, the items are acknowledged as they are durable,
        and the refresh goes on beside requests.

        Args:
            items: as for the store.
            unhurried: wait for the refresh however long it takes; for requests without a deadline.
        """
        return await self._write(partial(self._store.put_items, items), unhurried=unhurried)

    async def delete_item(self, item_id: str) -> bool:
        """`Store.delete_item`, acknowledged as `put_items` is."""
        return await self._write(partial(self._store.delete_item, item_id))

    async def activate(self, version: str) -> Snapshot:
        """Serve this version; requests in flight keep the snapshot they have.

        Raises:
            NotFound: when there is no such version.
            Corrupt: naming the file that fails its checks.
            ModelRejected: when the model does not fit; the old one goes on serving.
        """
        return await self._run_detached(self._activate(version))

    async def follow_registry(self) -> None:
        """Serve what another process made current; to be asked now and then.

        What cannot be served is logged, once, and the old version goes on serving, `degraded`.
        """
        if self._registry.current_token() == self._token:
            return
        loop = asyncio.get_running_loop()
        async with self._lock:
            token = self._registry.current_token()
            try:
                version = await loop.run_in_executor(self._executor, self._registry.current)
                if version is not None and version != self.snapshot.version:
                    self._snapshot = await loop.run_in_executor(
                        self._executor, self._load, version, self.snapshot.catalogue
                    )
                    _log.info("serving model %s", version)
                self._degraded = False
            except HeedError as error:
                self._degraded = True
                _log.error(
                    "what was made current is not served, model %s goes on: %s",
                    self.snapshot.version,
                    error.detail,
                )
            self._token = token

    async def follow_store(self) -> None:
        """Begin to take over what other processes changed in the catalogue; to be called often."""
        if await self._store.catalogue_version() > self._catalogue_version:
            self._begin_refresh()

    async def refresh_popularity(self) -> None:
        """Put the popularity of now into the snapshot; to be asked now and then."""
        async with self._lock:
            await self._count_popularity()
            loop = asyncio.get_running_loop()
            now = self.snapshot
            catalogue = now.catalogue.with_items(())  # items that events named meanwhile
            if catalogue is now.catalogue and np.array_equal(
                now.counts, self._counts[: len(now.counts)]
            ):
                return
            self._snapshot = await loop.run_in_executor(
                self._executor, now.refreshed, catalogue, self._counts.copy()
            )

    # ------------------------------------------------------------------ the parts

    async def _write(self, write: _CatalogueWrite[T], *, unhurried: bool = False) -> T:
        limit = asyncio.get_running_loop().time() + self._write_wait
        with self._unacknowledged.track() as on_change:
            try:
                outcome = await write(on_change=on_change)
                with suppress(Exception):  # the write is durable, whatever becomes of its refresh
                    # Includes what others wrote meanwhile, for the same item may be among it.
                    stored = await self._store.catalogue_version()
                    async with asyncio.timeout_at(None if unhurried else limit):
                        await self._reach(stored)
                    if self._encoding is not None:
                        async with asyncio.timeout_at(limit):
                            await asyncio.wait([self._encoding])
            finally:
                self._begin_refresh()  # also for a write whose request was given up
        return outcome

    async def _reach(self, version: int) -> None:
        """Return once the snapshot has this version of the catalogue. Raises what a refresh did."""
        if self._catalogue_version < version:
            self._begin_refresh()
            await self._waiters.wait(version)

    def _begin_refresh(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        """Take over the changes of the catalogue, batch by batch, until there are none left."""
        try:
            while await self._store.catalogue_version() > self._catalogue_version:
                async with self._lock:
                    changes = await self._store.catalogue_changes(
                        self._catalogue_version, _REFRESH_BATCH
                    )
                    apply = partial(self._updates.apply, changes=changes, defer=True)
                    await self._update_catalogue(apply)
                    self._catalogue_version = changes.version
                self._waiters.wake(self._catalogue_version)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            _log.exception("the catalogue was not refreshed")
            self._waiters.fail(error)

    async def _update_catalogue(self, update: Callable[[Catalogue], Catalogue]) -> None:
        """Replace the snapshot by one over the updated catalogue. Call it under the lock."""
        base, loop = self.snapshot, asyncio.get_running_loop()

        def refreshed() -> Snapshot:
            return base.refreshed(update(base.catalogue), self._counts)

        self._snapshot = await loop.run_in_executor(self._refresher, refreshed)
        if self._updates.deferred and self._encoding is None:
            self._encoding = asyncio.create_task(self._encode_deferred())
        self._schedule_indexing()

    async def _encode_deferred(self) -> None:
        """Encode the texts that refreshes left out, and give their items the keys."""
        try:
            while self._updates.deferred:
                await run_in_daemon_thread(self._updates.encode_deferred, "heed-encoding")
                async with self._lock:
                    await self._update_catalogue(self._updates.apply_encoded)
        except Exception:  # noqa: BLE001 - the items are found by their words
            _log.exception("texts of %d items were not encoded", self._updates.deferred)
        finally:
            self._encoding = None

    async def _run_detached(self, work: Coroutine[None, None, Snapshot]) -> Snapshot:
        """The outcome of work that goes on when the request that began it runs out of time.

        The next request would only begin it again, and run out of time again.
        """
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _read(self) -> Catalogue:
        """The whole catalogue, part by part: what is stored of an item takes more than its keys."""
        loop = asyncio.get_running_loop()
        catalogue = Catalogue.empty(self._embeddings.dimension, self.vocabulary, WordIndex())
        whole = (await self._store.counts())["items"]
        told = time.monotonic()
        while await self._store.catalogue_version() != self._catalogue_version:
            changes = await self._store.catalogue_changes(self._catalogue_version, _READ_BATCH)
            apply = partial(self._updates.apply, catalogue, changes, defer=False)
            catalogue = await loop.run_in_executor(self._executor, apply)
            self._catalogue_version = changes.version
            if time.monotonic() > told + _PROGRESS_INTERVAL:
                told = time.monotonic()
                _log.info("read %s of %s items", f"{len(catalogue):,}", f"{whole:,}")
        return catalogue

    def _schedule_indexing(self) -> None:
        """Have new indexes built where they are due, once the catalogue has stopped changing.

        During a bulk import, indexes of a moment would take the processor from requests: they are
        built only when many more rows stand beside them.
        """
        loop = asyncio.get_running_loop()
        if self._indexing_timer is not None:
            self._indexing_timer.cancel()
        if self._indexing is not None or not self.snapshot.needs_reindex(
            index_from=self._index_from
        ):
            return
        urgent = self.snapshot.needs_reindex(index_from=_CHANGING * self._index_from)
        delay = 0.0 if urgent else _STEADY
        self._indexing_timer = loop.call_later(delay, self._begin_indexing)

    def _begin_indexing(self) -> None:
        if self._indexing is None and self.snapshot.needs_reindex(index_from=self._index_from):
            self._indexing = asyncio.create_task(self._index())

    async def _index(self) -> None:
        """Build new indexes on a thread of their own while requests are answered from the old."""
        base = self.snapshot
        started = time.monotonic()
        try:
            indexed = await run_in_daemon_thread(partial(self._indexed, base), "heed-indexing")
            async with self._lock:
                if self.snapshot.model is base.model:  # another one came with its own indexes
                    loop = asyncio.get_running_loop()
                    self._snapshot = await loop.run_in_executor(
                        self._executor, self.snapshot.with_indexes, base, indexed
                    )
            took = time.monotonic() - started
            _log.info("indexed %s items anew in %.0f s", f"{len(indexed.catalogue):,}", took)
        except Exception:  # noqa: BLE001 - the old ones still answer
            _log.exception("the catalogue was not indexed anew")
        finally:
            self._indexing = None

    def _indexed(self, base: Snapshot) -> Snapshot:
        lock = self._indexing_lock
        with nullcontext() if lock is None else durable_files.locked(lock, math.inf):
            return base.reindexed(index_from=self._index_from)

    async def _activate(self, version: str) -> Snapshot:
        loop = asyncio.get_running_loop()
        async with self._lock:
            # Proven before it is pointed at, so that a bad version never becomes the current one.
            new = await loop.run_in_executor(
                self._executor, self._load, version, self.snapshot.catalogue
            )
            await loop.run_in_executor(self._executor, self._registry.activate, version)
            self._snapshot = new
            self._degraded = False
        _log.info("serving model %s", version)
        return new

    def _load(self, version: str | None, catalogue: Catalogue) -> Snapshot:
        return load_snapshot(
            self._registry,
            version,
            catalogue,
            self._counts,
            encoder=self._embeddings.name,
            index_from=self._index_from,
        )

    async def _count_popularity(self) -> None:
        """Popularity, and rows for what is only known from events."""
        # What is written meanwhile has a later tick, and is counted the next time.
        tick = await self._store.clock()
        if tick == self._counted_at:
            return
        item_ids, counted = await self._store.popularity()
        rows = [self.vocabulary.add(item_id) for item_id in item_ids]
        counts = np.zeros(len(self.vocabulary), dtype=np.int64)
        counts[rows] = counted
        self._counts, self._counted_at = counts, tick
