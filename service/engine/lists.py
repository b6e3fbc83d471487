"""Recommendations for all users, or a shard of them, computed and written to a file."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import shutil
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import orjson

from models.attention.attend import AttentionOptions
from models.compute.checkpoint import ProgressCallback
from models.history.user_memory import UserMemory
from models.ranking.recommend import Ranked, recommend
from service import __version__
from service.datasets.base import batches
from service.datasets.tables import check_table, open_table
from service.domain.errors import Conflict, Invalid
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.engine.compose import Parts, compose
from service.histories.event_columns import EventColumns
from service.questions.asked import RecommendIn
from service.runtime import durable_files
from service.runtime.data_layout import namespace_of
from service.snapshots.text_embeddings import open_encoder
from service.stores.base import Store
from service.stores.encoding import user_key
from service.stores.namespace_directory import open_directory
from service.stores.opening import is_shared
from service.stores.values import user_digest

_BATCH = 16  # users whose lists are one piece of work for a thread
_PART = 1_000  # users whose lists are one file of a run: what a kill takes
_SAMPLE = 100  # users at most whose lists are compared with those of scoring every item
_COLUMNS = {"user_id": str, "rank": int, "item_id": str, "score": float}
_ROWS = 20_000  # written at a time: a row group of Parquet
_PAGE = 1_000  # entries of the ledger read at once

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
        """Parse NUMBER/COUNT, such as 2/4, with a number from 1 to the count. Raises `Invalid`."""
        match = _FORM.fullmatch(text)
        shard = cls(*map(int, match.groups())) if match else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise Invalid(
                "", f"{text}: must be NUMBER/COUNT, such as 2/4, with NUMBER from 1 to COUNT"
            )
        return shard

    def users(self, store: Store) -> list[str]:
        """Return the ids of the shard's users, in the order of their bytes."""
        return [user_id for user_id in store.scan_user_ids() if self.has(user_id)]

    def has(self, user_id: str) -> bool:
        return self.count == 1 or user_key(user_id) % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = ListShard()

# ---------------------------------------------------------------- lists that are computed


class UserList(NamedTuple):
    """The recommendations of one user, best first."""

    user_id: str
    item_ids: list[str]
    scores: list[float]


class ListBatch(NamedTuple):
    """Lists of some users in the order of their ids, and the recalls of those in the sample."""

    lists: list[UserList]
    recalls: list[float]


@dataclass(frozen=True, slots=True)
class ListRun:
    """Description of a run. Only a run of the same `identity` may continue it, at its time."""

    identity: Mapping[str, str]  # name of what lists depend on -> its value
    at: int  # request time, microseconds UTC
    begun: int  # microseconds UTC
    catalogue_version: int  # of the store's catalogue at the beginning


class ListParts:
    """The lists that a run, and the runs that it continues, have computed. Use `open_parts`.

    The folder, which the caller has locked, has a file that describes the run, and a part file for
    each thousand users. A file appears whole and durable, so that a kill loses only the part that
    was being computed. With `restart`, a run does not continue the one in the folder.
    """

    def __init__(self, folder: Path, run: ListRun, *, restart: bool) -> None:
        self._folder = folder
        self._parts = 0
        self.run = run
        self.users = 0  # whose lists there are
        self.last: str | None = None  # the greatest of their ids
        self.recalls: list[float] = []
        # Names of what the run in the folder depended on and this one does not; it is discarded.
        self.differences: tuple[str, ...] = ()
        earlier = self._read("run")
        if earlier is not None:
            before, now = earlier["identity"], run.identity
            names = {**before, **now}
            self.differences = tuple(n for n in names if before.get(n) != now.get(n))
        if earlier is None or self.differences or restart:
            (folder / "run").unlink(missing_ok=True)  # first: without it, no part is believed
            self._write("run", asdict(run))
        else:
            self.run = ListRun(**earlier)
            while (part := self._part(self._parts)) is not None:
                self._count(part)
        for file in folder.iterdir():  # a damaged part, and those behind it
            if file.name not in {"run", *map(str, range(self._parts))}:
                file.unlink()

    def append(self, part: ListBatch) -> None:
        """Append lists of the users that come next, durably. Raises `StoreFull`."""
        self._write(str(self._parts), [[tuple(row) for row in part.lists], part.recalls])
        self._count(part)

    def parts(self) -> Iterator[ListBatch]:
        """Read all lists, in the order of user ids."""
        for number in range(self._parts):
            part = self._part(number)
            if part is None:
                raise Conflict(f"{self._folder / str(number)} was changed while it was needed")
            yield part

    def remove(self) -> None:
        """Delete the folder durably, since the output is complete."""
        shutil.rmtree(self._folder)
        durable_files.sync_directory(self._folder.parent)

    def _count(self, part: ListBatch) -> None:
        self._parts += 1
        self.users += len(part.lists)
        self.last = part.lists[-1].user_id
        self.recalls += part.recalls

    def _part(self, number: int) -> ListBatch | None:
        part = self._read(str(number))
        return part and ListBatch([UserList(*row) for row in part[0]], part[1])

    def _write(self, name: str, content: Any) -> None:
        data = orjson.dumps(content)
        with durable_files.open_replacement(self._folder / name) as file:
            file.write(b"%08x\n" % crc32(data) + data)

    def _read(self, name: str) -> Any:
        """Return the content of a file; None without one, or where it is damaged."""
        try:
            checksum, _, data = (self._folder / name).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return orjson.loads(data) if checksum == b"%08x" % crc32(data) else None


