"""Recommendations for all users, or a shard of them, computed and written to a file."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import ProgressCallback
from models.history.user_memory import UserMemory
from models.ranking.recommend import Ranked, recommend
from service import __version__
from service.datasets.base import batches
from service.datasets.tables import check_table, open_table
from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.engine.compose import Parts, compose
from service.engine.list_progress import ListBatch, ListProgress, ListRun, UserList, open_progress
from service.engine.pipeline import excluded_rows, unknown_types
from service.engine.selection import SteeredItems, select_items, steer_items
from service.histories.event_columns import EventColumns
from service.histories.memory_provider import MemoryProvider
from service.questions.asked import RecommendIn
from service.runtime.data_layout import namespace_of
from service.snapshots.text_embeddings import open_encoder
from service.stores.base import Store
from service.stores.event_identity import user_key
from service.stores.namespace_directory import open_directory
from service.stores.opening import is_shared
from service.stores.values import user_digest

# shards ---------------------------------------------------------------------------------

_FORM = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class ListShard:
    """Shard `number` (from 1) of `count`: the users whose `user_key` modulo `count` is number - 1.

    Each user is in exactly one of the shards, the same on every machine and in every store.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> ListShard:
        """Parse NUMBER/COUNT, such as 2/4.

        Raises:
            Invalid: the text has another form, or the number is not from 1 to the count.
        """
        found = _FORM.fullmatch(text)
        shard = cls(*map(int, found.groups())) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise Invalid(
                "", f"{text}: must be NUMBER/COUNT, such as 2/4, with NUMBER from 1 to COUNT"
            )
        return shard

    def has(self, user_id: str) -> bool:
        """Report whether a user is in the shard."""
        return self.count == 1 or user_key(user_id) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


# the table ------------------------------------------------------------------------------

_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_ROWS = 20_000  # written at a time: a row group of Parquet
_PAGE = 1_000  # entries of the ledger read at once


class TableCounts(NamedTuple):
    """Counts of what a table holds."""

    users: int  # those without rows included
    rows: int


async def write_table(
    path: Path,
    lists: ListProgress,
    store: Store,
    users: Set[str],
    metadata: Mapping[str, str],
    *,
    progress: ProgressCallback,
) -> TableCounts:
    """Write the lists to a file, without those of users who were forgotten since the run began.

    A user who was forgotten and came back has no list: the one there is may be of what was
    forgotten. The file appears when it is complete and durable.

    Args:
        path: of the file, whose suffix selects the format.
        lists: by user id.
        store: that knows who was forgotten.
        users: that are stored now.
        metadata: of the file, where its format has any.
        progress: called with how many users are done, of how many.

    Raises what `service.datasets.tables.open_table` raises.
    """
    was_forgotten = await _forgotten_since(store, lists.run.begun)
    written = rows = done = 0
    with open_table(path, _COLUMNS, metadata) as write:
        waiting: list[tuple[str, int, str, float]] = []
        for batch in lists.batches():
            for user_id, item_ids, scores in batch.lists:
                if user_id not in users or was_forgotten(user_id):
                    continue
                listed = zip(item_ids, scores, strict=True)
                waiting += [(user_id, rank, *item) for rank, item in enumerate(listed, 1)]
                written, rows = written + 1, rows + len(item_ids)
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
            done += len(batch.lists)
            progress(done, lists.users)
            await asyncio.sleep(0)  # an interrupted command is cancelled here
        if waiting:
            write(waiting)
    return TableCounts(written, rows)


async def _forgotten_since(store: Store, since: int) -> Callable[[str], bool]:
    """Return the function that tells whether a user was forgotten at that time or later."""
    digests: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by salt
    if await store.count_forgotten(since):
        cursor: str | None = None
        while True:
            page, cursor = await store.page_forgotten(cursor=cursor, limit=_PAGE)
            for entry in page:
                if entry.forgotten >= since:
                    digests[entry.salt].add(entry.digest)
            if cursor is None:
                break
    return lambda user_id: any(user_digest(salt, user_id) in digests[salt] for salt in digests)


# lists of all users ---------------------------------------------------------------------

_BATCH = 16  # users whose lists are one piece of work for a thread
_SAMPLE = 100  # users at most whose lists are compared with those of scoring every item
PROGRESS_SUFFIX = ".progress"  # of the file of a run beside its output
WHOLE = ListShard()


