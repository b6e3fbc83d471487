"""The jobs of the service as one object: write, ask, run. No HTTP here."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from models.ranking.search_parameters import DEFAULTS, SearchParameters
from models.text.static_encoder import TextEncoder
from service.domain.errors import Corrupt, Incompatible, ModelRejected, NotFound
from service.domain.records import Event, Item, User
from service.domain.settings import Settings, check_embedding_dim
from service.engine.answers import Answering
from service.histories.error_audit import ErrorObserver
from service.histories.event_cache import Histories
from service.histories.memory_provider import MemoryProvider
from service.histories.request_history import HistoryAssembler
from service.jobs.job import Job
from service.jobs.runner import JobRunner
from service.jobs.training_command import training_command
from service.jobs.views import job_document, version_document
from service.runtime.data_layout import (
    EMBEDDINGS_FILE,
    INDEXING_LOCK,
    MODELS_FOLDER,
    SEARCH_FILE,
    STORE_FILE,
)
from service.snapshots.live_snapshot import LiveSnapshot, PreloadedSnapshot
from service.snapshots.registry import Registry
from service.snapshots.search_parameters import load_search_parameters
from service.snapshots.text_embeddings import EmbeddingCache
from service.snapshots.text_encoders import open_encoder
from service.stores.base import Appended, Store
from service.stores.sqlite import SQLiteStore

_log = logging.getLogger(__name__)

_POPULARITY = 30.0  # seconds between two countings, and more where counting takes long
_STORE_POLL = 0.1  # seconds between two looks at what other processes wrote to the catalogue
_POLL = 0.5  # seconds between two looks at what other processes made current


class Engine(Answering):
    """Everything that routes ask for."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        registry: Registry,
        *,
        encoder: TextEncoder,
        searching: SearchParameters = DEFAULTS,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000,
        loaded: PreloadedSnapshot | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._registry = registry
        workers = ThreadPoolExecutor(
            compute_threads(settings.workers),
            thread_name_prefix="heed-compute",
            # A pool thread starts with OpenMP's default; requests run beside each other instead.
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        embeddings = (
            EmbeddingCache(encoder, settings.data / EMBEDDINGS_FILE)
            if loaded is None
            else loaded.embeddings
        )
        turns = settings.data / INDEXING_LOCK if settings.workers > 1 else None
        serving = LiveSnapshot(
            store,
            registry,
            embeddings,
            workers,
            preloaded=loaded,
            indexing_lock=turns,
            write_wait=settings.deadline / 2,
        )
        self._histories = Histories(store, serving.vocabulary, settings.history_cache_bytes)
        pasts = HistoryAssembler(store, self._histories, serving.vocabulary, embeddings)
        super().__init__(
            serving,
            pasts,
            embeddings,
            workers=workers,
            memories=MemoryProvider(
                exact_up_to=settings.max_exact_rows,
                encoding_cache_bytes=settings.encoding_cache_bytes,
                memory_cache_bytes=settings.memory_cache_bytes,
                long_history_bytes=settings.long_history_bytes,
                max_error=settings.max_attention_error,
                check_share=settings.audit_fraction,
            ),
            searching=searching,
            clock=clock,
        )
        self._pool = workers
        self._jobs = JobRunner(
            settings.data, self._training, on_success=self._trained, threads=os.cpu_count() or 1
        )
        self._watches: list[asyncio.Task[None]] = []
        self._tell: Callable[[], Awaitable[object]] = _nobody

    async def open(self) -> None:
        """Load what is served. Raises `Corrupt` or `ModelRejected`, naming the file at fault."""
        await self._serving.open()
        torch.set_num_threads(1)  # of this thread: what it computes itself takes no time
        loop = asyncio.get_running_loop()
        self._measured = loop.run_in_executor(self._pool, self._memories.measure)
        self._watches = [
            asyncio.create_task(_every(_POPULARITY, self._serving.refresh_popularity)),
            asyncio.create_task(_every(_POLL, self._serving.follow_registry)),
            asyncio.create_task(_every(_STORE_POLL, self._serving.follow_store)),
        ]

    async def close(self) -> None:
        """Stop the training, finish the work in hand and let go of the store."""
        for watch in self._watches:
            watch.cancel()
        await self._jobs.close()
        self._serving.close()
        self._memories.close()
        self._embeddings.save()
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
        await self._store.close()

    def tell(self, others: Callable[[], Awaitable[object]]) -> None:
        """Have others told that a model was activated here, before whoever did it is answered.

        Args:
            others: has them `follow`.
        """
        self._tell = others

    async def follow(self) -> None:
        """Serve what another process made current, now rather than in half a second."""
        await self._serving.follow_registry()

    @property
    def model_version(self) -> str:
        """The version that answers now."""
        return self._serving.snapshot.version

    def observe_errors(self, told: ErrorObserver) -> None:
        """Have the true errors of a share of answers told, with those that were stated."""
        self._memories.audit.observer = told

    # ------------------------------------------------------------------ write

    async def put_items(self, items: Sequence[Item], *, unhurried: bool = False) -> int:
        """Insert or replace, all or nothing; how many. See `LiveSnapshot.put_items`."""
        return await self._serving.put_items(items, unhurried=unhurried)

    async def get_item(self, item_id: str) -> Item:
        """One item. Raises `NotFound`."""
        (item,) = await self._store.get_items([item_id])
        if item is None:
            raise NotFound(f"no item {item_id!r}")
        return item

    async def delete_item(self, item_id: str) -> None:
        """Take one item out of the catalogue; histories keep it. Raises `NotFound`."""
        if not await self._serving.delete_item(item_id):
            raise NotFound(f"no item {item_id!r}")

    async def page_items(self, cursor: str | None, limit: int) -> tuple[list[Item], str | None]:
        """A page by item id and the cursor of the next."""
        return await self._store.page_items(cursor=cursor, limit=limit)

    async def ingest(self, events: Sequence[Event]) -> Appended:
        """Append, all or nothing; durable when it returns. Raises `Conflict`."""
        return await self._store.append(events)

    async def put_user(self, user: User) -> None:
        """Replace a profile."""
        await self._store.put_user(user)

    async def get_user(self, user_id: str) -> User:
        """A profile. Raises `NotFound`."""
        user = await self._store.get_user(user_id)
        if user is None:
            raise NotFound(f"no user {user_id!r}")
        return user

    async def page_users(self, cursor: str | None, limit: int) -> tuple[list[User], str | None]:
        """A page by user id and the cursor of the next."""
        return await self._store.page_users(cursor=cursor, limit=limit)

    async def history(
        self, user_id: str, cursor: str | None, limit: int
    ) -> tuple[list[Event], str | None]:
        """A page of events, newest first, and the cursor of the next."""
        return await self._store.page(user_id, cursor=cursor, limit=limit)

    async def delete_event(self, user_id: str, event_id: str) -> None:
        """Forget one event. Raises `NotFound`."""
        if not await self._store.delete_event(user_id, event_id):
            raise NotFound(f"user {user_id!r} has no event {event_id!r}")

    async def forget(self, user_id: str) -> int:
        """Forget a user, history and profile; how many events that were."""
        return await self._store.forget(user_id)

    async def merge(self, user_id: str, source: str) -> int:
        """Move the history and profile of `source` to `user_id`; how many events moved."""
        return await self._store.merge(user_id, source)

    # ------------------------------------------------------------------ run

    async def train(self, options: Mapping[str, Any]) -> str:
        """Start training; the job's id. Raises `Conflict` while one runs, `Invalid`."""
        return await self._jobs.start(options)

    async def job(self, job_id: str) -> Mapping[str, Any]:
        """State, progress and result of a job. Raises `NotFound`."""
        return job_document(await self._jobs.get(job_id))

    async def models(self) -> list[Mapping[str, Any]]:
        """The versions on disk with their metrics, oldest first."""
        loop = asyncio.get_running_loop()
        versions = await loop.run_in_executor(None, self._registry.versions)
        return [version_document(version) for version in versions]

    async def activate(self, version: str) -> Mapping[str, Any]:
        """Serve this version. Raises `NotFound`, `ModelRejected`."""
        before = self.model_version
        try:
            snapshot = await self._serving.activate(version)
        except (Corrupt, Incompatible) as error:
            raise ModelRejected(error.detail) from error
        await self._tell()
        return {"model_version": snapshot.version, "previous": before}

    async def ready(self) -> tuple[bool, Mapping[str, Any]]:
        """Whether store and model answer, and what each said."""
        healthy = await self._store.healthy()
        return healthy, {"store": healthy, "model": self.model_version}

    async def some_users(self, count: int) -> list[str]:
        """Users with many events, for examples; not the most active of all."""

        def look() -> list[str]:
            columns = next(iter(self._store.scan(20_000)), None)
            if columns is None:
                return []
            seen = np.bincount(columns.users, minlength=len(columns.user_ids))
            typical = np.argsort(np.abs(seen - 100), kind="stable")[:count]
            return [columns.user_ids[at] for at in typical.tolist()]

        return await asyncio.get_running_loop().run_in_executor(self._pool, look)

    async def stats(self) -> Mapping[str, float]:
        """Numbers worth a gauge."""
        counts = await self._store.counts()
        return {
            **{name: float(value) for name, value in counts.items()},
            "catalogue_rows": float(len(self._serving.snapshot.catalogue)),
            "cached_histories": float(len(self._histories)),
            "cached_history_bytes": float(self._histories.nbytes),
            **self._memories.stats(),
            "history_hits": float(self._histories.hits),
            "history_misses": float(self._histories.misses),
        }

    # ------------------------------------------------------------------ the parts

    def _training(self, options: Mapping[str, Any]) -> Sequence[str]:
        """The command that trains. Raises `Invalid` for an option it does not take."""
        return training_command(self._settings.data.resolve(), self._settings.encoder, options)

    async def _trained(self, job: Job) -> None:
        """Serve what a training published; what it refused to publish changes nothing."""
        version = (job.result or {}).get("version")
        if isinstance(version, str):
            await self._serving.activate(version)
            await self._tell()


def compute_threads(workers: int) -> int:
    """Threads that compute in each of so many processes: together not many more than cores."""
    return max(1, min(4, -(-(os.cpu_count() or 1) // workers)))


async def open_engine(
    settings: Settings,
    *,
    encoder: TextEncoder | None = None,
    loaded: PreloadedSnapshot | None = None,
) -> Engine:
    """An engine on the settings' data directory, ready to answer.

    Args:
        settings: of the service.
        encoder: of texts; by default the one that the settings name.
        loaded: what the process has loaded already that this one was forked from.

    Raises:
        Corrupt: naming the file of the store, of the model or of the search parameters that fails
            its checks.
        ModelRejected: when the current model does not fit this service.
        Invalid: when there is no such text encoder, or its dimension is not the configured one.
    """
    encoder = encoder or (loaded.embeddings.encoder if loaded else open_encoder(settings.encoder))
    check_embedding_dim(settings, encoder.name, encoder.dimension)
    settings.data.mkdir(parents=True, exist_ok=True)
    searching = load_search_parameters(settings.data / SEARCH_FILE, encoder.name)
    store = SQLiteStore(settings.data / STORE_FILE)
    registry = Registry(settings.data / MODELS_FOLDER)
    engine = Engine(settings, store, registry, encoder=encoder, searching=searching, loaded=loaded)
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return engine


async def _nobody() -> None:
    """There are no others to tell."""


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do this now and then; what goes wrong is logged, and the next time may go well.

    Work that takes long is done seldom: a hundredth of the time at most.
    """
    took = 0.0
    while True:
        await asyncio.sleep(max(seconds, 100 * took))
        started = time.monotonic()
        try:
            await work()
        except Exception:  # noqa: BLE001 - what comes late is better than what never comes again
            _log.exception("%s failed", work.__qualname__)
        took = time.monotonic() - started
