"""Cache of users' events and of what the model computed from them, in one budget in bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
from cachetools import LRUCache

from models.catalogue.snapshot import Snapshot
from models.encoder.event_bias import bucket_margins
from models.history.long_history import CollapsedHistory
from models.history.user_history import UserHistory
from models.history.user_memory import EncodedHistory, UserMemory
from models.recommender.recommender import Recommender
from service.histories.event_columns import EventColumns


@dataclass(frozen=True, slots=True, eq=False)
class DerivedState:
    """State that a model derived from a user's events: all of it can be computed again.

    Each part has its own validity. `encoded` serves any history that begins with the events it was
    computed from, under the same model. `collapsed` serves a history of the same epoch, as far as
    `CollapsedHistory.rebind` accepts the snapshot. `history` and `memory` serve the events they
    were made for, by any snapshot of the model that has the same tables of their items, and
    `memory` only while every age stays in its bucket: time enters a memory through buckets of ages
    alone (`models.encoder.event_bias`).
    """

    events: EventColumns
    step: int  # last step of the item tables
    written: int  # `last_written` for the items of the events and the profile
    history: UserHistory
    encoded: EncodedHistory | None
    collapsed: CollapsedHistory | None = None
    memory: UserMemory | None = None
    is_plain: bool = True  # False: older events of `memory` were not collapsed, if they could be
    since: int = field(init=False, default=0)  # microseconds UTC: `memory` serves from then on
    until: int = field(init=False, default=0)  # and before then
    nbytes: int = field(init=False, default=0)  # held beside the events, when this was made

    def __post_init__(self) -> None:
        size = self.history.types.nbytes
        size += self.history.weights.nbytes if self.events.weights is None else 0
        size += 0 if self.collapsed is None else self.collapsed.nbytes
        if self.memory is not None:
            size += self.memory.nbytes  # `encoded` among them
            younger, older = bucket_margins(self.memory.at - self.memory.history.timestamps)
            object.__setattr__(self, "since", self.memory.at - younger)
            object.__setattr__(self, "until", self.memory.at + older)
        elif self.encoded is not None:
            size += self.encoded.nbytes
        object.__setattr__(self, "nbytes", size)

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
        return cls(
            events=events,
            step=step,
            written=written,
            history=history,
            encoded=user.encoded,
            collapsed=collapsed,
            memory=user,
            is_plain=is_plain,
        )

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
        memory = self.memory if self.since <= at < self.until else None
        if memory is None or (memory.collapsed is not None) != collapsed:
            return None
        older = memory.collapsed
        if older is None:
            return memory
        if older.count != memory.collapsed_count:
            return None
        older.advance_to(memory.at)
        return replace(memory, at=at) if older.advance_to(at) else memory


class UserCache:
    """Events and derived state of users, by user id, in at most `max_bytes`.

    Any entry may be dropped at any time without changing an answer. Either
    kind may use what the other leaves free; when the cache is full, the kind that holds more bytes
    drops its least recently used entries. Half of the budget is therefore safe for
    events: the memories of a few users, of some 600 bytes an event, cannot displace the events of
    many, of 20 bytes each. Derived state goes before its user's events, or with them.

    The lock is held for bookkeeping alone; all entries are immutable but `CollapsedHistory`, which
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
        """Return the users of whom anything is kept."""
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
