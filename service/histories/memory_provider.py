"""The memory that a request attends to: loaded, assembled, computed, and kept for the next.

Lists of long histories are built on a thread beside requests.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from cachetools import LRUCache

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import holding
from models.data.vocabulary import Vocabulary
from models.encoder.event_bias import bucket_margins
from models.history.long_history import CollapsedHistory, collapsible_prefix, leaves_enough
from models.history.user_history import UserHistory
from models.history.user_memory import UserMemory, build_memory
from models.recommender.recommender import Recommender
from service.domain.errors import StoreUnreachable
from service.domain.settings import Settings
from service.histories.event_columns import (
    EMPTY,
    EventColumns,
    EventReader,
    assemble_history,
    up_to,
    with_session,
)
from service.questions.asked import InlineEventIn
from service.questions.parts import ALL_EVENTS, VisibleIn
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.base import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DerivedState:
    """State that a model derived from a user's events: all of it can be computed again.

    Each part has its own validity. The encoded states in `memory` serve any history that begins
    with the events they were computed from, under the same model. `collapsed` serves a history of
    the same epoch, as far as `CollapsedHistory.rebind` accepts the snapshot. `history` and `memory`
    serve the events they were made for, by any snapshot of the model that has the same tables of
    their items, and `memory` only while every age stays in its bucket: time enters a memory only
    through buckets of ages (`models.encoder.event_bias`).
    """

    events: EventColumns
    step: int  # last step of the item tables
    written: int  # `last_written` for the items of the events and the profile
    history: UserHistory
    memory: UserMemory
    collapsed: CollapsedHistory | None = None
    is_plain: bool = True  # False: older events of `memory` were not collapsed, if they could be
    since: int = field(init=False, default=0)  # microseconds UTC: `memory` serves from then on
    until: int = field(init=False, default=0)  # and before then
    nbytes: int = field(init=False, default=0)  # held beside the events, when this was made

    def __post_init__(self) -> None:
        memory = self.memory
        size = self.history.types.nbytes + memory.nbytes
        size += self.history.weights.nbytes if self.events.weights is None else 0
        size += 0 if self.collapsed is None else self.collapsed.nbytes
        younger, older = bucket_margins(memory.at - memory.history.timestamps)
        for name, value in (
            ("since", memory.at - younger),
            ("until", memory.at + older),
            ("nbytes", size),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        events: EventColumns,
        history: UserHistory,
        user: UserMemory,
        *,
        collapsed: CollapsedHistory | None = None,
        is_plain: bool = True,
    ) -> DerivedState:
        """Return the state that holds a memory made from a user's events by a snapshot."""
        step, written = snapshot.cow_tables.step, _last_written(snapshot, events)
        return cls(events, step, written, history, user, collapsed=collapsed, is_plain=is_plain)

    def serves(self, events: EventColumns, snapshot: Snapshot) -> bool:
        """Report whether this was derived from the same events and the same tables of their items.

        `snapshot` is of the same model.
        """
        if (self.events.version, self.events.epoch) != (events.version, events.epoch):
            return False
        is_same = self.step == snapshot.cow_tables.step
        return is_same or self.written == _last_written(snapshot, events)

    def memory_at(self, at: int, *, collapsed: bool = False) -> UserMemory | None:
        """The memory, where it is that of a request's time too, microseconds UTC.

        Its older events may be collapsed or not; where they are, the caller must hold their lock.
        """
        memory, older = self.memory, self.memory.collapsed
        if not self.since <= at < self.until or (older is not None) != collapsed:
            return None
        if older is None:
            return memory
        if older.count != memory.collapsed_count:
            return None
        older.advance_to(memory.at)
        return replace(memory, at=at) if older.advance_to(at) else memory


