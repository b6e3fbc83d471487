"""The served snapshot, kept up with the store's catalogue and with the registry's current model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from models.catalogue.catalogue import Catalogue
from models.catalogue.snapshot import INDEX_FROM, UNTRAINED, Snapshot
from models.encoder.event_bias import UNKNOWN
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.index.ann_index import StructureCache
from models.ranking.scoring import score
from models.recommender.artifact import TrainedModel
from models.text.bm25 import BM25Writer
from service.domain.errors import HeedError, ModelRejected
from service.domain.settings import KEYWORD_FIELDS
from service.runtime.tracing import StageClock
from service.snapshots.catalogue_updates import CatalogueUpdates
from service.snapshots.derived_files import CatalogueCache
from service.snapshots.registry import Registry
from service.snapshots.served import CatalogueRefresh, IndexRefresh, Served
from service.stores.base import Store

_log = logging.getLogger(__name__)


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
