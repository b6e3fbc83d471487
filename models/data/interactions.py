"""The event log, stored as columns sorted by user and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.data.columns import as_integers, require_in_range, require_non_negative

DISLIKE = "dislike"  # name of the event type that marks an item as not liked


class UserEvents(NamedTuple):
    """One user's events, oldest first: views into the log's columns, each [n]."""

    items: NDArray[np.int32]
    timestamps: NDArray[np.int64]
    weights: NDArray[np.float32]
    types: NDArray[np.int16]


class GatheredEvents(NamedTuple):
    """The concatenated events of a batch of users: event `events[i]` belongs to `batch[i]`."""

    batch: NDArray[np.int64]  # [N] row of the batch, not of the log
    events: NDArray[np.int64]  # [N] position in the log's columns


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """A log of events as columns sorted by user, then time; ties keep their input order.

    User u owns the events offsets[u]:offsets[u + 1], an empty range for a user without events.
    Build one with `from_columns`; every method returns a new log over the same users and items.

    Raises ValueError, naming the column, for columns of unequal length, an undeclared dtype, or
    rows outside the catalogue.
    """

    items: NDArray[np.int32]  # [E] item rows
    timestamps: NDArray[np.int64]  # [E] microseconds UTC
    weights: NDArray[np.float32]  # [E]
    types: NDArray[np.int16]  # [E]
    offsets: NDArray[np.int64]  # [U + 1]
    n_items: int
    dislike_type: int = -1  # the event type of dislikes; -1 = none

    def __post_init__(self) -> None:
        expected = {"items": np.int32, "timestamps": np.int64, "weights": np.float32}
        for name, dtype in {**expected, "types": np.int16, "offsets": np.int64}.items():
            column = getattr(self, name)
            if column.ndim != 1 or column.dtype != dtype:
                raise ValueError(
                    f"{name} must be 1-d {np.dtype(dtype)}, got {column.ndim}-d {column.dtype}"
                )
            if name != "offsets" and len(column) != len(self.items):
                raise ValueError(f"{name} has {len(column)} rows, items has {len(self.items)}")
        if (
            len(self.offsets) < 1
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.items)
            or np.any(np.diff(self.offsets) < 0)
        ):
            raise ValueError(f"offsets must rise from 0 to the number of events, {len(self.items)}")
        if self.n_items < 0:
            raise ValueError(f"n_items must be at least 0, got {self.n_items}")
        require_in_range("items", self.items, self.n_items)

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
    ) -> Self:
        """Sort unordered columns [E] into a log; equal (user, timestamp) keep their input order.

        users and items are rows in [0, n_users) and [0, n_items); timestamps are microseconds.
        Missing weights are 1, missing types 0. Raises ValueError, naming the column, if it is not
        1-d, not integer, of another length, not finite (weights) or out of range.
        """
        user_column = as_integers("users", users, np.int64)
        item_column = as_integers("items", items, np.int32)
        time_column = as_integers("timestamps", timestamps, np.int64)
        events = len(user_column)
        weight_column = (
            np.ones(events, dtype=np.float32)
            if weights is None
            else np.asarray(weights, dtype=np.float32)
        )
        type_column = (
            np.zeros(events, dtype=np.int16)
            if types is None
            else as_integers("types", types, np.int16)
        )
        columns: dict[str, NDArray[Any]] = {
            "items": item_column,
            "timestamps": time_column,
            "weights": weight_column,
            "types": type_column,
        }
        for name, column in columns.items():
            if column.shape != (events,):
                raise ValueError(f"{name} must be [{events}] like users, got {list(column.shape)}")
        if not np.isfinite(weight_column).all():
            raise ValueError("weights must be finite")
        if n_users < 0:
            raise ValueError(f"n_users must be at least 0, got {n_users}")
        require_in_range("users", user_column, n_users)
        order = np.lexsort((time_column, user_column))  # stable: ties keep the order given
        return cls(
            items=item_column[order],
            timestamps=time_column[order],
            weights=weight_column[order],
            types=type_column[order],
            offsets=_offsets(np.bincount(user_column, minlength=n_users)),
            n_items=n_items,
            dislike_type=dislike_type,
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

    def user(self, u: int) -> UserEvents:
        """User u's events, oldest first. Raises IndexError outside [0, n_users)."""
        if not 0 <= u < self.n_users:
            raise IndexError(f"user {u} is outside [0, {self.n_users})")
        rows = slice(int(self.offsets[u]), int(self.offsets[u + 1]))
        return UserEvents(
            self.items[rows], self.timestamps[rows], self.weights[rows], self.types[rows]
        )

    def gather(self, users: ArrayLike, *, last: int | None = None) -> GatheredEvents:
        """Concatenate the events of `users` [B] (repeats allowed), the `last` newest of each.

        Events of one user are oldest first.

        Raises IndexError for a user outside [0, n_users).
        """
        rows = np.asarray(users, dtype=np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.n_users):
            raise IndexError(f"users must lie in [0, {self.n_users})")
        ends = self.offsets[rows + 1]
        lengths = ends - self.offsets[rows]
        if last is not None:
            lengths = np.minimum(lengths, require_non_negative("last", last))
        batch = np.repeat(np.arange(len(rows)), lengths)
        within = np.arange(len(batch)) - np.repeat(_offsets(lengths)[:-1], lengths)
        return GatheredEvents(batch, np.repeat(ends - lengths, lengths) + within)

    def where(self, keep: NDArray[np.bool_]) -> Interactions:
        """Select the events whose `keep` [E] is True. Users and items keep their rows."""
        if keep.shape != (len(self),) or keep.dtype != np.bool_:
            raise ValueError(f"keep must be bool [{len(self)}], got {keep.dtype} {keep.shape}")
        ends = np.concatenate(([0], np.cumsum(keep)))
        return Interactions(
            self.items[keep],
            self.timestamps[keep],
            self.weights[keep],
            self.types[keep],
            ends[self.offsets].astype(np.int64),
            self.n_items,
            self.dislike_type,
        )

    def head(self, lengths: NDArray[np.int64]) -> Interactions:
        """Select each user's `lengths[u]` oldest events, or all if there are fewer."""
        if lengths.shape != (self.n_users,):
            raise ValueError(f"lengths must be [{self.n_users}], got {list(lengths.shape)}")
        return self.where(self.positions < np.repeat(lengths, self.lengths))


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
