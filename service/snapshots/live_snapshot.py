"""The served snapshot, kept up with the store's catalogue and with the registry's current model."""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import INDEX_FROM, UNTRAINED, Snapshot
from models.data.vocabulary import Vocabulary
from models.encoder.event_bias import UNKNOWN
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.index.ann_index import StructureCache
from models.ranking.scoring import score
from models.recommender.artifact import TrainedModel
from models.text.bm25 import BM25Writer
from service.domain.errors import HeedError, ModelRejected, StoreUnreachable
from service.domain.records import Item, ItemPatch
from service.domain.settings import KEYWORD_FIELDS
from service.runtime import durable_files
from service.runtime.logs import REPEATED, log_failure
from service.runtime.threads import run_in_daemon_thread
from service.runtime.tracing import StageClock
from service.runtime.work_queue import place_left
from service.runtime.workers import SharedArrays
from service.snapshots.catalogue_updates import CatalogueUpdates
from service.snapshots.derived_files import CatalogueCache
from service.snapshots.registry import PointerToken, Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store
from service.stores.values import OnCatalogueChange, PatchResult

T = TypeVar("T")

_log = logging.getLogger(__name__)

_READ_BATCH = 20_000  # items that are read at once at the start
_REFRESH_BATCH = 2_000  # items that one refresh applies, about
_SERVING_WAIT = 10.0  # seconds after which a write is acknowledged although it is not served
_ENCODING_WAIT = 0.5  # and although a slow encoder has not yet read its texts
_PROGRESS_INTERVAL = 5.0  # seconds between two log lines while the catalogue is read
_STEADY = 1.0  # seconds without a change of the catalogue after which indexes are built
_TRACKED_WRITES = 256  # of all processes, at once
_CHANGING = 5  # times as many rows may stand beside the indexes while the catalogue changes


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
        previous = {after: before for before, after in self._table.tolist() if after}
        while (before := previous.get(version)) is not None:
            version = before
        return version


