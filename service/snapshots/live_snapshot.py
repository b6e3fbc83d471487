"""What is served now: the snapshot, kept up with the store's catalogue and the registry."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Sequence
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
from models.catalogue.item_entry import ItemEntry
from models.catalogue.snapshot import INDEX_FROM, UNTRAINED, Snapshot
from models.data.vocabulary import Vocabulary
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.scoring import score
from models.recommender.artifact import Trained
from models.text.bm25 import WordIndex
from service.domain.errors import HeedError, ModelRejected
from service.domain.records import Item
from service.runtime import durable_files
from service.runtime.daemon_thread import run_in_daemon_thread
from service.snapshots.item_entries import to_entry
from service.snapshots.registry import PointerToken, Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.snapshots.unacknowledged_writes import UnacknowledgedWrites
from service.stores.base import Changes, OnCatalogueChange, Store

_log = logging.getLogger(__name__)

_READ_BATCH = 20_000  # items that are read at once at the start
_REFRESH_BATCH = 2_000  # items that one refresh takes over, about
_PROGRESS_INTERVAL = 5.0  # seconds between two words on how far reading is
_ENCODING_LOG_INTERVAL = 10.0  # seconds of encoding after which the log says how far it is


T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class _CatalogueWrite(Protocol[T_co]):
    async def __call__(self, *, on_change: OnCatalogueChange) -> T_co: ...


@dataclass(frozen=True, slots=True, eq=False)
class PreloadedSnapshot:
    """What is served, for processes to begin with that are forked to share its memory."""

    embeddings: EmbeddingCache
    vocabulary: Vocabulary
    snapshot: Snapshot
    counts: NDArray[np.int64]
    catalogue_version: int
    token: PointerToken | None


class LiveSnapshot:
    """Holds the one snapshot that requests read, and replaces it; it never changes one.

    Vocabulary rows belong to the process: they keep their meaning across model versions, so
    neither the catalogue's vectors nor the cached histories are rebuilt by a swap.
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
        # A thread of its own, for requests shall not queue behind a refresh.
        self._refresher = ThreadPoolExecutor(
            1, "heed-catalogue", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._refreshing: asyncio.Task[None] | None = None
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []  # catalogue versions
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
        for task in (self._indexing, self._refreshing):
            if task is not None:
                task.cancel()
        self._refresher.shutdown(wait=False, cancel_futures=True)

    async def current(self) -> Snapshot:
        """Return the snapshot once it has every acknowledged change of the catalogue.

        Changes that this process has not acknowledged yet are not waited for.
        """
        stored = await self._store.catalogue_version()
        if stored > self._catalogue_version:
            await self._reach(self._unacknowledged.acknowledged_at(stored))
        return self.snapshot

    async def put_items(self, items: Sequence[Item]) -> int:
        """`Store.put_items`, acknowledged once the snapshot has the items.

        Where that takes longer than `write_wait`, as with a slow text encoder, the items are
        acknowledged as they are durable, and the refresh goes on beside requests.
        """
        return await self._write(partial(self._store.put_items, items))

    async def delete_item(self, item_id: str) -> bool:
        """`Store.delete_item`, acknowledged as `put_items` is."""
        return await self._write(partial(self._store.delete_item, item_id))

    async def items(self, item_ids: Sequence[str]) -> list[Item | None]:
        """What is stored of these items, in their order; None where there is none."""
        return await self._store.get_items(item_ids)

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

    async def _write(self, write: _CatalogueWrite[T]) -> T:
        limit = asyncio.get_running_loop().time() + self._write_wait
        with self._unacknowledged.track() as on_change:
            try:
                outcome = await write(on_change=on_change)
                # What others wrote meanwhile included: the same item may be among it.
                stored = await self._store.catalogue_version()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(limit):
                        await self._reach(stored)
            finally:
                self._begin_refresh()  # also of a write that nobody waits for any more
        return outcome

    async def _reach(self, version: int) -> None:
        """Return once the snapshot has this version of the catalogue. Raises what a refresh did."""
        if self._catalogue_version >= version:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((version, reached))
        self._begin_refresh()
        await reached

    def _begin_refresh(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        """Take over changes of the catalogue, batch by batch, until there are none left."""
        try:
            while await self._store.catalogue_version() > self._catalogue_version:
                async with self._lock:
                    await self._refresh_batch()
                self._wake()
                if self._indexing is None and self.snapshot.needs_reindex(
                    index_from=self._index_from
                ):
                    self._indexing = asyncio.create_task(self._index())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            if not self._wake(error):
                _log.exception("the catalogue was not refreshed")

    async def _refresh_batch(self) -> None:
        changes = await self._store.catalogue_changes(self._catalogue_version, _REFRESH_BATCH)
        base, loop = self.snapshot, asyncio.get_running_loop()

        def refreshed() -> Snapshot:
            return base.refreshed(self._with_changes(base.catalogue, changes), self._counts)

        self._snapshot = await loop.run_in_executor(self._refresher, refreshed)
        self._catalogue_version = changes.version

    def _wake(self, error: Exception | None = None) -> bool:
        """Resume those whose version is reached, or all of them with an error; whether any was."""
        due = [
            each
            for each in self._awaited
            if error is not None or each[0] <= self._catalogue_version
        ]
        self._awaited = [each for each in self._awaited if each not in due]
        waiting = [reached for _, reached in due if not reached.done()]
        for reached in waiting:
            if error is None:
                reached.set_result(None)
            else:
                reached.set_exception(error)
        return bool(waiting)

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
            catalogue = await loop.run_in_executor(
                self._executor, self._with_changes, catalogue, changes
            )
            self._catalogue_version = changes.version
            if time.monotonic() > told + _PROGRESS_INTERVAL:
                told = time.monotonic()
                _log.info("read %s of %s items", f"{len(catalogue):,}", f"{whole:,}")
        return catalogue

    def _with_changes(self, catalogue: Catalogue, changes: Changes) -> Catalogue:
        entries = self._entries(changes.upserted)
        return catalogue.updated(entries, changes.deleted, self._encode)

    async def _index(self) -> None:
        """New indexes, made on a thread of their own while requests are answered from the old.

        Processes that serve the same catalogue do so one after the other.
        """
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
        with (
            nullcontext()
            if self._indexing_lock is None
            else durable_files.locked(self._indexing_lock, math.inf)
        ):
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

    def _entries(self, items: Sequence[Item]) -> list[ItemEntry]:
        """The items as the catalogue keeps them."""
        dimension = self._embeddings.dimension
        entries = [to_entry(item, dimension) for item in items]
        unused = sum(item.embedding is not None and entry.embedding is None
                     for item, entry in zip(items, entries, strict=True))  # fmt: skip
        if unused:
            _log.warning(
                "the embeddings of %d items are not used: they have not %d dimensions",
                unused,
                dimension,
            )
        return entries

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of texts; where that takes long, the log says how far it is."""
        said = time.monotonic()

        def told(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > _ENCODING_LOG_INTERVAL:
                _log.info("%d of %d texts are encoded", done, total)
                said = time.monotonic()

        return self._embeddings.encode(texts, told)

    def _load(self, version: str | None, catalogue: Catalogue) -> Snapshot:
        if version is None:
            return Snapshot.build(
                UNTRAINED, None, catalogue, self._counts, index_from=self._index_from
            )
        name, files, _ = self._registry.load(version)
        try:
            trained = Trained.unpack(files)
            if trained.encoder != self._embeddings.name:
                raise ValueError(
                    f"it reads vectors of {trained.encoder}, not of {self._embeddings.name}: "
                    "train again with heed train, or set HEED_ENCODER to what it was trained with"
                )
            snapshot = Snapshot.build(
                name, trained, catalogue, self._counts, index_from=self._index_from
            )
            _warm_up(snapshot)
        except ValueError as error:
            raise ModelRejected(f"model {name}: {error}") from error
        return snapshot

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


def _warm_up(snapshot: Snapshot) -> None:
    """One answer, so that a model that cannot give one is never served."""
    rows = np.flatnonzero(snapshot.has_vector)[:50].astype(np.int32)
    if not len(rows):
        return
    times = np.zeros(len(rows), dtype=np.int64)
    past = UserHistory(rows, times, np.ones(len(rows), dtype=np.float32))
    totals = score(snapshot, build_memory(snapshot, past, 0), rows).total
    if not np.isfinite(totals.numpy()).all():
        raise ValueError("its scores are not finite")
