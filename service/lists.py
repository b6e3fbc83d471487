"""The recommendations of all users, computed in one go and written to a file."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from models.scoring import Attending
from models.snapshot import Snapshot
from models.user_memory import remember
from service.asking import Asked, Pasts, attending
from service.datasets import batches, table
from service.embeddings import Embeddings
from service.histories import Histories
from service.queries import RecommendQuery
from service.recommending import recommended
from service.registry import Registry
from service.serving import Serving
from service.stores.base import Store
from service.timestamps import to_rfc3339

_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_PART = 16  # users whose lists are one piece of work for a thread
_ROWS = 20_000  # written at a time: a row group of Parquet

_Row = tuple[str, int, str, float]  # the columns


class Listed(NamedTuple):
    """What was written."""

    users: int
    rows: int
    seconds: float  # without loading
    model_version: str


async def write_lists(
    store: Store,
    registry: Registry,
    embeddings: Embeddings,
    path: Path,
    query: RecommendQuery,
    *,
    at: int,
    exact_up_to: int,
    told: Callable[[int, int], None],
) -> Listed:
    """Write what the service would recommend to each user of a store, by user id and rank.

    All are answered by one model and one state of the catalogue, those of the beginning; a history
    is read when its user's turn comes. The file appears at the end, whole and durable.

    Args:
        store: whose users.
        registry: whose current model.
        embeddings: encodes items and interests.
        path: of the file, whose format its name says.
        query: what to recommend; whose memory attends is each user's in turn.
        at: microseconds UTC, the time of all requests.
        exact_up_to: rows up to which a memory is attended exactly.
        told: hears how many users are done, of how many.

    Raises:
        Corrupt: naming the model file that fails its checks.
        ModelRejected: when the current model does not fit.
        Invalid, Unavailable, StoreFull: as `service.datasets.table`.
    """
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        serving = Serving(store, registry, embeddings, workers)
        await serving.open()
        vocabulary = serving.vocabulary
        pasts = Pasts(store, Histories(store, vocabulary, 0), vocabulary, embeddings)
        loop = asyncio.get_running_loop()
        user_ids = await loop.run_in_executor(workers, list, store.scan_user_ids())
        snapshot, done, count = serving.snapshot, 0, 0
        metadata = {"heed.model_version": snapshot.version, "heed.at": to_rfc3339(at)}
        started = time.monotonic()
        with table(path, _COLUMNS, metadata) as write:
            waiting: list[_Row] = []
            how = attending(query.asker, exact_up_to)
            parts = _parts(snapshot, pasts, query, user_ids, at, how, workers, 2 * threads)
            async for users, rows in parts:
                waiting += rows
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
                done, count = done + users, count + len(rows)
                told(done, len(user_ids))
            write(waiting)
    return Listed(done, count, time.monotonic() - started, snapshot.version)


async def _parts(
    snapshot: Snapshot,
    pasts: Pasts,
    query: RecommendQuery,
    user_ids: Sequence[str],
    at: int,
    how: Attending,
    workers: Executor,
    ahead: int,
) -> AsyncIterator[tuple[int, list[_Row]]]:
    """The lists of a few users at a time, in order: how many users, and their rows.

    While the workers compute so many parts, the histories of the next are read.
    """
    loop = asyncio.get_running_loop()
    begun: deque[tuple[int, asyncio.Future[list[_Row]]]] = deque()
    for part in batches(user_ids, _PART):
        asked = []
        for user_id in part:
            stored = await pasts.history(user_id)
            asker = replace(query.asker, user_id=user_id)
            asked.append((user_id, pasts.past(snapshot, asker, stored, at)))
        work = loop.run_in_executor(workers, _lists, snapshot, query, asked, at, how)
        begun.append((len(part), work))
        if len(begun) > ahead:
            users, first = begun.popleft()
            yield users, await first
    for users, work in begun:
        yield users, await work


def _lists(
    snapshot: Snapshot,
    query: RecommendQuery,
    asked: Sequence[tuple[str, Asked]],
    at: int,
    how: Attending,
) -> list[_Row]:
    """The lists of these users, one after the other."""
    rows: list[_Row] = []
    item_id = snapshot.catalogue.vocabulary.id
    for user_id, each in asked:
        user = remember(snapshot, each.past, at)
        ranked = recommended(query, snapshot, user, each, how)
        found = zip(ranked.rows.tolist(), ranked.scores.total.tolist(), strict=True)
        rows += [(user_id, rank, item_id(row), score) for rank, (row, score) in enumerate(found, 1)]
    return rows
