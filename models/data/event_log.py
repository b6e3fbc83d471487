"""The event log in RAM: columns by time, with indexes by item and by user, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.data.vocabulary import expand_ranges

_MIN_RECENT = 4_096  # events that stand beside the sorted ones, at least
_RECENT_SHARE = 16  # and one in this many of those


class LoggedEvents(NamedTuple):
    """Events as columns, 24 bytes each."""

    users: NDArray[np.int32]  # [n] numbers of users
    items: NDArray[np.int32]  # [n] item rows
    types: NDArray[np.int32]  # [n] codes of event types
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n]

    def take(self, which: NDArray[Any] | slice) -> LoggedEvents:
        """Return some of the events, by a mask [n], their places or a slice."""
        users, items, types, timestamps, weights = self
        return LoggedEvents(
            users[which], items[which], types[which], timestamps[which], weights[which]
        )


NO_EVENTS = LoggedEvents(
    np.zeros(0, np.int32),
    np.zeros(0, np.int32),
    np.zeros(0, np.int32),
    np.zeros(0, np.int64),
    np.zeros(0, np.float32),
)


class EventLog:
    """One version of the event log; `changed` returns the next one.

    Most events are sorted by time, and indexed by item and by user on demand. Recent ones stand
    beside them until there are enough to sort in, so that a change costs no more than its length.
    Answers have their events in no order.
    """

    def __init__(
        self,
        indexed: _IndexedEvents | None = None,
        void: NDArray[np.bool_] | None = None,
        recent: LoggedEvents = NO_EVENTS,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        self._indexed = _IndexedEvents(NO_EVENTS) if indexed is None else indexed
        self._void = void  # [n] of the indexed events: no longer in the log
        self._recent = recent
        self._sizes = sizes

    def __len__(self) -> int:
        void = 0 if self._void is None else int(np.count_nonzero(self._void))
        return len(self._indexed.events.users) - void + len(self._recent.users)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the log and its indexes, 8 bytes an event, for `from_arrays`."""
        if len(self._recent.users) or self._void is not None:
            return self._sorted().to_arrays()
        indexed = self._indexed
        return {
            **indexed.events._asdict(),
            **{f"by_item.{name}": array for name, array in indexed.by_item._asdict().items()},
            **{f"by_user.{name}": array for name, array in indexed.by_user._asdict().items()},
            "sizes": np.array(self.sizes),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], item_rows: NDArray[np.int32] | None = None
    ) -> EventLog:
        """Return a log over arrays of `to_arrays`, which it shares and never writes to.

        `item_rows` says what each item row is here; None = the same.
        """
        events = LoggedEvents(*(arrays[name] for name in LoggedEvents._fields))
        indexed = _IndexedEvents(events)
        if item_rows is not None:
            indexed = _IndexedEvents(events._replace(items=item_rows[events.items]))
        else:
            indexed.by_item = _Index(*(arrays[f"by_item.{name}"] for name in _Index._fields))
        indexed.by_user = _Index(*(arrays[f"by_user.{name}"] for name in _Index._fields))
        users, baskets = arrays["sizes"].tolist()
        return cls(indexed, sizes=(users, baskets))

    def changed(self, rewritten: NDArray[np.integer], events: LoggedEvents) -> EventLog:
        """Return the log without the events of some users, and with new events."""
        indexed, void, recent = self._indexed, self._void, self._recent
        if len(rewritten):
            recent = recent.take(~np.isin(recent.users, rewritten))
            gone = np.isin(indexed.events.users, rewritten)
            void = gone if void is None else gone | void
        recent = _concat(recent, events)
        log = EventLog(indexed, void, recent)
        if self._sizes is not None:
            # Only of users that changed: all would be too many after each event.
            changed = np.union1d(rewritten, events.users)
            before, now = log_sizes(self.of_users(changed)), log_sizes(log.of_users(changed))
            users, baskets = self._sizes
            log._sizes = users - before[0] + now[0], baskets - before[1] + now[1]
        most = max(_MIN_RECENT, len(indexed.events.users) // _RECENT_SHARE)
        beside = len(recent.users) + (0 if void is None else int(np.count_nonzero(void)))
        return log if beside <= most else log._sorted()

    def _sorted(self) -> EventLog:
        every = self.between(None, None)
        order = np.argsort(every.timestamps, kind="stable")
        return EventLog(_IndexedEvents(every.take(order)), sizes=self._sizes)

    @cached_property
    def span(self) -> tuple[int, int] | None:
        """The times of the oldest and the newest event, microseconds UTC; None without events."""
        times = self._indexed.events.timestamps
        if self._void is not None:
            times = times[~self._void]
        ends = np.concatenate([times[:1], times[-1:], self._recent.timestamps])
        return (int(ends.min()), int(ends.max())) if len(ends) else None

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of users with events, and of their baskets: distinct times of a user."""
        if self._sizes is None:
            self._sizes = log_sizes(self.between(None, None))
        return self._sizes

    def between(self, since: int | None, until: int | None) -> LoggedEvents:
        """Return the events with since < time <= until, microseconds UTC; None = no bound."""
        indexed, recent = self._indexed.events, self._recent
        first, last = 0, len(indexed.users)
        is_in = np.ones(len(recent.users), np.bool_)
        if since is not None:
            first = int(np.searchsorted(indexed.timestamps, since, side="right"))
            is_in &= recent.timestamps > since
        if until is not None:
            last = int(np.searchsorted(indexed.timestamps, until, side="right"))
            is_in &= recent.timestamps <= until
        found = indexed.take(slice(first, max(first, last)))
        if self._void is not None:
            found = found.take(~self._void[first : max(first, last)])
        return _concat(found, recent.take(is_in))

    def of_item(self, row: int) -> LoggedEvents:
        return self._of(self._indexed.by_item, "items", np.array([row]))

    def of_users(self, users: NDArray[np.integer]) -> LoggedEvents:
        """Return the events of some users, by their numbers, each given once."""
        return self._of(self._indexed.by_user, "users", users)

    def _of(self, index: _Index, column: str, wanted: NDArray[np.integer]) -> LoggedEvents:
        places = index.places(wanted)
        if self._void is not None:
            places = places[~self._void[places]]
        recent = self._recent.take(np.isin(getattr(self._recent, column), wanted))
        return _concat(self._indexed.events.take(places), recent)


class _Index(NamedTuple):
    order: NDArray[np.int32]  # [n]
    offsets: NDArray[np.int64]  # [highest + 2] in `order`, of each number

    @classmethod
    def of(cls, column: NDArray[np.int32]) -> _Index:
        counts = np.bincount(column)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return cls(np.argsort(column, kind="stable").astype(np.int32), offsets)

    def places(self, wanted: NDArray[np.integer]) -> NDArray[np.int32]:
        known = wanted[wanted < len(self.offsets) - 1]
        begins, ends = self.offsets[known], self.offsets[known + 1]
        return self.order[expand_ranges(begins, ends - begins)[1]]


class _IndexedEvents:
    """Events in the order of their times, with indexes that are made when they are asked for."""

    def __init__(self, events: LoggedEvents) -> None:
        self.events = events

    @cached_property
    def by_item(self) -> _Index:
        return _Index.of(self.events.items)

    @cached_property
    def by_user(self) -> _Index:
        return _Index.of(self.events.users)


def log_sizes(events: LoggedEvents) -> tuple[int, int]:
    """Count the users of events, and their baskets: distinct times of a user."""
    order = np.lexsort((events.timestamps, events.users))
    users, timestamps = events.users[order], events.timestamps[order]
    if not len(users):
        return 0, 0
    other_user = users[1:] != users[:-1]
    other_basket = other_user | (timestamps[1:] != timestamps[:-1])
    return 1 + int(np.count_nonzero(other_user)), 1 + int(np.count_nonzero(other_basket))


def of_types(events: LoggedEvents, types: NDArray[np.integer]) -> LoggedEvents:
    highest = max(int(events.types.max(initial=0)), int(types.max(initial=0)))
    wanted = np.zeros(highest + 1, np.bool_)
    wanted[types] = True
    is_in = wanted[events.types]
    return events if is_in.all() else events.take(is_in)


def _concat(first: LoggedEvents, second: LoggedEvents) -> LoggedEvents:
    if not len(second.users):
        return first
    if not len(first.users):
        return second
    return LoggedEvents(
        np.concatenate([first.users, second.users]),
        np.concatenate([first.items, second.items]),
        np.concatenate([first.types, second.types]),
        np.concatenate([first.timestamps, second.timestamps]),
        np.concatenate([first.weights, second.weights]),
    )
