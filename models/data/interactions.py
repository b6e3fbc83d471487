"""The event log, stored as columns sorted by user and time, whole or in shards.

Each process has a shard of the users. An order statistic of all shards is found by bisection: each
step takes the sum of one number over them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.compute.device import SINGLE_PROCESS, Processes
from models.data.vocabulary import expand_ranges

_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign


def median(values: NDArray[np.float32], shards: Processes) -> np.float32:
    """The median of all finite values [n], as `np.median`; raises ValueError without values."""
    if shards.count == 1 and len(values):  # sorting 8 bytes each takes more memory
        return np.float32(np.median(values))
    # As integers, floats of one sign are in the order of their bits.
    bits = values.view(np.int32)
    keys = np.sort(np.where(bits < 0, bits ^ _MAGNITUDE, bits).astype(np.int64))
    last = _total(keys, shards) - 1
    found = [_order_statistic(keys, place, shards) for place in (last // 2, last - last // 2)]
    back = np.array(found, dtype=np.int32)
    return np.float32(np.median(np.where(back < 0, back ^ _MAGNITUDE, back).view(np.float32)))


def quantile(values: NDArray[np.int64], share: float, shards: Processes) -> float:
    """A quantile of all values [n], as `np.quantile`; raises ValueError without values."""
    if shards.count == 1 and len(values):
        return float(np.quantile(values, share))
    keys = np.sort(values)
    place = share * (_total(keys, shards) - 1)
    below = math.floor(place)
    ends = [_order_statistic(keys, at, shards) for at in (below, math.ceil(place))]
    return float(np.quantile(np.array(ends), place - below))


def _total(keys: NDArray[np.int64], shards: Processes) -> int:
    total = shards.total(len(keys))
    if not total:
        raise ValueError("there are no values")
    return total


def _order_statistic(keys: NDArray[np.int64], place: int, shards: Processes) -> int:
    """The value at a place, from 0, of all sorted keys [n]."""
    low = shards.min(int(keys[0]) if len(keys) else np.iinfo(np.int64).max)
    high = shards.max(int(keys[-1]) if len(keys) else np.iinfo(np.int64).min + 1)
    while low < high:
        middle = (low + high) // 2
        if shards.total(int(np.searchsorted(keys, middle, side="right"))) > place:
            high = middle
        else:
            low = middle + 1
    return low


Whole = TypeVar("Whole", bound=np.integer[Any])

DISLIKE = "dislike"  # name of the event type that marks an item as not liked
NEGATIVE = frozenset((DISLIKE, "return"))  # names of the types that a model reads as dislikes


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """A log of events as columns sorted by user, then time; ties keep their input order.

    User u owns the events offsets[u]:offsets[u + 1], an empty range for a user without events.
    Build one with `from_columns`, which checks the columns; every method returns a new log over the
    same users and items.

    A log may be a shard of one that several processes divide: users and events are then those of
    this process, items and event types those of all, and `shards` puts statistics together. Methods
    and functions that do so say that they are collective: all processes must call them.
    """

    items: NDArray[np.int32]  # [E] item rows
    timestamps: NDArray[np.int64]  # [E] microseconds UTC
    weights: NDArray[np.float32]  # [E]
    types: NDArray[np.int16]  # [E]
    offsets: NDArray[np.int64]  # [U + 1]
    n_items: int
    dislike_type: int = -1  # the event type of dislikes; -1 = none
    shards: Processes = SINGLE_PROCESS  # of which this log is one

    @classmethod
    def from_columns(
        cls,
        users: ArrayLike,
        items: ArrayLike,
        timestamps: ArrayLike,
        weights: ArrayLike | None = None,
        types: ArrayLike | None = None,
        *,
        n_users: int,
        n_items: int,
        dislike_type: int = -1,
        shards: Processes = SINGLE_PROCESS,
    ) -> Self:
        """Sort unordered columns [E] into a log; equal (user, timestamp) keep their input order.

        users and items are rows in [0, n_users) and [0, n_items); timestamps are microseconds.
        Missing weights are 1, missing types 0. Raises ValueError, naming the column, if it is not
        1-d, not integer, of another length, not finite (weights) or out of range.
        """
        user_column = _as_integers("users", users, np.int64)
        events = len(user_column)
        columns: dict[str, NDArray[Any]] = {
            "items": _as_integers("items", items, np.int32),
            "timestamps": _as_integers("timestamps", timestamps, np.int64),
            "weights": np.asarray(np.ones(events) if weights is None else weights, np.float32),
            "types": np.zeros(events, np.int16)
            if types is None
            else _as_integers("types", types, np.int16),
        }
        for name, column in columns.items():
            if column.shape != (events,):
                raise ValueError(f"{name} must be [{events}] like users, got {list(column.shape)}")
        if not np.isfinite(columns["weights"]).all():
            raise ValueError("weights must be finite")
        _require_in_range("users", user_column, n_users)
        _require_in_range("items", columns["items"], n_items)
        order = np.lexsort((columns["timestamps"], user_column))  # stable: ties keep their order
        return cls(
            **{name: column[order] for name, column in columns.items()},
            offsets=np.cumsum(np.bincount(user_column + 1, minlength=n_users + 1)),
            n_items=n_items,
            dislike_type=dislike_type,
            shards=shards,
        )

    def __len__(self) -> int:
        return len(self.items)

    @property
    def n_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_types(self) -> int:
        return int(max(self.types.max(initial=0), self.dislike_type)) + 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def users(self) -> NDArray[np.int32]:
        """[E] the user of each event."""
        return np.repeat(np.arange(self.n_users, dtype=np.int32), self.lengths)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[E] the position of each event in its user's history, 0 = oldest."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def disliked(self) -> NDArray[np.bool_]:
        """[E] True for dislikes."""
        disliked: NDArray[np.bool_] = (self.types == self.dislike_type) & (self.dislike_type >= 0)
        return disliked

    def liked(self) -> Interactions:
        return self.where(~self.disliked)

    def item_counts(self) -> NDArray[np.int64]:
        """[n_items] the number of events of each item."""
        return np.bincount(self.items, minlength=self.n_items)

    def total_item_counts(self) -> NDArray[np.int64]:
        """[n_items] the number of events of each item in all shards; collective."""
        return self.shards.sum(self.item_counts())

    def gather(
        self, users: ArrayLike, *, last: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Concatenate the events of `users` [B] (repeats allowed), the `last` newest of each.

        Returns the row of the batch that each event belongs to, and its position in the log's
        columns, [N] each; events of one user are oldest first. Raises IndexError for a user outside
        [0, n_users).
        """
        rows = np.asarray(users, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.n_users):
            raise IndexError(f"users must lie in [0, {self.n_users})")
        ends = self.offsets[rows + 1]
        lengths = ends - self.offsets[rows]
        if last is not None:
            lengths = np.minimum(lengths, last)
        return expand_ranges(ends - lengths, lengths)

    def where(self, keep: NDArray[np.bool_]) -> Interactions:
        """Select the events whose `keep` [E] is True. Users and items keep their rows."""
        ends = np.concatenate(([0], np.cumsum(keep)))
        return Interactions(
            items=self.items[keep],
            timestamps=self.timestamps[keep],
            weights=self.weights[keep],
            types=self.types[keep],
            offsets=ends[self.offsets].astype(np.int64),
            n_items=self.n_items,
            dislike_type=self.dislike_type,
            shards=self.shards,
        )


