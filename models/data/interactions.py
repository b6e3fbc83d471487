"""The event log, stored as columns sorted by user and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.data.log_shards import WHOLE_LOG, LogShards
from models.data.row_sets import expand_ranges

T = TypeVar("T", bound=np.integer[Any])

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
    shards: LogShards = WHOLE_LOG  # of which this log is one

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
        shards: LogShards = WHOLE_LOG,
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
        """The number of users, including those without events."""
        return len(self.offsets) - 1

    @property
    def n_types(self) -> int:
        """The number of event types, at least 1."""
        return int(max(self.types.max(initial=0), self.dislike_type)) + 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[U] the number of events of each user."""
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
        """The log without dislikes."""
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
            self.items[keep],
            self.timestamps[keep],
            self.weights[keep],
            self.types[keep],
            ends[self.offsets].astype(np.int64),
            self.n_items,
            self.dislike_type,
            self.shards,
        )


def _require_in_range(name: str, column: NDArray[Any], bound: int) -> None:
    """Raise ValueError unless every entry lies in [0, bound)."""
    if column.size and (column.min() < 0 or column.max() >= bound):
        worst = column.min() if column.min() < 0 else column.max()
        raise ValueError(f"{name} must lie in [0, {bound}), got {worst}")


def _as_integers(name: str, values: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Convert to a 1-d integer array of `dtype` without rounding or wrap-around.

    Raises ValueError for non-integers, other than one dimension, and values out of range.
    """
    column = np.asarray(values)
    if column.size and column.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {column.dtype}")
    if column.ndim != 1:
        raise ValueError(f"{name} must be 1-d, got {column.ndim}-d")
    limits = np.iinfo(dtype)
    if column.size and (column.min() < limits.min or column.max() > limits.max):
        raise ValueError(f"{name} must fit {np.dtype(dtype)}")
    return column.astype(dtype, copy=False)
