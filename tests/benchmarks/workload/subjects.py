"""The snapshot and some users of a data set, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from service.domain.queries import Requester
from service.domain.settings import Settings
from service.histories.event_cache import Histories
from service.histories.request_history import HistoryAssembler, RequestHistory
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.snapshots.text_encoders import open_encoder
from service.stores.sqlite import SQLiteStore
from tests.benchmarks.workload.ground import Ground
from tests.benchmarks.workload.questions import AT


@dataclass(frozen=True, slots=True)
class Subject:
    """A user, as of the time of the questions."""

    asked: RequestHistory
    memory: UserMemory


@dataclass(frozen=True, slots=True)
class Subjects:
    """What the service would serve, and whom."""

    snapshot: Snapshot
    embeddings: EmbeddingCache
    users: Sequence[Subject]  # the askers of the ground, then its others


def subjects(ground: Ground) -> Subjects:
    """Load what the service would, with the memories of the askers and of other users."""

    async def load() -> Subjects:
        store = SQLiteStore(ground.data / STORE_FILE)
        try:
            encoder = open_encoder(Settings.read().encoder)
            embeddings = EmbeddingCache(encoder, ground.data / EMBEDDINGS_FILE)
            with ThreadPoolExecutor(1) as workers:
                registry = Registry(ground.data / MODELS_FOLDER)
                serving = LiveSnapshot(store, registry, embeddings, workers)
                await serving.open()
            histories = Histories(store, serving.vocabulary, 64 << 20)
            pasts = HistoryAssembler(store, histories, serving.vocabulary, embeddings)
            users = []
            for user in [user for user, _ in ground.askers] + list(ground.others):
                stored = await pasts.history(user)
                asked = pasts.assemble(serving.snapshot, Requester(user), stored, AT)
                users.append(Subject(asked, build_memory(serving.snapshot, asked.history, AT)))
            return Subjects(serving.snapshot, embeddings, users)
        finally:
            await store.close()

    return asyncio.run(load())
