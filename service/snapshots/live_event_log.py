"""The event log in RAM, kept up with the store."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.data.event_log import EventLog, LoggedEvents
from models.data.vocabulary import Vocabulary
from service.domain.records import DISLIKE
from service.stores.base import Store
from service.stores.protocols.event_log_store import LogChanges

_log = logging.getLogger(__name__)

_BATCH = 200_000  # events that are read at once, about


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEventLog:
    """The log as far as a process has read it; forked processes start from it and share it."""

    version: int = 0  # of the store
    log: EventLog = field(default_factory=EventLog)
    types: Vocabulary = field(default_factory=Vocabulary)  # of event types, by their codes
    known: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[users] the last seq of each user's events, by the user's number."""


class LiveEventLog:
    """Follows the event log of a store: what was acknowledged before `current` is in its answer.

    Args:
        store: is followed, whichever process writes to it.
        items: gives items their rows.
        executor: where long changes are sorted in.
        loaded: state to start from, in a forked process.
    """

    def __init__(
        self,
        store: Store,
        items: Vocabulary,
        executor: Executor,
        *,
        loaded: LoadedEventLog | None = None,
    ) -> None:
        self._store = store
        self._items = items
        self._executor = executor
        self.loaded = LoadedEventLog() if loaded is None else loaded
        self.load_seconds = 0.0  # that reading took, of this process
        self._batch: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[EventLog] | None = None

    async def current(self) -> EventLog:
        """Return the log with every acknowledged change.

        A change is read once, by whichever request comes first; others wait for the same reading.
        """
        version = await self._store.clock()
        while self.loaded.version < version:
            if self._batch is None or self._batch.done():
                self._batch = asyncio.create_task(self._take_over())
            # It goes on when a request runs out of time: the next one finds more of it read.
            await asyncio.shield(self._batch)
        return self.loaded.log

    def begin(self) -> None:
        """Begin to read the log, which the first request would wait for otherwise."""
        self._loading = asyncio.create_task(self.current())
        self._loading.add_done_callback(_log_failure)

    def type_codes(self, names: frozenset[str] | None) -> NDArray[np.int32]:
        """Return the codes of event types that the log has; None means all but dislikes."""
        known = self.loaded.types.ids
        return np.array(
            [
                code
                for code, name in enumerate(known)
                if (name != DISLIKE if names is None else name in names)
            ],
            np.int32,
        )

    def close(self) -> None:
        """Abandon the reading in progress."""
        for task in (self._loading, self._batch):
            if task is not None:
                task.cancel()

    async def _take_over(self) -> None:
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
    if not task.cancelled() and task.exception() is not None:
        _log.error("the event log was not read", exc_info=task.exception())
