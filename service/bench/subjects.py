"""The snapshot and some users' memories of a data set, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from models.snapshot import Snapshot
from models.user_memory import UserMemory, remember
from service.asking import Pasts
from service.bench.ground import Ground
from service.embeddings import Embeddings
from service.encoders import open_encoder
from service.histories import Histories
from service.layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.queries import Asker
from service.registry import Registry
from service.serving import Serving
from service.settings import Settings
from service.stores.sqlite import SQLiteStore

_AT = 1_893_456_000_000_000  # 2030: the time of the questions, microseconds UTC


def subjects(ground: Ground) -> tuple[Snapshot, Sequence[UserMemory]]:
    """What the service would serve, and the memories of the askers and of other users."""

    async def load() -> tuple[Snapshot, list[UserMemory]]:
        store = SQLiteStore(ground.data / STORE_FILE)
        try:
            encoder = open_encoder(Settings.read().encoder)
            embeddings = Embeddings(encoder, ground.data / EMBEDDINGS_FILE)
            with ThreadPoolExecutor(1) as workers:
                registry = Registry(ground.data / MODELS_FOLDER)
                serving = Serving(store, registry, embeddings, workers)
                await serving.open()
            histories = Histories(store, serving.vocabulary, 64 << 20)
            pasts = Pasts(store, histories, serving.vocabulary, embeddings)
            memories = []
            for user in [user for user, _ in ground.askers] + list(ground.others):
                stored = await pasts.history(user)
                asked = pasts.past(serving.snapshot, Asker(user), stored, _AT)
                memories.append(remember(serving.snapshot, asked.past, _AT))
            return serving.snapshot, memories
        finally:
            await store.close()

    return asyncio.run(load())
