"""Protocol of all stores, and the values that they return.

The contract suite, `tests/support/store_contract.py`, is the full specification. In short:

- A change is durable when its coroutine returns, and visible to every later read by any process.
- A call that raises has changed nothing; a cancelled call has changed everything or nothing.
- Each user has a `version`. Every change of the user, profile included, increases it, and no
  version is reused, not even after the user was forgotten and came back.
- Each user has a `generation`. It stays the same while events are only appended, so that a reader
  of the history up to `seq` needs only `history(user, after=seq)`. It changes when events are
  deleted, moved or forgotten.
- The catalogue has a version too, from the same clock, and lists the changes since any version.

Every method raises `Invalid` for input that breaks the rules of `service.domain.records`,
`Unavailable` (or `StoreFull`, `Overloaded`) when the database cannot serve it now, and `Corrupt`
when stored bytes fail their checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.domain.records import Event, User, Vector
from service.stores.protocols.bulk_access import CopiedStore
from service.stores.protocols.catalogue_store import CatalogueStore
from service.stores.protocols.event_log_store import EventLogStore
from service.stores.protocols.forgetting_ledger import ForgettingLedger
from service.stores.protocols.import_store import ImportStore
from service.stores.protocols.key_store import KeyStore
from service.stores.protocols.measures import MeasuredStore
from service.stores.protocols.scenario_store import ScenarioStore
from service.stores.protocols.shared_parts import SharedParts


class AppendResult(NamedTuple):
    """Counts of an appended batch: `stored + duplicates` is its length."""

    stored: int
    duplicates: int


class EventVectors(NamedTuple):
    """The `key` and `value` of an event; `None` where the model derives the vector."""

    key: Vector | None
    value: Vector | None


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A user's events as columns, oldest to newest by (timestamp, seq).

    `seqs` number the user's events in the order of arrival, from 1; they may have gaps. An unknown
    user has version 0, generation 0 and no events.
    """

    user_id: str
    version: int
    generation: int
    seqs: NDArray[np.uint32]  # [n]
    timestamps: NDArray[np.int64]  # [n] microseconds UTC
    weights: NDArray[np.float32]  # [n]
    item_ids: list[str]  # n
    types: list[str]  # n
    vectors: Mapping[int, EventVectors]  # by position; only of events with a key or value
    user: User | None  # the profile; None if none was stored

    def __len__(self) -> int:
        return len(self.item_ids)


class Store(
    CatalogueStore,
    EventLogStore,
    ScenarioStore,
    ImportStore,
    KeyStore,
    ForgettingLedger,
    MeasuredStore,
    CopiedStore,
    Protocol,
):
    """Histories, profiles and, inherited, the other parts of a store.

    The module documents the promises of all methods.
    """

    # ------------------------------------------------------------------ histories

    async def append(
        self, events: Sequence[Event], *, import_id: int | None = None
    ) -> AppendResult:
        """Store `events`, all or none of them, and return once they are durable.

        Event ids are unique in the whole store. An id that is already there (or twice in `events`)
        with the same body is a duplicate and changes nothing; an event without a timestamp matches
        whatever timestamp the first one has. The same id with another body raises `Conflict`, which
        names it. Events without an id are new, and the store names them. An item need not be in
        the catalogue.
        """
        ...

    async def version(self, user_id: str) -> int:
        """Return the user's version; 0 for an unknown user. Cheap: call it on each request."""
        ...

    async def history(self, user_id: str, *, after: int = 0) -> History:
        """Return the user's events with `seq > after`.

        One consistent reading: events, version, generation and profile belong together.
        """
        ...

    async def changed_history(
        self, user_id: str, *, version: int, generation: int, seq: int
    ) -> History | None:
        """Return what a reader who knows the user up to a version lacks; None if nothing changed.

        Args:
            user_id: the user.
            version: that the reader knows; 0 for nothing.
            generation: of the reader's events. Where it is still the user's, the events after
                `seq` are returned; else all of them.
            seq: the highest that the reader has.
        """
        ...

    async def page(
        self, user_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Event], str | None]:
        """Return up to `limit` events, newest first, and the cursor of the next page or None.

        Events that arrive or go meanwhile neither repeat nor hide others.
        """
        ...

    async def event_ids(
        self, user_id: str, seqs: Sequence[int], timestamps: Sequence[int]
    ) -> list[str | None]:
        """Return the ids of events of one history, in the given order; None for deleted ones."""
        ...

    async def delete_event(self, user_id: str, event_id: str) -> bool:
        """Delete one event of this user; False if the user has no such event."""
        ...

    async def forget(self, user_id: str) -> int:
        """Delete everything about the user, and add an entry to the ledger of forgotten users.

        Returns the number of events. No-op if the user is unknown.
        """
        ...

    async def merge(self, user_id: str, source: str) -> int:
        """Move the events of `source` to `user_id` and forget `source`; return the number moved.

        Interests are united, the target's first; where both have an attribute, the target's wins.
        Moved events keep ids and timestamps, and among equal timestamps come after the target's
        own. No-op if `source` is unknown; `Invalid` if both are the same.
        """
        ...

    async def put_user(self, user: User, *, import_id: int | None = None) -> None:
        """Replace the user's profile."""
        ...

    async def get_user(self, user_id: str) -> User | None:
        """Return the profile; an empty one for a user with events alone; None if unknown."""
        ...

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100, prefix: str = ""
    ) -> tuple[list[User], str | None]:
        """Return up to `limit` users by user_id (as bytes), and the next page's cursor or None.

        Those that have events, and those that have only a profile, whose id begins with `prefix`.
        """
        ...

    async def event_counts(self, user_ids: Sequence[str]) -> list[int]:
        """Return the number of events of each user."""
        ...

    # ------------------------------------------------------------------ the store itself

    async def clock(self, *, patient: bool = False) -> int:
        """Return the tick of the last change in the store; 0 if there was none. Cheap.

        A caller that no request waits for is `patient`: a slow server is then waited for longer.
        """
        ...

    async def counts(self) -> dict[str, int]:
        """Return the number of `users`, `items` (in the catalogue) and `events`."""
        ...

    async def problem(self) -> str | None:
        """Return why reads or writes are not answered, in a sentence; None if they are.

        A disk that has become full is no problem: writes succeed again once there is room.
        """
        ...

    @property
    def shared(self) -> SharedParts | None:
        """Return what the machines of an installation share; None in a store of one machine."""
        ...

    async def close(self) -> None:
        """Finish accepted calls, then release all resources. Later calls raise `Unavailable`."""
        ...

    # Training and export read everything, outside any event loop.

    def scan_users(self) -> Iterator[User]:
        """Iterate over all stored profiles."""
        ...

    def scan_user_ids(self) -> Iterator[str]:
        """Return the ids of all users that `counts` counts, in the order of their bytes."""
        ...
