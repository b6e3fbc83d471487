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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.domain.item_patch import ItemPatch
from service.domain.records import Event, Item, User, Vector
from service.domain.scenarios import Scenario
from service.stores.forgetting_ledger import ForgettingLedger
from service.stores.key_store import KeyStore
from service.stores.measures import MeasuredStore


class AppendResult(NamedTuple):
    """Counts of an appended batch: `stored + duplicates` is its length."""

    stored: int
    duplicates: int


class PatchResult(NamedTuple):
    """Items that were patched: their number, and which of them are new."""

    stored: int  # distinct ids
    created: tuple[str, ...]  # ids that were not in the catalogue, in the order of the patches


class ImportRecord(NamedTuple):
    """An import: rows that were stored together, from files or a data set."""

    import_id: int
    started: int  # microseconds UTC
    source: str  # what was read, in the words of `begin_import`
    is_undone: bool


class UndoneImport(NamedTuple):
    """Counts of what an undone import had stored: taken back, or kept."""

    events: int
    items: int
    users: int
    kept: int  # items and profiles that were changed since
    shared: int  # events that another import contains too


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


class CatalogueDigest(NamedTuple):
    """Identity of all items of one version: equal digests mean equal changes from version 0 on."""

    version: int
    digest: str  # hex, SHA-256 of ids, documents, embeddings and versions of change


class CatalogueChanges(NamedTuple):
    """Changes of the catalogue up to `version`: items inserted or replaced, and deleted ids."""

    version: int
    upserted: list[Item]
    deleted: list[str]


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


class LogChanges(NamedTuple):
    """Changes of the event log up to `version`: users whose events are void, and new events.

    Users go by numbers, which are small. A number belongs to another user only after its own was
    forgotten, and is then among the rewritten ones.
    """

    version: int
    rewritten: NDArray[np.int64]  # numbers of users; those that they still have are new again
    events: LogColumns  # in no order; `users` are numbers of users, and there are no `user_ids`
    seqs: NDArray[np.int64]  # [n] of these events


# Called by a write, on any thread, with the catalogue's version before and after it, before other
# readers can see the change; also for a change that is then rolled back.
OnCatalogueChange = Callable[[int, int], None]


class Store(KeyStore, ForgettingLedger, MeasuredStore, Protocol):
    """Histories, profiles, the catalogue and, inherited, API keys, the ledger and measures.

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

    # ------------------------------------------------------------------ catalogue

    async def put_items(
        self,
        items: Sequence[Item],
        *,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> int:
        """Insert or replace `items`, all or none; return the number of distinct ids.

        Of one id the last wins. Items that are already there just so change nothing.
        """
        ...

    async def patch_items(
        self,
        patches: Sequence[ItemPatch],
        *,
        create: bool = True,
        on_change: OnCatalogueChange | None = None,
        import_id: int | None = None,
    ) -> PatchResult:
        """Apply `patches` in their order, all or none.

        An item that is not in the catalogue is inserted, or raises `NotFound` without `create`.
        """
        ...

    async def get_items(self, item_ids: Sequence[str]) -> list[Item | None]:
        """Return items in the given order; None for those not in the catalogue."""
        ...

    async def delete_item(
        self, item_id: str, *, on_change: OnCatalogueChange | None = None
    ) -> bool:
        """Remove the item from the catalogue (histories keep it); False if it was not in it."""
        ...

    async def page_items(
        self, *, cursor: str | None = None, limit: int = 100, hidden: bool = False
    ) -> tuple[list[Item], str | None]:
        """Return up to `limit` items by item_id (as bytes), and the next page's cursor or None.

        With `hidden`, only items that are hidden.
        """
        ...

    async def page_users(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[User], str | None]:
        """Return up to `limit` users by user_id (as bytes), and the next page's cursor or None.

        Those that have events, and those that have only a profile.
        """
        ...

    async def catalogue_version(self) -> int:
        """Return the version of the last change of the catalogue; 0 if there was none. Cheap."""
        ...

    async def catalogue_digest(self) -> CatalogueDigest:
        """Return the digest of what `catalogue_changes(0)` would return. Reads all items."""
        ...

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        """Return the changes after version `after`; `after=0` gives the whole catalogue.

        With `limit`, about so many items; what is left is after the version that comes with them.
        """
        ...

    # ------------------------------------------------------------------ scenarios

    async def put_scenario(self, name: str, body: Mapping[str, Any]) -> Scenario:
        """Store the next version of a scenario, unless its last version is the same.

        Raises:
            Invalid: its `fallback` is not stored, or leads back to this scenario.
        """
        ...

    async def scenario(self, name: str) -> Scenario | None:
        """Return the last version of a scenario; None without one, or if it is deleted. Cheap."""
        ...

    async def page_scenarios(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Scenario], str | None]:
        """Return a page of the scenarios by name, and the cursor of the next page."""
        ...

    async def page_scenario_versions(
        self, name: str, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[Scenario], str | None]:
        """Return a page of all versions of a scenario, the last first; deletions are versions."""
        ...

    async def delete_scenario(self, name: str) -> bool:
        """Delete a scenario, whose versions remain; False if there was none.

        Raises:
            Conflict: it is the fallback of another scenario.
        """
        ...

    # ------------------------------------------------------------------ imports and their undoing

    async def begin_import(self, source: str) -> int:
        """Return the id of a new import, for `append`, `put_items` and `put_user`."""
        ...

    async def imports(self) -> list[ImportRecord]:
        """Return all imports, oldest first."""
        ...

    async def undo_import(
        self, import_id: int, *, progress: Callable[[int], None] | None = None
    ) -> UndoneImport:
        """Take back what an import stored.

        Its events are deleted, except those that were also appended without an import or by another
        import that is not undone, before or after it; so are users without any events and profile
        that remain. Items and profiles that it inserted or replaced are as they were before it,
        unless they were changed since by something else than an import. Not all at once: when it is
        interrupted, it can be called again. `progress` is called with the number of events that are
        deleted so far.

        Raises:
            Invalid: there is no such import, or it is undone already.
        """
        ...

    # ------------------------------------------------------------------ the store itself

    async def clock(self) -> int:
        """Return the tick of the last change in the store; 0 if there was none. Cheap."""
        ...

    async def counts(self) -> dict[str, int]:
        """Return the number of `users`, `items` (in the catalogue) and `events`."""
        ...

    async def popularity(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the ids of items with events, and their numbers of events.

        Reads no event: the counts are stored. The order is that in which the store first had the
        items. Dislikes make nothing popular: they count 0.
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

    async def problem(self) -> str | None:
        """Return why reads or writes are not answered, in a sentence; None if they are.

        A disk that has become full is no problem: writes succeed again once there is room.
        """
        ...

    async def close(self) -> None:
        """Finish accepted calls, then release all resources. Later calls raise `Unavailable`."""
        ...

    # Training and export read everything, outside any event loop.

    def scan(self, rows: int = 100_000) -> Iterator[LogColumns]:
        """Iterate over the log as columns, `rows` at a time, in its state at the first `next`."""
        ...

    def scan_events(self) -> Iterator[Event]:
        """Iterate over the log as records, in the order of `scan`, with ids and vectors."""
        ...

    def scan_items(self) -> Iterator[Item]:
        """Iterate over the catalogue by item_id."""
        ...

    def scan_users(self) -> Iterator[User]:
        """Iterate over all stored profiles."""
        ...

    def scan_user_ids(self) -> Iterator[str]:
        """Return the ids of all users that `counts` counts, in the order of their bytes."""
        ...