@dataclass(eq=False)
class Served:
    """The snapshot that requests read, and what it was made of. Forked processes start from one.

    A snapshot never changes; under `lock` another one replaces it. Rows of the vocabulary belong to
    the process: they keep their meaning across model versions, so neither the catalogue's vectors
    nor the cached histories are rebuilt by a swap.
    """

    embeddings: EmbeddingCache
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    current: Snapshot | None = None
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # by item row
    catalogue_version: int = 0
    unacknowledged: UnacknowledgedWrites = field(default_factory=UnacknowledgedWrites)
    token: PointerToken | None = None  # of the registry's current model
    model_created: int | None = None  # when the model was published, microseconds UTC
    fault: str | None = None  # why another model answers instead of the registry's current one
    event_log: SharedArrays | None = None  # takes the log that one of the processes reads
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    replaced_at: float = field(default_factory=time.monotonic)  # of the monotonic clock, seconds

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

    Processes of one catalogue lock the file `lock`, to build one after the other.
    """

    def __init__(
        self,
        served: Served,
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
        # Counted by this process since it started.
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
        return self._building is not None

    async def wait(self) -> None:
        if self._building is not None:
            await asyncio.wait([self._building])

    def close(self) -> None:
        """Abandon the indexes that are being built."""
        for work in (self._timer, self._building):
            if work is not None:
                work.cancel()

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
            _log.info("indexed %s items in %.0f s", f"{len(indexed.catalogue):,}", took)
        except Exception as error:  # noqa: BLE001 - the old ones still answer
            self.failures += 1
            log_failure(_log, "the catalogue was not indexed; the old indexes answer", error)
        finally:
            self._building = None

    def _indexed(self, base: Snapshot) -> Snapshot:
        lock = self._lock
        with nullcontext() if lock is None else durable_files.locked(lock, math.inf):
            return base.reindexed(index_from=self._index_from, cache=self._cache)


class CatalogueRefresh:
    """Applies the changes of the store's catalogue, batch by batch, on a thread of its own.

    A write is acknowledged once its changes are served, and a request waits only for acknowledged
    changes: it is writers that wait for refreshes.
    """

    def __init__(
        self,
        store: Store,
        served: Served,
        updates: CatalogueUpdates,
        indexes: IndexRefresh,
        *,
        cache: CatalogueCache | None = None,
    ) -> None:
        self.is_stale = False  # changes are known of that the store does not tell
        # Has other processes serve what is stored; a write is acknowledged after that.
        self.refresh_peers: Callable[[], Coroutine[None, None, object]] | None = None
        self._store = store
        self._served = served
        self._updates = updates
        self._cache = cache
        self._indexes = indexes
        # Not the threads of requests, which would queue behind a refresh.
        self._thread = ThreadPoolExecutor(
            1, "heed-catalogue", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._behind_since: float | None = None  # monotonic
        self._batch: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._encoding: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Version of the catalogue that is served."""
        return self._served.catalogue_version

    async def read(self, catalogue: Catalogue, executor: Executor) -> Catalogue:
        """Return an empty catalogue filled with all that is stored.

        It comes from the cache, or from the store batch by batch.
        """
        run = partial(asyncio.get_running_loop().run_in_executor, executor)
        cache, writer = self._cache, catalogue.bm25_writer
        if cache is None or writer is None or not await self._store.catalogue_version():
            return await self._read_batches(catalogue, executor)
        digest = await self._store.catalogue_digest()
        cached = await run(cache.read, catalogue, digest)
        if cached is not None:
            self._served.catalogue_version = digest.version
            return await self._read_batches(cached, executor)  # of what is written meanwhile
        writer.record()
        read = await self._read_batches(catalogue, executor)
        if self.version == digest.version:
            await run(cache.write, read, digest)
        else:
            writer.recording()
        return read

    async def _read_batches(self, catalogue: Catalogue, executor: Executor) -> Catalogue:
        loop = asyncio.get_running_loop()
        total = (await self._store.counts())["items"]
        logged = time.monotonic()
        while await self._store.catalogue_version() != self.version:
            changes = await self._store.catalogue_changes(self.version, _READ_BATCH)
            # Deleted items have rows, so that events on them do not make items of them again.
            catalogue = catalogue.with_items(changes.deleted)
            apply = partial(self._updates.apply, catalogue, changes, defer=False)
            catalogue = await loop.run_in_executor(executor, apply)
            self._served.catalogue_version = changes.version
            if time.monotonic() > logged + _PROGRESS_INTERVAL:
                logged = time.monotonic()
                _log.info("read %s of %s items", f"{len(catalogue):,}", f"{total:,}")
        await loop.run_in_executor(executor, catalogue.prepare_order)
        return catalogue

    async def wait(self) -> None:
        """Return when every acknowledged change is served, or the database does not answer.

        `is_stale` says which. Raises what a refresh raised.
        """
        stored = self._store.announced_catalogue()
        if stored > self.version:
            try:
                async with place_left():
                    await self._reach(self._served.unacknowledged.acknowledged_at(stored))
            except StoreUnreachable:
                self.is_stale = True
                return
        self.is_stale = False

    async def catch_up(self) -> None:
        """Return when everything that is stored by now is served, acknowledged or not."""
        await self._reach(await self._store.catalogue_version())

    async def follow(self) -> None:
        """Begin to apply changes, if there are any. Call it often, for those of other processes."""
        if self._store.announced_catalogue() > self.version:
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            self._begin()
        else:
            self._behind_since = None

    async def put_items(self, items: Sequence[Item]) -> int:
        """`Store.put_items`, acknowledged once the items are served, by peers too.

        So a bulk import waits for refreshes, and not the requests that come after it. It is
        acknowledged unserved after `_SERVING_WAIT`.
        """
        return await self._write(partial(self._store.put_items, items))

    async def patch_items(
        self, patches: Sequence[ItemPatch], *, create: bool = True
    ) -> PatchResult:
        """`Store.patch_items`, acknowledged as `put_items` is."""
        return await self._write(partial(self._store.patch_items, patches, create=create))

    async def delete_item(self, item_id: str) -> bool:
        """`Store.delete_item`, acknowledged as `put_items` is."""
        return await self._write(partial(self._store.delete_item, item_id))

    @property
    def lag_seconds(self) -> float:
        """Seconds since `follow` first found changes that are not served; 0 without any."""
        since = self._behind_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Abandon the work in progress."""
        for task in (self._batch, self._following, self._encoding):
            if task is not None:
                task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _write(self, write: Callable[..., Awaitable[T]]) -> T:
        with self._served.unacknowledged.track() as on_change:
            try:
                result = await write(on_change=on_change)
                with suppress(Exception):  # the write is durable, whatever becomes of its refresh
                    await self._serve()
            finally:
                self._begin()  # also for a write whose request was given up
        return result

    async def _serve(self) -> None:
        # Everything stored is served, since a write that changed nothing may repeat another one's.
        waits: list[Coroutine[None, None, object]] = [self.catch_up()]
        if self.refresh_peers is not None:
            waits.append(self.refresh_peers())
        async with asyncio.timeout(_SERVING_WAIT):
            await asyncio.gather(*waits)
        if self._encoding is not None:
            await asyncio.wait([self._encoding], timeout=_ENCODING_WAIT)

    async def _reach(self, version: int) -> None:
        """Apply changes batch by batch until this version is served; callers share batches."""
        while self.version < version:
            if self._batch is None or self._batch.done():
                self._batch = asyncio.create_task(self._apply_batch())
            await asyncio.shield(self._batch)

    async def _apply_batch(self) -> None:
        async with self._served.lock:
            changes = await self._store.catalogue_changes(self.version, _REFRESH_BATCH)
            await self._update(partial(self._updates.apply, changes=changes, defer=True))
            self._served.catalogue_version = changes.version
            self._behind_since = None  # what is left is counted from the next look on

    def _begin(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._catch_up_or_log())

    async def _catch_up_or_log(self) -> None:
        try:
            await self.catch_up()
        except Exception as error:  # noqa: BLE001 - requests that wait for it fail too
            what = "the catalogue was not refreshed; it is tried again"
            REPEATED.failed(_log, self, what, error)
        else:
            REPEATED.succeeded(_log, self)

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
        except Exception as error:  # noqa: BLE001 - the items are found by their words
            log_failure(_log, f"texts of {self._updates.deferred} items were not encoded", error)
        finally:
            self._encoding = None


class LiveSnapshot:
    """Serves one snapshot to requests, and replaces it by later ones.

    Args:
        executor: where models are loaded.
        index_from: number of rows from which on an index is built, as in `Snapshot.build`.
        keyword_fields: attributes that hold identifiers.
        indexing_lock: a file that processes of one catalogue lock while they build indexes.
    """

    def __init__(
        self,
        store: Store,
        registry: Registry,
        served: Served,
        executor: Executor,
        *,
        index_from: int = INDEX_FROM,
        keyword_fields: Sequence[str] = KEYWORD_FIELDS,
        indexing_lock: Path | None = None,
        index_cache: StructureCache | None = None,
        catalogue_cache: CatalogueCache | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._executor = executor
        self._index_from = index_from
        self._index_cache = index_cache
        self._counted_at = -1  # the store's tick at which popularity was counted
        self._activations: set[asyncio.Task[Snapshot]] = set()
        self.served = replace(served, lock=asyncio.Lock())
        self.indexes = IndexRefresh(
            self.served,
            executor,
            index_from=index_from,
            lock=indexing_lock,
            cache=index_cache,
        )
        self.catalogue = CatalogueRefresh(
            store,
            self.served,
            CatalogueUpdates(served.embeddings, keyword_fields),
            self.indexes,
            cache=catalogue_cache,
        )

    @property
    def degraded(self) -> bool:
        """True while another model than the current one, or an older catalogue, answers.

        The current model cannot be served, or the database does not tell what it knows of items.
        """
        return self.served.fault is not None or self.catalogue.is_stale

    @property
    def snapshot(self) -> Snapshot:
        """The latest snapshot, which may lag behind the catalogue; see `current`."""
        return self.served.snapshot

    @property
    def is_activating(self) -> bool:
        return bool(self._activations)

    async def open(self) -> None:
        """Load the catalogue, popularity and the current model; of a preloaded state, what changed.

        If a model that was made current since cannot be served, the preloaded one goes on,
        `degraded`; at a first start, the newest other one that can be is served.

        Raises:
            Corrupt: naming the model file that fails its checks, when no other model can be served.
            ModelRejected: when the current model does not fit this service, and no other does.
        """
        if self.served.current is not None:
            await self.current()
            await self.follow_registry()
            return
        await self._registry.refresh()
        self.served.token = self._registry.current_token()
        stages = StageClock()
        with stages("catalogue"):
            dimension = self.served.embeddings.encoder.dimension
            empty = Catalogue.empty(dimension, self.served.vocabulary, BM25Writer())
            # Before the popularity: rows, and with them the indexes, do not depend on events.
            catalogue = await self.catalogue.read(empty, self._executor)
        with stages("popularity"):
            await self._count_popularity()

        def build() -> Snapshot:
            self.served.embeddings.save()
            return self._load_newest_intact(catalogue)

        with stages("model"):
            await self.served.replace(self._executor, build)
        _log.info("loaded: %s", ", ".join(f"{n} {s:.2f} s" for n, s in stages.seconds.items()))

    def close(self) -> None:
        self.catalogue.close()
        self.indexes.close()

    async def current(self) -> Snapshot:
        """Return the snapshot once it has every acknowledged change of the catalogue.

        Changes that this process has not acknowledged yet are not waited for.
        """
        await self.catalogue.wait()
        return self.snapshot

    async def activate(self, version: str) -> Snapshot:
        """Serve a model version; requests in flight keep the snapshot they have.

        The work goes on when the request that began it runs out of time, for the next one would
        begin it again, and run out of time again. Raises what `_load` raises; the old model goes on
        then.
        """
        task = asyncio.create_task(self._activate(version))
        self._activations.add(task)
        task.add_done_callback(self._activations.discard)
        return await asyncio.shield(task)

    async def follow_registry(self) -> None:
        """Serve the model that another process or machine made current. Call it now and then.

        A model that cannot be served is logged, once, and the old version goes on, `degraded`.
        """
        await self._registry.refresh()
        if self._registry.current_token() == self.served.token:
            return
        loop = asyncio.get_running_loop()
        async with self.served.lock:
            token = self._registry.current_token()
            try:
                version = await loop.run_in_executor(self._executor, self._registry.current)
                if version is not None and version != self.snapshot.version:
                    load = partial(self._load, version, self.snapshot.catalogue)
                    await self.served.replace(self._executor, load)
                    _log.info("serving model %s", version)
                self.served.fault = None
            except HeedError as error:
                self.served.fault = error.state
                _log.error(
                    "what was made current is not served, model %s goes on: %s",
                    self.snapshot.version,
                    error.detail,
                )
            self.served.token = token

    async def refresh_popularity(self) -> None:
        """Put the popularity of now into the snapshot. Call it now and then."""
        async with self.served.lock:
            await self._count_popularity()
            base, counts = self.snapshot, self.served.counts
            catalogue = base.catalogue.with_items(())  # items that events named meanwhile
            if catalogue is base.catalogue and np.array_equal(
                base.counts, counts[: len(base.counts)]
            ):
                return
            refreshed = partial(base.refreshed, catalogue, counts.copy())
            await self.served.replace(self._executor, refreshed)

    async def _activate(self, version: str) -> Snapshot:
        def proven() -> Snapshot:
            # Before it is pointed at, so that a bad version never becomes the current one.
            new = self._load(version, self.snapshot.catalogue)
            self._registry.activate(version)
            return new

        async with self.served.lock:
            await self.served.replace(self._executor, proven)
            self.served.fault = None
            _log.info("serving model %s", version)
            return self.snapshot

    def _load_newest_intact(self, catalogue: Catalogue) -> Snapshot:
        """Load the current model or, where it cannot be served, the newest other one that can.

        Popularity never takes the place of a damaged model: it would answer for months unnoticed.
        Raises what `_load` raises of the current model when there is no other.
        """
        current: str | None = None
        try:
            current = self._registry.current()
            return self._load(current, catalogue)
        except HeedError as error:
            fault = error
        for version in reversed(self._registry.versions()):
            if version.broken is not None or version.version == current:
                continue
            try:
                snapshot = self._load(version.version, catalogue)
            except HeedError as error:
                _log.warning("model %s cannot be served either: %s", version.version, error.detail)
                continue
            self.served.fault = fault.state
            _log.error(
                "the current model is not served, %s is instead, and answers are degraded: %s. "
                "Train again, or run `heed models activate %s` to keep this one",
                version.version,
                fault.detail,
                version.version,
            )
            return snapshot
        raise fault

    def _load(self, version: str | None, catalogue: Catalogue) -> Snapshot:
        """Load a model version, None being the untrained model, and build its snapshot.

        Raises:
            NotFound: when there is no such version.
            Corrupt: naming the file that fails its checks.
            ModelRejected: when it does not fit this service, or its scores are not finite.
        """
        build = partial(
            Snapshot.build,
            catalogue=catalogue,
            counts=self.served.counts,
            index_from=self._index_from,
            cache=self._index_cache,
        )
        if version is None:
            self.served.model_created = None
            return build(UNTRAINED, None)
        files, encoder = self._registry.load(version), self.served.embeddings.encoder.name
        try:
            trained = TrainedModel.from_files(files)
            if trained.text_encoder != encoder:
                raise ValueError(
                    f"it reads vectors of {trained.text_encoder}, not of {encoder}: "
                    "train again with heed train, or set HEED_ENCODER to what it was trained with"
                )
            snapshot = build(version, trained)
            _warm_up(snapshot)
            self.served.model_created = self._registry.created(version)
        except ValueError as error:
            raise ModelRejected(f"model {version}: {error}") from error
        return snapshot

    async def _count_popularity(self) -> None:
        """Count the events of each item, and give rows to items that only events name."""
        # Events that are written meanwhile have a later tick, and are counted the next time.
        tick = await self._store.clock(patient=True)
        if tick == self._counted_at:
            return
        item_ids, counted = await self._store.popularity()
        self.served.vocabulary.extend(item_ids)
        counts = np.zeros(len(self.served.vocabulary), dtype=np.int64)
        counts[self.served.vocabulary.rows(item_ids)] = counted
        self.served.counts, self._counted_at = counts, tick


def _warm_up(snapshot: Snapshot) -> None:
    """Score once. Raises ValueError where the scores are not finite."""
    rows = np.flatnonzero(snapshot.has_vector)[:50].astype(np.int32)
    if not len(rows):
        return
    times = np.zeros(len(rows), dtype=np.int64)
    types = np.full(len(rows), UNKNOWN, np.int32)
    history = UserHistory(rows, times, np.ones(len(rows), dtype=np.float32), types)
    totals = score(snapshot, build_memory(snapshot, history, 0), rows).total
    if not np.isfinite(totals.numpy()).all():
        raise ValueError("its scores are not finite")