class Listed(NamedTuple):
    """Counts of what was written."""

    users: int
    rows: int
    computed: int  # users whose lists this run has computed; others are of a run that it continued
    seconds: float  # without loading
    model_version: str
    sampled: int  # users of a sample for whom not every item was scored
    recall: float  # of their lists against those of scoring every item; nan without any


def ignore(*_: object) -> None:
    """Take a call that nobody is interested in."""


async def write_lists(
    settings: Settings,
    path: Path,
    question: RecommendIn,
    *,
    progress: ProgressCallback,
    writing: ProgressCallback = ignore,
    announce: Callable[[str], None] = ignore,
    shard: ListShard = WHOLE,
    restart: bool = False,
) -> Listed:
    """Write what the service would recommend to each user of a store, by user id and rank.

    All lists come from one model and one state of the catalogue, those of the beginning; the events
    of a user are read when the user's turn comes. The file appears at the end, whole and durable.
    If not every item is scored, a random sample of users is answered once more by scoring all,
    which gives the recall.

    Lists go to a file beside the output first, of the suffix `PROGRESS_SUFFIX`. A run that is
    stopped leaves it, and the next one of the same model, store, query and shard continues with
    the user after the last one there, at the time of the first. Any other run discards it.

    Args:
        settings: of the service.
        path: of the file, whose suffix says its format.
        question: what to recommend to each user in turn. All requests have its time, or that of
            the beginning.
        progress: called with how many users are done, of how many.
        writing: called in the same way while the file is written, when all users are done.
        announce: called with a sentence where an earlier run is continued or discarded, and for
            each warning about the filter and the rules.
        shard: of the users.
        restart: discard an earlier run in any case.

    Raises:
        Conflict: another process is computing the lists of this path.

    Also raises what `compose`, `LiveSnapshot.open` and `service.datasets.tables.open_table` raise.
    """
    check_table(path)
    encoder = open_encoder(settings.encoder)
    # Each user has one turn: nothing that is kept would be used again.
    settings = settings.model_copy(
        update={"history_cache_bytes": 0, "embedding_dim": encoder.dimension}
    )
    parts = compose(settings, encoder=encoder, threads=os.cpu_count() or 1)
    try:
        await parts.live.open()
        version = parts.live.snapshot.version
        run = await asyncio.to_thread(_describe_run, parts, question, shard)
        with open_progress(_progress_path(path), run, restart=restart) as lists:
            user_ids = await asyncio.to_thread(_user_ids, parts.store, shard)
            left = user_ids if lists.last is None else user_ids[bisect(user_ids, lists.last) :]
            _announce(announce, lists, len(left), run.catalogue_version)
            started = time.monotonic()
            await _compute(parts, question, lists, left, _sample(user_ids), progress, announce)
            users = frozenset(await asyncio.to_thread(_user_ids, parts.store, shard))
            metadata = {"heed.model_version": version, "heed.at": to_rfc3339(lists.run.at)}
            if shard != WHOLE:
                metadata["heed.shard"] = str(shard)
            table = await write_table(path, lists, parts.store, users, metadata, progress=writing)
            lists.remove()
    finally:
        await parts.close()
    recalls = lists.recalls
    return Listed(
        table.users,
        table.rows,
        len(left),
        time.monotonic() - started,
        version,
        len(recalls),
        sum(recalls) / len(recalls) if recalls else math.nan,
    )


def _progress_path(path: Path) -> Path:
    return path.with_name(path.name + PROGRESS_SUFFIX)


def _describe_run(parts: Parts, question: RecommendIn, shard: ListShard) -> ListRun:
    """Describe a run that begins now, by everything that its lists depend on but the records."""
    settings, now = parts.settings, time.time_ns() // 1_000
    identity = {
        "model": f"{parts.live.snapshot.version} of {parts.live.served.model_created}",
        "store": _identify_store(settings),
        "request": repr(question),
        "shard": str(shard),
        "text encoder": parts.embeddings.encoder.name,
        "configuration": f"{settings.max_exact_rows} {settings.max_attention_error}",
        "version of Heed": __version__,
    }
    at = now if question.at is None else question.at
    return ListRun(identity, at, now, parts.live.catalogue.version)


def _identify_store(settings: Settings) -> str:
    """Return the identity of a store: in a database, the same on all machines."""
    directory = open_directory(settings.data, settings.store)
    try:
        token = directory.token(namespace_of(settings.data))
    finally:
        directory.close()
    if is_shared(settings.store):
        return f"namespace {token}"
    # By its inode too: at the same path may be a store that was restored. Not by its device, whose
    # number may change when the machine starts.
    return f"{settings.data.resolve()} {token and token[1]}"