class UserCache:
    """Events and derived state of users, by user id, in at most `max_bytes`.

    Any entry may be dropped at any time without changing an answer. Either kind may use what the
    other leaves free; when the cache is full, the kind that holds more bytes drops its least
    recently used entries. Half of the budget is therefore safe for events: the memories of a few
    users, of some 600 bytes an event, cannot displace the events of many, of 20 bytes each.
    Derived state goes before its user's events, or with them.

    The lock is held only for bookkeeping; all entries are immutable but `CollapsedHistory`, which
    has a lock of its own.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._events: LRUCache[str, EventColumns] = LRUCache(max_bytes, attrgetter("nbytes"))
        self._derived: LRUCache[str, DerivedState] = LRUCache(max_bytes, attrgetter("nbytes"))
        self._model: Recommender | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._events.currsize + self._derived.currsize)

    def resize(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` from now on, of at most those it was made for."""
        with self._lock:
            self._max_bytes = max_bytes
            self._make_room(0, for_events=True)

    def stats(self) -> dict[str, float]:
        """Users and bytes held, those of derived state apart."""
        with self._lock:
            long = sum(state.collapsed is not None for state in self._derived.values())
            return {
                "cached_histories": len(self._events),
                "cached_history_bytes": self.nbytes,
                "cached_memories": len(self._derived),
                "cached_memory_bytes": self._derived.currsize,
                "long_histories": long,
            }

    def events(self, user_id: str) -> EventColumns | None:
        """The events of a user, at whatever version they were put."""
        with self._lock:
            return self._events.get(user_id)

    def put_events(self, events: EventColumns) -> None:
        """Keep a user's events in place of earlier ones."""
        with self._lock:
            self._events.pop(events.user_id, None)
            if self._make_room(events.nbytes, for_events=True):
                self._events[events.user_id] = events

    def derived(self, user_id: str, snapshot: Snapshot) -> DerivedState | None:
        """The state derived from a user's events by a snapshot's model.

        A model other than the last one's drops all derived state.
        """
        with self._lock:
            if self._model is not snapshot.model:
                self._model = snapshot.model
                self._derived.clear()
            return self._derived.get(user_id)

    def put_derived(self, snapshot: Snapshot, derived: DerivedState) -> bool:
        """Keep derived state in place of earlier; False where it has no room or another model."""
        user_id = derived.events.user_id
        with self._lock:
            if self._model is not snapshot.model:
                return False
            self._derived.pop(user_id, None)
            if not self._make_room(derived.nbytes, for_events=False):
                return False
            self._derived[user_id] = derived
            return True

    def user_ids(self) -> list[str]:
        """Return the users with anything in the cache."""
        with self._lock:
            return [*self._events.keys() | self._derived.keys()]

    def drop(self, user_id: str) -> None:
        """Drop what is kept of a user."""
        with self._lock:
            self._events.pop(user_id, None)
            self._derived.pop(user_id, None)

    def remeasure(self, user_id: str) -> None:
        """Account for what a user's collapsed history and indexes have grown by."""
        with self._lock:
            derived = self._derived.pop(user_id, None)
            if derived is not None:
                derived = replace(derived)
                if self._make_room(derived.nbytes, for_events=False):
                    self._derived[user_id] = derived

    def _make_room(self, nbytes: int, *, for_events: bool) -> bool:
        """Evict until `nbytes` are free; False, without evicting, if they never can be."""
        share = self._max_bytes // 2
        claimed = 0 if for_events else min(int(self._events.currsize), share)
        if nbytes > self._max_bytes - claimed:
            return False
        while self.nbytes + nbytes > self._max_bytes:
            events, derived = self._events.currsize, self._derived.currsize
            if for_events:
                takes_events = events + nbytes > derived
            else:
                takes_events = events > max(share, derived + nbytes)
            if self._events and (takes_events or not self._derived):
                user_id, _ = self._events.popitem()
                self._derived.pop(user_id, None)
            else:
                self._derived.popitem()
        return True


def _last_written(snapshot: Snapshot, events: EventColumns) -> int:
    """Return the last step that wrote an item of a user's events or profile."""
    profile = snapshot.catalogue.rows(events.interests)  # an interest may name an item by now
    return snapshot.last_written(np.concatenate([events.rows, profile]))


class ListBuilder:
    """Builds lists of long histories, without which every item is attended, on one thread."""

    def __init__(self) -> None:
        self._building: set[str] = set()
        self._worker = ThreadPoolExecutor(
            1, "heed-long-histories", initializer=torch.set_num_threads, initargs=(1,)
        )

    @property
    def pending(self) -> int:
        """Number of users whose lists are being built or waited for."""
        return len(self._building)

    def build(
        self,
        user_id: str,
        snapshot: Snapshot,
        collapsed: CollapsedHistory,
        on_built: Callable[[str], object],
    ) -> None:
        """Build the lists of a user's history, unless that is under way, and call `on_built`."""

        def work() -> None:
            try:
                collapsed.build_lists(snapshot)
                on_built(user_id)
            except Exception:  # noqa: BLE001 - no request waits for it
                _log.exception("lists of a history were not built; answers do not depend on them")
            finally:
                self._building.discard(user_id)

        if user_id not in self._building:
            self._building.add(user_id)
            self._worker.submit(work)

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)


