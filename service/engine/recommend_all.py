"""The recommendations of all users, computed in one go and written to a file."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.user_memory import build_memory
from service.datasets import batches, open_table
from service.domain.queries import RecommendQuery
from service.domain.timestamps import to_rfc3339
from service.engine.recommend import recommended
from service.histories.event_cache import Histories
from service.histories.long_histories import collapse_history
from service.histories.request_history import HistoryAssembler, RequestHistory, attention_options
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store

_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_PART = 16  # users whose lists are one piece of work for a thread
_ROWS = 20_000  # written at a time: a row group of Parquet
_JUDGES = 100  # users at most whose lists are compared with those of all scores

_Row = tuple[str, int, str, float]  # the columns


class Listed(NamedTuple):
    """What was written."""

    users: int
    rows: int
    seconds: float  # without loading
    model_version: str
    judged: int  # users of a sample who were not answered by scoring every item
    recall: float  # share of the lists that scoring every item gives them, in theirs; else nan


class _Part(NamedTuple):
    """What some users get."""

    users: int
    rows: list[_Row]
    recalls: list[float]  # of those of them who are judged


async def write_lists(
    store: Store,
    registry: Registry,
    embeddings: EmbeddingCache,
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
    Where not every item is scored, some users, drawn at random, are answered once more by scoring
    all, to tell what the others may miss.

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
        serving = LiveSnapshot(store, registry, embeddings, workers)
        await serving.open()
        vocabulary = serving.vocabulary
        pasts = HistoryAssembler(store, Histories(store, vocabulary, 0), vocabulary, embeddings)
        loop = asyncio.get_running_loop()
        user_ids = await loop.run_in_executor(workers, list, store.scan_user_ids())
        judges = frozenset(random.Random(0).sample(user_ids, min(_JUDGES, len(user_ids))))
        recalls: list[float] = []
        snapshot, done, count = serving.snapshot, 0, 0
        metadata = {"heed.model_version": snapshot.version, "heed.at": to_rfc3339(at)}
        started = time.monotonic()
        with open_table(path, _COLUMNS, metadata) as write:
            waiting: list[_Row] = []
            options = attention_options(query.requester, exact_up_to)
            each = partial(_lists, snapshot, query, at=at, options=options, judges=judges)
            async for part in _parts(snapshot, pasts, query, user_ids, at, each, workers, threads):
                waiting += part.rows
                recalls += part.recalls
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
                done, count = done + part.users, count + len(part.rows)
                told(done, len(user_ids))
            write(waiting)
    recall = sum(recalls) / len(recalls) if recalls else math.nan
    seconds = time.monotonic() - started
    return Listed(done, count, seconds, snapshot.version, len(recalls), recall)


async def _parts(
    snapshot: Snapshot,
    pasts: HistoryAssembler,
    query: RecommendQuery,
    user_ids: Sequence[str],
    at: int,
    lists: Callable[[Sequence[tuple[str, RequestHistory]]], _Part],
    workers: Executor,
    threads: int,
) -> AsyncIterator[_Part]:
    """The lists of a few users at a time, in order.

    While the workers compute two parts each, the histories of the next are read.
    """
    loop = asyncio.get_running_loop()
    begun: deque[asyncio.Future[_Part]] = deque()
    for part in batches(user_ids, _PART):
        asked = []
        for user_id in part:
            stored = await pasts.history(user_id)
            requester = replace(query.requester, user_id=user_id)
            asked.append((user_id, pasts.assemble(snapshot, requester, stored, at)))
        begun.append(loop.run_in_executor(workers, lists, asked))
        if len(begun) > 2 * threads:
            yield await begun.popleft()
    for work in begun:
        yield await work


def _lists(
    snapshot: Snapshot,
    query: RecommendQuery,
    asked: Sequence[tuple[str, RequestHistory]],
    *,
    at: int,
    options: AttentionOptions,
    judges: Set[str],
) -> _Part:
    """The lists of these users, one after the other."""
    rows: list[_Row] = []
    recalls: list[float] = []
    item_id = snapshot.catalogue.vocabulary.id
    for user_id, each in asked:
        user = build_memory(
            snapshot, each.history, at, collapsed=collapse_history(snapshot, each, at)
        )
        ranked = recommended(query, snapshot, user, each, options)
        found = zip(ranked.rows.tolist(), ranked.scores.total.tolist(), strict=True)
        rows += [(user_id, rank, item_id(row), score) for rank, (row, score) in enumerate(found, 1)]
        if user_id in judges and ranked.mode == "coarse":
            best = recommended(query, snapshot, user, each, replace(options, mode="exact")).rows
            recalls.append(float(np.isin(best, ranked.rows).mean()))
    return _Part(len(asked), rows, recalls)
