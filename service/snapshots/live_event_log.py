"""The event log in RAM, kept up with the store."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import orjson
from numpy.typing import NDArray

from models.data.event_log import EventLog, LoggedEvents
from models.data.vocabulary import Vocabulary
from service.domain.errors import StoreUnreachable
from service.domain.records import NEGATIVE
from service.runtime.logs import log_failure
from service.runtime.workers import SharedArrays
from service.stores.base import Store
from service.stores.values import LogChanges

_log = logging.getLogger(__name__)

_BATCH = 200_000  # events that are read at once, about
_WAIT = 0.05  # seconds between two looks for the log that another process is reading
_FIRST = 0.3  # seconds for the first answers, before the log is read beside them


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEventLog:
    """The log as far as a process has read it."""

    version: int = 0  # of the store
    log: EventLog = field(default_factory=EventLog)
    types: Vocabulary = field(default_factory=Vocabulary)  # of event types, by their codes
    known: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[users] the last seq of each user's events, by the user's number."""


class LiveEventLog:
    """Follows the event log of a store: what was acknowledged before `current` is in its answer.

    If the store cannot be reached, the answer is what was read before, and is marked as stale.

    The first of several processes reads the log into memory that the others map. A process that
    dies meanwhile is succeeded by another, and each follows the store from then on. `shared` takes
    the log for processes that were forked with equal `items`; else this process reads alone.
    """

    def __init__(
        self,
        store: Store,
        items: Vocabulary,
        executor: Executor,
        *,
        shared: SharedArrays | None = None,
    ) -> None:
        self._store = store
        self._items = items
        self._executor = executor
        self.loaded = LoadedEventLog()
        self.is_stale = False  # the store did not answer: it may have more by now
        self.load_seconds = 0.0  # that reading took, of this process
        self._shared = shared
        self._common = len(items)  # rows that are the same in all processes that share the log
        self._joining: asyncio.Task[None] | None = None
        self._batch: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[EventLog] | None = None

    async def current(self) -> EventLog:
        """Return the log with every acknowledged change.

        A change is read once, by whichever request comes first; others wait for the same reading.
        """
        while self._shared is not None:
            if self._joining is None or self._joining.done():
                self._joining = asyncio.create_task(self._join(self._shared))
            await asyncio.shield(self._joining)
        return await self._followed()

    async def _followed(self) -> EventLog:
        try:
            version = await self._store.clock()
            while self.loaded.version < version:
                if self._batch is None or self._batch.done():
                    self._batch = asyncio.create_task(self._read_batch())
                # It goes on when a request runs out of time: the next one finds more of it read.
                await asyncio.shield(self._batch)
        except StoreUnreachable:
            if not self.loaded.version:
                raise
            self.is_stale = True
        else:
            self.is_stale = False
        return self.loaded.log

    def begin(self) -> None:
        """Read the log soon, unless a request asks for it before."""
        self._loading = asyncio.create_task(self._load())
        self._loading.add_done_callback(_log_failure)

    def type_codes(self, names: frozenset[str] | None) -> NDArray[np.int32]:
        """Return the codes of event types that the log has; None means all but negative ones."""
        is_counted = [
            name not in NEGATIVE if names is None else name in names
            for name in self.loaded.types.ids
        ]
        return np.flatnonzero(is_counted).astype(np.int32)

    def close(self) -> None:
        for task in (self._loading, self._joining, self._batch):
            if task is not None:
                task.cancel()

    async def _load(self) -> EventLog:
        await asyncio.sleep(_FIRST)
        return await self.current()

    async def _join(self, shared: SharedArrays) -> None:
        """Start from the log that another process read, or read it for all of them."""
        run = asyncio.get_running_loop().run_in_executor
        while not shared.is_published:
            if not shared.claim():
                await asyncio.sleep(_WAIT)
                continue
            try:
                await self._followed()
                await run(self._executor, self._publish, shared)
            finally:
                shared.release()
        # Also by the one that read it, whose own copy is freed.
        self.loaded = await run(self._executor, self._published, shared)
        self._shared = None

    def _publish(self, shared: SharedArrays) -> None:
        arrays, loaded = self.loaded.log.to_arrays(), self.loaded
        highest = int(arrays["items"].max(initial=-1))
        rest = {
            "version": loaded.version,
            "types": list(loaded.types.ids),
            "item_ids": list(self._items.ids[self._common : highest + 1]),
        }
        arrays |= {"known": loaded.known, "rest": np.frombuffer(orjson.dumps(rest), np.uint8)}
        shared.publish(arrays)

    def _published(self, shared: SharedArrays) -> LoadedEventLog:
        arrays = shared.arrays()
        rest = orjson.loads(arrays["rest"].tobytes())
        added = [self._items.add(item_id) for item_id in rest["item_ids"]]
        rows = np.concatenate([np.arange(self._common), added]).astype(np.int32)
        is_same = np.array_equal(rows, np.arange(len(rows)))
        log = EventLog.from_arrays(arrays, None if is_same else rows)
        types = Vocabulary(rest["types"])
        return LoadedEventLog(rest["version"], log, types, arrays["known"])

    async def _read_batch(self) -> None:
        before, started = self.loaded, time.monotonic()
        changes = await self._store.log_changes(before.version, before.known, _BATCH)
        loop = asyncio.get_running_loop()
        self.loaded = await loop.run_in_executor(self._executor, self._applied, before, changes)
        self.load_seconds += time.monotonic() - started

    def _applied(self, before: LoadedEventLog, changes: LogChanges) -> LoadedEventLog:
        events, types = changes.events, before.types
        if not len(events) and not len(changes.rewritten):
            return LoadedEventLog(changes.version, before.log, types, before.known)
        item_rows = np.array([self._items.add(id_) for id_ in events.item_ids], np.int32)
        type_codes = np.array([types.add(name) for name in events.type_names], np.int32)
        new = LoggedEvents(
            events.users,
            item_rows[events.items] if len(events) else events.items,
            type_codes[events.types] if len(events) else type_codes,
            events.timestamps,
            events.weights,
        )
        highest = max(len(before.known) - 1, int(events.users.max(initial=0)))
        known = np.zeros(highest + 1, np.int64)
        known[: len(before.known)] = before.known
        known[changes.rewritten] = 0
        np.maximum.at(known, events.users, changes.seqs)
        log = before.log.changed(changes.rewritten, new)
        return LoadedEventLog(changes.version, log, types, known)


def _log_failure(task: asyncio.Task[EventLog]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log_failure(_log, "the event log was not read; the next question reads it", error)
