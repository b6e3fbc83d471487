"""The snapshot and some users of a data directory, loaded into this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from service.domain.settings import Settings
from service.engine.compose import compose
from service.histories.event_columns import EventColumns
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.questions import AT


@dataclass(frozen=True, slots=True)
class LoadedUser:
    """A user, as of the time of the questions."""

    events: EventColumns
    memory: UserMemory


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The snapshot that the service would serve, and users' memories."""

    snapshot: Snapshot
    embeddings: EmbeddingCache
    users: Sequence[LoadedUser]  # the askers of the ground, then its others


def load_data(ground: BenchmarkData) -> LoadedData:
    """Load what the service would, with the memories of the askers and of other users."""

    async def load() -> LoadedData:
        parts = compose(Settings.read({"data": ground.data}), threads=1)
        try:
            await parts.live.open()
            snapshot, users = parts.live.snapshot, []
            for user_id in [user for user, _ in ground.askers] + list(ground.others):
                events = await parts.memories.load(user_id, now=AT)
                history = parts.memories.history(snapshot, events)
                users.append(LoadedUser(events, build_memory(snapshot, history, AT)))
            return LoadedData(snapshot, parts.embeddings, users)
        finally:
            await parts.close()

    return asyncio.run(load())
