"""The job: the snapshot that a service would serve, and questions answered in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.attention.attend import DEFAULT_OPTIONS
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.ranking.matches import DEFAULTS
from models.ranking.recommend import recommend
from models.ranking.scoring import score
from service.domain.settings import Settings
from service.engine.compose import compose
from service.engine.search import search_items
from service.questions.asked import SearchIn
from service.snapshots.live_search import SearchSetup
from service.snapshots.text_embeddings import EmbeddingCache
from tests.benchmarks.harness.data import AT, Question

Job = Callable[[], object]


@dataclass(frozen=True, slots=True)
class LoadedData:
    """The snapshot of a data directory, and users' memories."""

    snapshot: Snapshot
    embeddings: EmbeddingCache
    users: Mapping[str, UserMemory]  # as of the time of the questions


def load_data(data: Path, users: Sequence[str]) -> LoadedData:
    """Load what the service would."""

    async def load() -> LoadedData:
        parts = compose(Settings.read({"data": data}), threads=1)
        try:
            await parts.live.open()
            snapshot = parts.live.snapshot
            loaded = {}
            for user_id in users:
                events = await parts.memories.load(user_id, now=AT)
                history = parts.memories.history(snapshot, events)
                loaded[user_id] = build_memory(snapshot, history, AT)
            return LoadedData(snapshot, parts.embeddings, loaded)
        finally:
            await parts.close()

    return asyncio.run(load())


def jobs(loaded: LoadedData, asked: Sequence[Question]) -> dict[str, list[Job]]:
    """One job for each body of each question, by the question's name.

    Scores and recommendations are of a memory that is in place; a search reads its words, and finds
    their vector where it was encoded before, as the service does.
    """
    return {each.name: [_job(loaded, each.ask, body) for body in each.bodies] for each in asked}


def _job(loaded: LoadedData, ask: str, body: Mapping[str, Any]) -> Job:
    snapshot = loaded.snapshot
    offered = snapshot.catalogue.servable
    if ask == "search":
        query = SearchIn(query=body["query"], limit=body["limit"])
        nobody = build_memory(snapshot, UserHistory.empty(), AT)
        return lambda: search_items(
            query,
            snapshot,
            nobody,
            SearchSetup(DEFAULTS, loaded.embeddings.query, "", quick=True),
            allowed=offered,
            options=DEFAULT_OPTIONS,
        )
    user = loaded.users[body["user_id"]]
    if ask == "recommend":
        limit, seen = body["limit"], user.history.rows[user.history.rows >= 0].astype(np.int64)
        return lambda: recommend(snapshot, user, limit=limit, allowed=offered, excluded=seen)
    targets = snapshot.catalogue.rows(body["item_ids"])
    return lambda: score(snapshot, user, targets)
