"""Protocol of the event log of all users in a store, which every `Store` includes, and its values.

Training, popularity and the in-memory log read events of everybody; one user's are a `History`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.domain.records import Event


@dataclass(frozen=True, slots=True, eq=False)
class LogColumns:
    """A slice of the whole event log, dictionary-encoded: event i is by `user_ids[users[i]]`.

    The log is ordered by user, then (timestamp, seq). Codes keep their meaning throughout one scan:
    the three lists are the same objects in every slice and grow with new names, so that the columns
    of the slices may be concatenated.
    """

    user_ids: list[str]
    item_ids: list[str]
    type_names: list[str]
    users: NDArray[np.int32]  # [n] into user_ids
    items: NDArray[np.int32]  # [n] into item_ids
    types: NDArray[np.int32]  # [n] into type_names
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n]

    def __len__(self) -> int:
        return len(self.users)


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards of the log: the events of users whose `user_key` % count is `index`.

    Raises ValueError for an index outside [0, count).
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"there is no shard {self.index} of {self.count}")


class LogChanges(NamedTuple):
    """Changes of the event log up to `version`: users whose events are void, and new events.

    Users go by numbers, which are small. A number belongs to another user only after its own was
    forgotten, and is then among the rewritten ones.
    """

    version: int
    rewritten: NDArray[np.int64]  # numbers of users; those that they still have are new again
    events: LogColumns  # in no order; `users` are numbers of users, and there are no `user_ids`
    seqs: NDArray[np.int64]  # [n] of these events


class EventLogStore(Protocol):
    """Events of all users: whole, as changes since a version, and counted by item."""

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the ids of items with events, and their numbers of events.

        Reads no event: the counts are stored. The order is that in which the store first had the
        items. Dislikes and returns make nothing popular: they count 0.
        """
        ...

    async def log_changes(
        self, after: int, known: NDArray[np.int64], limit: int | None = None
    ) -> LogChanges:
        """Return the changes of the event log after version `after`; 0 gives the whole log.

        Args:
            after: a version up to which the caller knows the log.
            known: [n] the last `seq` that the caller has of each user, by the user's number; 0 or
                left out = none.
            limit: about so many events; what is left is after the version that comes with them.
        """
        ...

    async def user_ids(self, numbers: Sequence[int]) -> list[str | None]:
        """Return the ids of users by their numbers in `log_changes`; None for unknown ones."""
        ...

    # Training and export read everything, outside any event loop.

    def scan(self, rows: int = 100_000, *, shard: Shard | None = None) -> Iterator[LogColumns]:
        """Iterate over the log as columns, `rows` at a time, in its state at the first `next`.

        Args:
            rows: events at once.
            shard: read the events of its users alone, without reading those of others; None = all.
        """
        ...

    def scan_events(self) -> Iterator[Event]:
        """Iterate over the log as records, in the order of `scan`, with ids and vectors."""
        ...
