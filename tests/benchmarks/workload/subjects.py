"""The snapshot and some users of a data set, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from models.catalogue.snapshot import Snapshot
from models.history.user_memory import UserMemory, build_memory
from service.domain.queries import Requester
from service.domain.settings import Settings
from service.engine.compose import compose
from service.histories.event_columns import EventColumns
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.workload.ground import Ground
from tests.benchmarks.workload.questions import AT


@dataclass(frozen=True, slots=True)
class Subject:
    """A user, as of the time of the questions."""

    events: EventColumns
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
        parts = compose(Settings.read({"data": ground.data}), threads=1)
        try:
            await parts.live.open()
            snapshot, users = parts.live.snapshot, []
            for user_id in [user for user, _ in ground.askers] + list(ground.others):
                requester = Requester(user_id)
                events = await parts.memories.load(requester, AT)
                history = parts.memories.history(snapshot, events, requester)
                users.append(Subject(events, build_memory(snapshot, history, AT)))
            return Subjects(snapshot, parts.embeddings, users)
        finally:
            await parts.close()

    return asyncio.run(load())