def _user_ids(store: Store, shard: ListShard) -> list[str]:
    """Return the ids of a shard's users, in the order of their bytes."""
    return [user_id for user_id in store.scan_user_ids() if shard.has(user_id)]


def _sample(user_ids: Sequence[str]) -> frozenset[str]:
    return frozenset(random.Random(0).sample(user_ids, min(_SAMPLE, len(user_ids))))


def _announce(
    announce: Callable[[str], None], lists: ListProgress, left: int, catalogue_version: int
) -> None:
    """Say whether an earlier run is continued or discarded."""
    if lists.differences:
        others = " and of another ".join(lists.differences)
        announce(f"Starting again: the interrupted run was of another {others}.")
    elif lists.users:
        announce(
            f"Continuing the interrupted run: {lists.users:,} of {lists.users + left:,} users are "
            f"done, as of {to_rfc3339(lists.run.at)}."
        )
        if lists.run.catalogue_version != catalogue_version:
            announce("The catalogue has changed since, and their lists are of the earlier one.")


async def _compute(
    parts: Parts,
    question: RecommendIn,
    lists: ListProgress,
    user_ids: Sequence[str],
    sample: Set[str],
    progress: ProgressCallback,
    announce: Callable[[str], None],
) -> None:
    """Append the lists of users, in order."""
    snapshot, at = parts.live.snapshot, lists.run.at
    total = lists.users + len(user_ids)
    selection = select_items(snapshot, question.filter)
    allowed = selection.allowed
    steered = steer_items(question, snapshot, allowed=allowed)
    unknown = await unknown_types(parts, question.visible.types, "/visible/types")
    for warning in selection.warnings + steered.warnings + unknown:
        announce(f"warning: {warning['pointer']}: {warning['detail']}")
    options = question.options(parts.settings)
    compute = partial(
        _lists,
        parts.memories,
        snapshot,
        question,
        allowed,
        steered,
        options=options,
        at=at,
        sample=sample,
    )
    progress(lists.users, total)
    async for batch in _in_order(parts, user_ids, question.at, at, compute):
        lists.append(batch)
        progress(lists.users, total)


async def _in_order(
    parts: Parts,
    user_ids: Sequence[str],
    asked: int | None,
    at: int,
    lists: Callable[[Mapping[str, EventColumns]], ListBatch],
) -> AsyncIterator[ListBatch]:
    """The lists of a few users at a time, in order.

    While each thread computes two batches, the events of the next are read.
    """
    loop = asyncio.get_running_loop()
    begun: deque[asyncio.Future[ListBatch]] = deque()
    for batch in batches(user_ids, _BATCH):
        events = {user_id: await parts.memories.load(user_id, asked, now=at) for user_id in batch}
        begun.append(loop.run_in_executor(parts.executor, lists, events))
        if len(begun) > 2 * (os.cpu_count() or 1):
            yield await begun.popleft()
    for work in begun:
        yield await work


def _lists(
    memories: MemoryProvider,
    snapshot: Snapshot,
    question: RecommendIn,
    allowed: NDArray[np.bool_],
    steered: SteeredItems,
    events: Mapping[str, EventColumns],
    *,
    options: AttentionOptions,
    at: int,
    sample: Set[str],
) -> ListBatch:
    """Return the lists of these users, one after the other."""
    lists: list[UserList] = []
    recalls: list[float] = []
    item_id = snapshot.catalogue.vocabulary.id

    def rank(user: UserMemory, own: EventColumns, options: AttentionOptions) -> Ranked:
        return recommend(
            snapshot,
            user,
            limit=question.limit,
            allowed=allowed,
            excluded=excluded_rows(
                snapshot, question.exclude, own if question.exclude_seen else None
            ),
            diversity=question.diversity,
            options=options,
            steering=steered.steering,
        )

    for user_id, own in events.items():
        with memories.memory(snapshot, own, options, now=at, visible=question.visible) as user:
            ranked = rank(user, own, options)
            item_ids = [item_id(row) for row in ranked.rows.tolist()]
            lists.append(UserList(user_id, item_ids, ranked.scores.total.tolist()))
            if user_id in sample and not ranked.is_whole:
                best = rank(user, own, replace(options, mode="exact")).rows
                recalls.append(float(np.isin(best, ranked.rows).mean()))
    return ListBatch(lists, recalls)
