"""The composition root: the parts of the service over one data directory, wired to each other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from models.catalogue import cow
from models.text.encoders import TextEncoder
from service.domain.errors import Unavailable
from service.domain.settings import Settings, check_embedding_dim
from service.histories.memory_provider import MemoryProvider
from service.runtime.data_layout import (
    CATALOGUE_FOLDER,
    EMBEDDINGS_FILE,
    INDEXES_FOLDER,
    INDEXING_LOCK,
    check_restored,
)
from service.runtime.durable_files import make_directory
from service.runtime.memory import trim
from service.runtime.work_queue import MOST_ASIDE
from service.runtime.workers import SharedArrays
from service.snapshots.derived_files import INDEXES, CatalogueCache, open_cache_files
from service.snapshots.live_event_log import LiveEventLog
from service.snapshots.live_search import LiveSearch
from service.snapshots.live_snapshot import LiveSnapshot, Served
from service.snapshots.registry import Registry
from service.snapshots.shared_registry import open_registry
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.stores.base import Store
from service.stores.opening import open_store
from service.stores.quota import StoreQuota

_CACHED_INDEXES = 4  # on disk: for this model and catalogue and for earlier ones


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the service; `live` is not opened yet."""

    settings: Settings
    store: Store
    registry: Registry
    embeddings: EmbeddingCache
    live: LiveSnapshot
    memories: MemoryProvider
    event_log: LiveEventLog
    search: LiveSearch
    executor: Executor  # where requests are computed, beside the event loop

    async def close(self) -> None:
        """Finish the work that threads have begun, save embeddings and close the store."""
        self.live.close()
        self.event_log.close()
        self.memories.close()
        self.embeddings.save()
        # Queued requests have been answered or cancelled.
        await asyncio.to_thread(self.executor.shutdown, cancel_futures=True)
        await self.store.close()


def compose(
    settings: Settings,
    *,
    encoder: TextEncoder | None = None,
    preloaded: Served | None = None,
    threads: int | None = None,
    executor: Executor | None = None,
) -> Parts:
    """Wire the service's parts over the settings' data directory.

    Args:
        encoder: of texts; by default the one that the settings name.
        preloaded: what the process has loaded already that this one was forked from.
        threads: of the executor; by default as many as suit the settings' workers.
        executor: to compute on, which is shut down with the parts; by default a new one.

    Raises:
        Corrupt: naming the file of the store or of the search parameters that fails its checks, or
            the data directory whose restore was interrupted.
        Invalid: when there is no such text encoder, or its dimension is not the configured one.
    """
    served = preloaded
    if served is None:
        encoder = encoder or open_encoder(settings.encoder)
        served = Served(EmbeddingCache(encoder, settings.data / EMBEDDINGS_FILE))
    embeddings = served.embeddings
    check_embedding_dim(settings, embeddings.encoder.name, embeddings.encoder.dimension)
    check_restored(settings.data)
    make_directory(settings.data)
    search = LiveSearch(embeddings, settings.data)
    quota = StoreQuota(settings.max_events, settings.max_items, settings.max_store_bytes)
    # Half of a deadline is left for the answer without what the store did not tell.
    patience = settings.deadline / 2
    store = open_store(settings.data, settings.store, quota=quota, patience=patience)
    registry = open_registry(settings.data, store)
    executor = executor or _compute_executor(settings, threads)
    live = LiveSnapshot(
        store,
        registry,
        served,
        executor,
        keyword_fields=settings.keyword_names,
        indexing_lock=settings.data / INDEXING_LOCK if settings.workers > 1 else None,
        index_cache=open_cache_files(
            settings.data / INDEXES_FOLDER, _CACHED_INDEXES, store, INDEXES
        ),
        catalogue_cache=CatalogueCache(
            settings.data / CATALOGUE_FOLDER,
            embeddings.encoder.name,
            settings.keyword_names,
            store=store,
        ),
    )
    memories = MemoryProvider(store, served.vocabulary, embeddings, settings)
    event_log = LiveEventLog(store, served.vocabulary, executor, shared=served.event_log)
    return Parts(settings, store, registry, embeddings, live, memories, event_log, search, executor)


def compute_threads(settings: Settings) -> int:
    """Return the number of threads on which a worker computes: all use about one a core."""
    return min(4, ceil((os.cpu_count() or 1) / settings.workers))


def _compute_executor(settings: Settings, threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        # More threads than compute at once: long requests wait in theirs for short ones, and the
        # work queue bounds how many compute.
        threads or compute_threads(settings) + 2 + MOST_ASIDE,
        thread_name_prefix="heed-compute",
        # A pool thread starts with OpenMP's default; requests run beside each other instead.
        initializer=torch.set_num_threads,
        initargs=(1,),
    )


_THREAD_EXIT_TIMEOUT = 10.0  # seconds for threads to end that were told to
_TASKS = Path("/proc/self/task")


def preload(settings: Settings) -> Served:
    """Return what is served, in a process with no thread but this one and no store file open.

    A fork copies only the thread that asks for it: a lock that another held would stay held for
    ever, and a pool would wait for threads that are not there. SQLite's locks do not survive one.

    Raises what `compose` and `LiveSnapshot.open` raise; `Unavailable` when a thread does not end.
    """
    # Tokenizers would start threads of their own, which never end.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Not uvloop, whose library never ends its threads.
    loaded = asyncio.run(_load(settings))
    # Earlier states of the catalogue are freed, so that files hold the latest.
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
    names = []
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return names