@contextmanager
def open_parts(folder: Path, run: ListRun, *, restart: bool = False) -> Iterator[ListParts]:
    """Yield the lists of the run that an earlier process began, or those of a new one.

    The folder is created when it is missing, and stays when the block ends, unless it was removed.
    Raises `Conflict` if another process is computing these lists, and `StoreFull`.
    """
    descriptor = _lock(folder)
    try:
        yield ListParts(folder, run, restart=restart)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    if folder.is_file():  # of an earlier version
        folder.unlink()
    while True:
        folder.mkdir(durable_files.PRIVATE_DIRECTORY, exist_ok=True)
        durable_files.sync_directory(folder.parent)
        descriptor = durable_files.try_lock(folder, directory=True)
        if descriptor is None:
            raise Conflict(f"another process is computing these lists: it has {folder} open")
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its owner removed it in between


# -------------------------------------------------------------------------------- the run


class Listed(NamedTuple):
    """Counts of what was written."""

    users: int
    rows: int
    computed: int  # users whose lists this run has computed; others are of a run that it continued
    seconds: float  # without loading
    model_version: str
    sampled: int  # users of a sample for whom not every item was scored
    recall: float  # of their lists against those of scoring every item; nan without any


async def write_lists(
    settings: Settings,
    path: Path,
    question: RecommendIn,
    *,
    progress: ProgressCallback,
    writing: ProgressCallback,
    announce: Callable[[str], object],
    shard: ListShard = WHOLE,
    restart: bool = False,
) -> Listed:
    """Write what the service would recommend to each user of a store, by user id and rank.

    All lists come from one model and one state of the catalogue, those of the beginning; the events
    of a user are read when the user's turn comes. The file appears at the end, whole and durable.
    If not every item is scored, a random sample of users is answered once more by scoring all,
    which gives the recall.

    Lists go to the folder `PATH.progress` first. A run that is stopped leaves it, and the next one
    of the same model, store, query and shard continues behind its last whole part, at the time of
    the first. Any other run discards it.

    Args:
        path: of the file, whose suffix says its format.
        question: what to recommend to each user in turn, unfiltered and unsteered. All requests
            have its time, or that of the beginning.
        progress: called with how many users are done, of how many.
        writing: called in the same way while the file is written, when all users are done.
        announce: called with a sentence where an earlier run is continued or discarded.
        restart: discard an earlier run in any case.

    Raises `Conflict` if another process is computing these lists, and what `compose`,
    `LiveSnapshot.open` and `service.datasets.tables.open_table` raise.
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
        with open_parts(path.with_name(f"{path.name}.progress"), run, restart=restart) as lists:
            user_ids = await asyncio.to_thread(shard.users, parts.store)
            rest = user_ids if lists.last is None else user_ids[bisect(user_ids, lists.last) :]
            _announce(announce, lists, len(rest), run.catalogue_version)
            started = time.monotonic()
            sample = random.Random(0).sample(user_ids, min(_SAMPLE, len(user_ids)))
            await _compute(parts, question, lists, rest, frozenset(sample), progress)
            metadata = {"heed.model_version": version, "heed.at": to_rfc3339(lists.run.at)}
            if shard != WHOLE:
                metadata["heed.shard"] = str(shard)
            users, rows = await _write_table(path, lists, parts.store, shard, metadata, writing)
            lists.remove()
    finally:
        await parts.close()
    recalls = lists.recalls
    return Listed(
        users=users,
        rows=rows,
        computed=len(rest),
        seconds=time.monotonic() - started,
        model_version=version,
        sampled=len(recalls),
        recall=sum(recalls) / len(recalls) if recalls else math.nan,
    )


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


def _announce(
    announce: Callable[[str], object], lists: ListParts, rest: int, catalogue_version: int
) -> None:
    """Say whether an earlier run is continued or discarded."""
    if lists.differences:
        others = " and of another ".join(lists.differences)
        announce(f"Starting again: the interrupted run was of another {others}.")
    elif lists.users:
        announce(
            f"Continuing the interrupted run: {lists.users:,} of {lists.users + rest:,} users are "
            f"done, as of {to_rfc3339(lists.run.at)}."
        )
        if lists.run.catalogue_version != catalogue_version:
            announce("The catalogue has changed since, and their lists are of the earlier one.")


async def _compute(
    parts: Parts,
    question: RecommendIn,
    lists: ListParts,
    user_ids: Sequence[str],
    sample: Set[str],
    progress: ProgressCallback,
) -> None:
    """Append the lists of users, in order."""
    snapshot, at = parts.live.snapshot, lists.run.at
    allowed = snapshot.catalogue.servable

    def rank(user: UserMemory, events: EventColumns, options: AttentionOptions) -> Ranked:
        seen = events.items if question.exclude_seen else np.zeros(0, np.int64)
        return recommend(
            snapshot,
            user,
            limit=question.limit,
            allowed=allowed,
            excluded=seen[seen < len(allowed)],
            options=options,
        )

    def batch(histories: Mapping[str, EventColumns]) -> ListBatch:
        done, options = ListBatch([], []), question.options(parts.settings)
        for user_id, events in histories.items():
            with parts.memories.memory(snapshot, events, options, now=at) as user:
                ranked = rank(user, events, options)
                item_ids = snapshot.catalogue.vocabulary.ids_of(ranked.rows.tolist())
                scores = ranked.scores.total.tolist()
                done.lists.append(UserList(user_id, [*item_ids], scores))
                if user_id in sample and not ranked.is_whole:
                    best = rank(user, events, replace(options, mode="exact")).rows
                    done.recalls.append(float(np.isin(best, ranked.rows).mean()))
        return done

    total, part = lists.users + len(user_ids), ListBatch([], [])
    progress(lists.users, total)
    async for done in _in_order(parts, user_ids, question.at, at, batch):
        part.lists.extend(done.lists)
        part.recalls.extend(done.recalls)
        if len(part.lists) >= _PART:
            lists.append(part)
            part = ListBatch([], [])
        progress(lists.users + len(part.lists), total)
    if part.lists:
        lists.append(part)


async def _in_order(
    parts: Parts,
    user_ids: Sequence[str],
    asked: int | None,
    at: int,
    compute: Callable[[Mapping[str, EventColumns]], ListBatch],
) -> AsyncIterator[ListBatch]:
    """The lists of a few users at a time, in order.

    While each thread computes two batches, the events of the next are read.
    """
    loop = asyncio.get_running_loop()
    begun: deque[asyncio.Future[ListBatch]] = deque()
    for batch in batches(user_ids, _BATCH):
        events = {user_id: await parts.memories.load(user_id, asked, now=at) for user_id in batch}
        begun.append(loop.run_in_executor(parts.executor, compute, events))
        if len(begun) > 2 * (os.cpu_count() or 1):
            yield await begun.popleft()
    for work in begun:
        yield await work


async def _write_table(
    path: Path,
    lists: ListParts,
    store: Store,
    shard: ListShard,
    metadata: Mapping[str, str],
    progress: ProgressCallback,
) -> tuple[int, int]:
    """Write the lists to a file, and return the numbers of users and of rows in it.

    A user who was forgotten since the run began has no list, not even one who came back: it may be
    of what was forgotten.
    """
    users = frozenset(await asyncio.to_thread(shard.users, store))
    was_forgotten = await _forgotten_since(store, lists.run.begun)
    written = rows = done = 0
    with open_table(path, _COLUMNS, metadata) as write:
        waiting: list[tuple[str, int, str, float]] = []
        for part in lists.parts():
            for user_id, item_ids, scores in part.lists:
                if user_id not in users or was_forgotten(user_id):
                    continue
                listed = zip(item_ids, scores, strict=True)
                waiting += [(user_id, rank, *item) for rank, item in enumerate(listed, 1)]
                written, rows = written + 1, rows + len(item_ids)
                if len(waiting) >= _ROWS:
                    write(waiting)
                    waiting = []
            done += len(part.lists)
            progress(done, lists.users)
            await asyncio.sleep(0)  # an interrupted command is cancelled here
        if waiting:
            write(waiting)
    return written, rows


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