def _require_in_range(name: str, column: NDArray[Any], bound: int) -> None:
    if column.size and (column.min() < 0 or column.max() >= bound):
        worst = column.min() if column.min() < 0 else column.max()
        raise ValueError(f"{name} must lie in [0, {bound}), got {worst}")


def _as_integers(name: str, values: ArrayLike, dtype: type[Whole]) -> NDArray[Whole]:
    """Convert to a 1-d integer array of `dtype` without rounding or wrap-around."""
    column = np.asarray(values)
    if column.size and column.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {column.dtype}")
    if column.ndim != 1:
        raise ValueError(f"{name} must be 1-d, got {column.ndim}-d")
    limits = np.iinfo(dtype)
    if column.size and (column.min() < limits.min or column.max() > limits.max):
        raise ValueError(f"{name} must fit {np.dtype(dtype)}")
    return column.astype(dtype, copy=False)


_HOUR = 3_600_000_000  # microseconds; in less than that a file is imported
_AT_ONCE = 10  # events at one time, on average, that no log of what people do has for an hour
_SMALLEST = 10  # one in this many events, from which on they are an import of part of a log


def lacks_order(imported: NDArray[np.bool_], shards: Processes = SINGLE_PROCESS) -> bool:
    """Report whether half of the events of a log [E] or more have the time of an import."""
    total = shards.total(len(imported))
    return total > 0 and 2 * shards.total(int(np.count_nonzero(imported))) >= total


def at_import(
    times: NDArray[np.int64], shards: Processes = SINGLE_PROCESS, *, is_part: bool = False
) -> NDArray[np.bool_]:
    """Mark events [E] whose time, microseconds UTC, is that of their import; collective.

    An import is an hour with ten events or more for each of its times, if it has half of all
    events, or a tenth at times with a part below a millisecond. The service's clock gives such
    times; exports have dates, and whole seconds or milliseconds. Part of a log may have half of its
    events at one date: there, only times below a millisecond tell.
    """
    found = np.zeros(len(times), np.bool_)
    total = shards.total(len(times))
    is_clock = times % 1_000 != 0
    for share, among in ((2, is_clock | (not is_part)), (_SMALLEST, is_clock)):
        while (start := _import_hour(times[among & ~found], total / share, shards)) is not None:
            found |= among & (times >= start) & (times < start + _HOUR)
    return found


def _import_hour(times: NDArray[np.int64], least: float, shards: Processes) -> int | None:
    """When an hour of an import with at least `least` events begins; None if none does."""
    times = np.sort(times)
    until = np.searchsorted(times, times + _HOUR, side="left")
    fullest = int(np.argmax(until - np.arange(len(times)))) if len(times) else 0
    for start in shards.gather(times[fullest : fullest + 1]).tolist():
        within = times[np.searchsorted(times, start) : np.searchsorted(times, start + _HOUR)]
        count = shards.total(len(within))
        distinct = shards.max(len(np.unique(within)))
        if count and count >= least and count >= _AT_ONCE * distinct:
            return int(start)
    return None