_COUNTED = "history_hits", "history_misses", "history_stale", "memory_hits", "memory_misses"
Compute = Callable[[Callable[[], EventColumns]], Awaitable[EventColumns]]

LONG = 4_096  # events: fewer are attended one by one in less time than collapsing them takes


class MemoryProvider:
    """Provides requesters' memories, never older than the store while the store answers.

    A write that was acknowledged before `load` is in what it gives, whichever process wrote it.
    If the store cannot be reached, it gives what was known of the user, and marks it as stale.
    One cache of users (`UserCache`) is kept between requests; any of it may be dropped at
    any time without changing an answer.
    """

    def __init__(
        self, store: Store, vocabulary: Vocabulary, embeddings: EmbeddingCache, settings: Settings
    ) -> None:
        self._lists = ListBuilder()
        self._settings = settings
        self._store = store
        self._reader = EventReader(store, vocabulary)
        self._vocabulary = vocabulary
        self._embeddings = embeddings
        self._cache = UserCache(settings.history_cache_bytes)
        self._forgotten = 0  # entries of the ledger when the cache was last compared with it
        self._counts = Counter[str]()

    async def load(
        self,
        user_id: str | None,
        at: int | None = None,
        *,
        now: int,
        session: Sequence[InlineEventIn] = (),
        compute: Compute | None = None,
    ) -> EventColumns:
        """Load the stored events of a user and merge those of a session into them.

        Args:
            user_id: None for a session without a user.
            at: the time after which events are left out, microseconds UTC. Without one, events
                count that are later by the clock of another machine.
            now: the time of session events without a time.
            session: events that are not stored.
            compute: merges them.
        """
        events = EMPTY
        if user_id is not None:
            events = await self._stored(user_id)
        is_stale = events.is_stale
        if session:
            merge = partial(with_session, events, session, now, self._vocabulary)
            events = merge() if compute is None else await compute(merge)
        if at is not None:
            events = up_to(events, at)
        if is_stale:
            return replace(events, is_stale=True)
        return events if len(events) or events.interests else EMPTY

    async def seen(
        self, user_id: str | None, at: int | None, session: Sequence[InlineEventIn]
    ) -> Sequence[str]:
        """Return the items of the events that `load` gives."""
        now = time.time_ns() // 1_000 if at is None else at
        events = await self.load(user_id, at, now=now, session=session)
        return self._vocabulary.ids_of(events.items.tolist())

    def history(
        self, snapshot: Snapshot, events: EventColumns, visible: VisibleIn = ALL_EVENTS
    ) -> UserHistory:
        """Return what is attended, event by event."""
        return assemble_history(snapshot, events, visible, self._embeddings)

    @contextmanager
    def memory(
        self,
        snapshot: Snapshot,
        events: EventColumns,
        options: AttentionOptions,
        *,
        now: int,
        visible: VisibleIn = ALL_EVENTS,
    ) -> Iterator[UserMemory]:
        """Yield the memory of `events`, from `load`, as it is until the block ends."""
        if events is not EMPTY and (events.version == 0 or visible != ALL_EVENTS):
            yield build_memory(snapshot, self.history(snapshot, events, visible), now)
            return
        known = self._cache.derived(events.user_id, snapshot)
        current = known if known is not None and known.serves(events, snapshot) else None
        # A collapsed history holds sums of exponentials at temperature 1.
        plain = options.temperature == 1 and not options.hard
        may_collapse = len(events) >= LONG and plain
        with ExitStack() as held:
            if current is not None:
                is_long = may_collapse and (current.collapsed is not None or not current.is_plain)
                is_bound = True
                if is_long and current.collapsed is not None:
                    held.enter_context(holding(current.collapsed.lock))
                    is_bound = current.collapsed.rebind(snapshot)
                memory = current.memory_at(now, collapsed=is_long) if is_bound else None
                if memory is not None:
                    self._counts["memory_hits"] += 1
                    step = snapshot.cow_tables.step
                    if memory is not current.memory or current.step != step:
                        renewed = replace(current, memory=memory, step=step)
                        self._cache.put_derived(snapshot, renewed)
                    yield memory
                    self._account(options, events.user_id)
                    return
            self._counts["memory_misses"] += 1
            if current is not None:
                history = current.history
            else:
                history = assemble_history(snapshot, events, ALL_EVENTS, self._embeddings)
            same_epoch = known is not None and known.events.epoch == events.epoch
            collapsed = known.collapsed if known is not None and same_epoch else None
            older = None
            if may_collapse and not history.vectors:
                older = _collapse(snapshot, history, collapsed, now, held)
            encoded = None if known is None else known.memory.encoded
            user = build_memory(snapshot, history, now, encoded=encoded, collapsed=older)
            state = DerivedState.of(
                snapshot,
                events,
                history,
                user,
                collapsed=collapsed if older is None else older,
                is_plain=plain,
            )
            is_kept = self._cache.put_derived(snapshot, state)
            if is_kept and older is not None and older.needs_lists:
                self._lists.build(events.user_id, snapshot, older, self._cache.remeasure)
            yield user
            self._account(options, events.user_id)

    def _account(self, options: AttentionOptions, user_id: str) -> None:
        """Account for FAISS's indexes, which a coarse question may have built."""
        if options.mode == "coarse":
            self._cache.remeasure(user_id)

    @property
    def cached_bytes(self) -> int:
        """Bytes that are kept of users."""
        return self._cache.nbytes

    def resize_cache(self, max_bytes: int) -> None:
        """Keep at most `max_bytes` of users, of at most those in the settings."""
        self._cache.resize(max_bytes)

    async def drop_forgotten(self) -> None:
        """Drop forgotten users from memory, whichever process forgot them. Call it now and then.

        No answer depends on it: a request compares versions with the store.
        """
        forgotten = await self._store.count_forgotten(0)
        if forgotten == self._forgotten:
            return
        for user_id in self._cache.user_ids():
            # The empty id is that of sessions, which nothing stores.
            if user_id and not await self._store.version(user_id):
                self._cache.drop(user_id)
        self._embeddings.query.cache_clear()  # texts of interests
        self._forgotten = forgotten

    def stats(self) -> Mapping[str, float]:
        """Sizes and hits of the cache."""
        return {
            **self._cache.stats(),
            "long_histories_waiting_for_lists": self._lists.pending,
            **{name: self._counts[name] for name in _COUNTED},
        }

    def close(self) -> None:
        """Stop the work beside requests."""
        self._lists.close()

    async def _stored(self, user_id: str) -> EventColumns:
        """The stored events of a user as of now; without any for an unknown user."""
        # The request may be out of time before a very long history is read: it is kept then all
        # the same, and the next request finds it.
        return await asyncio.shield(asyncio.ensure_future(self._read(user_id)))

    async def _read(self, user_id: str) -> EventColumns:
        known = self._cache.events(user_id)
        try:
            events = await self._reader.read(user_id, known)
        except StoreUnreachable:
            self._counts["history_stale"] += 1
            return replace(known or EMPTY, is_stale=True)
        if events is known:
            self._counts["history_hits"] += 1
            return known
        self._counts["history_misses"] += 1
        if events.version:  # an unknown user costs the store nothing to read again
            self._cache.put_events(events)
        return events


def _collapse(
    snapshot: Snapshot,
    history: UserHistory,
    known: CollapsedHistory | None,
    at: int,
    held: ExitStack,
) -> CollapsedHistory | None:
    """Collapse the older events of a history, or extend `known` to them, of the same epoch.

    `held` keeps the lock, since other requests may extend them. None where one has, beyond
    the events of this history, and where none can be collapsed.
    """
    count = collapsible_prefix(snapshot, history)
    if known is not None:
        held.enter_context(holding(known.lock))
        if known.rebind(snapshot):
            if known.count > len(history.rows):
                return None
            # After items were deleted, the newest events that are left may be too few.
            if known.count <= count or leaves_enough(snapshot, history, known.count):
                known.extend(snapshot, history, count, at)
                return known
    if not count:
        return None
    collapsed = CollapsedHistory(snapshot, history, count, at)
    held.enter_context(collapsed.lock)
    return collapsed
