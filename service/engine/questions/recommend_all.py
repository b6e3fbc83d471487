"""Recommendations for all users, written to a file."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.snapshot import Snapshot
from models.compute.progress import ProgressCallback
from service.datasets.base import batches
from service.datasets.tables import open_table
from service.domain.queries import RecommendQuery, Requester
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.engine.compose import Parts, compose
from service.engine.questions.recommend import recommend_items
from service.engine.selection.item_selection import select_items
from service.engine.selection.steering import SteeredItems, steer_items
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import MemoryProvider
from service.snapshots.text_encoders import open_encoder

_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_PART = 16  # users whose lists are one piece of work for a thread
_ROWS = 20_000  # written at a time: a row group of Parquet
_SAMPLE = 100  # users at most whose lists are compared with those of scoring every item

_Row = tuple[str, int, str, float]  # the columns
_Part = tuple[list[_Row], list[float]]  # lists of some users; recalls of those in the sample


class Listed(NamedTuple):
    """Counts of what was written."""

    users: int
    rows: int
    seconds: float  # without loading
    model_version: str
    sampled: int  # users of a sample for whom not every item was scored
    recall: float  # of their lists against those of scoring every item; nan without any


async def write_lists(
    settings: Settings,
    path: Path,
    query: RecommendQuery,
    *,
    progress: ProgressCallback,
) -> Listed:
    """Write what the service would recommend to each user of a store, by user id and rank.

    All lists come from one model and one state of the catalogue, those of the beginning; the events
    of a user are read when the user's turn comes. The file appears at the end, whole and durable.
    Where not every item is scored, a random sample of users is answered once more by scoring all,
    which gives the recall.

    Args:
        settings: of the service.
        path: of the file, whose suffix says its format.
        query: what to recommend; its requester becomes each user in turn. All requests have its
            time, or that of the beginning.
        progress: called with how many users are done, of how many.

    Raises what `compose`, `LiveSnapshot.open` and `service.datasets.tables.open_table` raise.
    """
    encoder = open_encoder(settings.encoder)
    # Each user has one turn: nothing that is kept would be used again.
    settings = settings.model_copy(
        update={"history_cache_bytes": 0, "embedding_dim": encoder.dimension}
    )
    parts = compose(settings, encoder=encoder, threads=os.cpu_count() or 1)
    try:
        await parts.live.open()
        user_ids = await asyncio.to_thread(list, parts.store.scan_user_ids())
        sample = frozenset(random.Random(0).sample(user_ids, min(_SAMPLE, len(user_ids))))
        recalls: list[float] = []
        snapshot, done, count = parts.live.snapshot, 0, 0
        asked = query.requester.at
        at = time.time_ns() // 1_000 if asked is None else asked
        metadata = {"heed.model_version": snapshot.version, "heed.at": to_rfc3339(at)}
        started = time.monotonic()
        with open_table(path, _COLUMNS, metadata) as write:
            waiting: list[_Row] = []
            allowed = select_items(snapshot, query.filter).allowed
            steered = steer_items(
                snapshot, query.steering, allowed=allowed, exclude=query.exclude, limit=query.limit
            )
            lists = partial(
                _lists, parts.memories, snapshot, query, allowed, steered, at=at, sample=sample
            )
            async for rows, found in _in_order(parts, user_ids, query.requester, at, lists):
                waiting += rows
                recalls += found
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
                done, count = min(done + _PART, len(user_ids)), count + len(rows)
                progress(done, len(user_ids))
            write(waiting)
    finally:
        await parts.close()
    recall = sum(recalls) / len(recalls) if recalls else math.nan
    seconds = time.monotonic() - started
    return Listed(done, count, seconds, snapshot.version, len(recalls), recall)


async def _in_order(
    parts: Parts,
    user_ids: Sequence[str],
    requester: Requester,
    at: int,
    lists: Callable[[Mapping[str, EventColumns]], _Part],
) -> AsyncIterator[_Part]:
    """The lists of a few users at a time, in order.

    While each thread computes two parts, the events of the next are read.
    """
    loop = asyncio.get_running_loop()
    begun: deque[asyncio.Future[_Part]] = deque()
    for part in batches(user_ids, _PART):
        users = [replace(requester, user_id=user_id) for user_id in part]
        events = {
            user_id: await parts.memories.load(user, at)
            for user_id, user in zip(part, users, strict=True)
        }
        begun.append(loop.run_in_executor(parts.executor, lists, events))
        if len(begun) > 2 * (os.cpu_count() or 1):
            yield await begun.popleft()
    for work in begun:
        yield await work


def _lists(
    memories: MemoryProvider,
    snapshot: Snapshot,
    query: RecommendQuery,
    allowed: NDArray[np.bool_],
    steered: SteeredItems,
    events: Mapping[str, EventColumns],
    *,
    at: int,
    sample: Set[str],
) -> _Part:
    """The lists of these users, one after the other."""
    steering = steered.steering
    rows: list[_Row] = []
    recalls: list[float] = []
    item_id = snapshot.catalogue.vocabulary.id
    options = memories.options(query.requester)
    for user_id, each in events.items():
        with memories.memory(snapshot, query.requester, each, at) as user:
            ranked = recommend_items(query, snapshot, user, each, options, allowed, steering)
            listed = zip(ranked.rows.tolist(), ranked.scores.total.tolist(), strict=True)
            rows += [
                (user_id, rank, item_id(row), score) for rank, (row, score) in enumerate(listed, 1)
            ]
            if user_id in sample and ranked.mode == "coarse":
                every = replace(options, mode="exact")
                best = recommend_items(query, snapshot, user, each, every, allowed, steering).rows
                recalls.append(float(np.isin(best, ranked.rows).mean()))
    return rows, recalls
