"""Protocol of bulk access to records as they are stored, by which one store is copied to another.

A record comes with what the other protocols keep to themselves: the places of events in the order
of arrival, digests of bodies, the imports that events belong to, and what imports have replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from service.domain.errors import Corrupt
from service.domain.keys import ApiKey
from service.domain.scenarios import Scenario
from service.stores.protocols.forgetting_ledger import ForgottenUser
from service.stores.protocols.import_store import ImportRecord


class StoredEvent(NamedTuple):
    """Row of an event. It sorts by (timestamp, seq), the order of a history."""

    timestamp: int  # microseconds UTC
    seq: int
    item_id: str
    type: str
    weight: float
    event_id: str
    digest: int  # `event_identity.body_digest` of the event as it was first sent
    import_no: int | None  # the import that it goes with


class StoredVectors(NamedTuple):
    """Encoded vectors of an event, by its seq."""

    seq: int
    key: bytes | None
    value: bytes | None


class StoredClaim(NamedTuple):
    """Range of seqs of a user, both inclusive, that an import claims."""

    import_no: int
    first_seq: int
    last_seq: int


class StoredReplacement(NamedTuple):
    """Document that an import has replaced."""

    import_no: int
    written: int  # `encoding.document_digest` of what the import wrote
    document: bytes | None  # what was there before; None: nothing
    embedding: bytes | None  # of an item


@dataclass(frozen=True, slots=True)
class StoredUser:
    """A user with all events, in the order of the history; vectors, claims, imports in order."""

    user_id: str
    next_seq: int  # of the next event
    profile: bytes | None  # `encoding.user_document`
    events: list[StoredEvent]
    vectors: list[StoredVectors]
    claims: list[StoredClaim]
    replaced: list[StoredReplacement]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item: in the catalogue, deleted from it, or seen in events alone."""

    item_id: str
    was_put: bool  # False: only events have ever named it
    document: bytes | None  # `encoding.item_document`; None: not in the catalogue
    embedding: bytes | None
    replaced: list[StoredReplacement]
    # The version of the last change, 0 without one, and the number of the item: items sort by it
    # in the order of the catalogue. Two stores number differently, so that it does not compare.
    place: tuple[int, int] = field(compare=False)


class Registers(NamedTuple):
    """Records that are few: imports, versions of scenarios, keys, and forgotten users."""

    imports: list[ImportRecord]
    scenarios: list[Scenario]
    keys: list[ApiKey]
    forgotten: list[ForgottenUser]


class CopyRecord(NamedTuple):
    """Record, in the target, of a copy."""

    origin: str  # names the source
    position: str  # id of the last user who is compared and copied; "" = none, or all
    is_untouched: bool  # nothing but the copy has changed the store since it was begun
    is_whole: bool  # source and target were the same at the end of the last pass


def copy_unfinished(place: str, origin: str) -> Corrupt:
    """Return the error for an unfinished copy."""
    return Corrupt(
        f"{place} holds part of a copy of {origin}: run the same heed copy --from SOURCE --to "
        "TARGET again, which goes on where it stopped, or copy to an empty place"
    )


class BulkAccess(Protocol):
    """Bulk reads of any store, and bulk writes of a store that is the target of a copy.

    Each call is one transaction. A write also records how far the copy is. It raises `Conflict`
    where there is no record, or where anything but this object has changed the store since the
    object has read or written the record: another copy, or a service.
    """

    # ------------------------------------------------------------------ any store

    async def users(self, after: str, events: int) -> list[StoredUser]:
        """Return the next users by user_id (as bytes): about so many events, at least one user.

        An empty list is the end.
        """
        ...

    async def item_names(self, after: int, limit: int) -> list[tuple[int, str]]:
        """Return up to `limit` numbers and ids of items by number, which is the order of arrival.

        They include items that only events name.
        """
        ...

    async def items(self, after: str, limit: int) -> list[StoredItem]:
        """Return up to `limit` items by item_id (as bytes), whatever is stored of them."""
        ...

    async def find_items(self, item_ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of these ids that are stored, in any order."""
        ...

    async def noted_item_names(self) -> list[str]:
        """Return the names of items that deleted events had, and that `clean_up` is to look at."""
        ...

    async def copy_record(self) -> CopyRecord | None:
        """Return the record of the copy that the store is a target of, None without one."""
        ...

    # ------------------------------------------------------------------ the target of a copy

    async def begin_copy(self, origin: str) -> None:
        """Make the store the target of a copy. The caller must have found it empty."""
        ...

    async def put_registers(self, registers: Registers) -> None:
        """Insert records; of imports and keys that are there, replace what can change."""
        ...

    async def add_item_names(self, item_ids: Sequence[str]) -> None:
        """Give the items numbers, in this order; those that have one keep it."""
        ...

    async def put_items(self, items: Sequence[StoredItem]) -> None:
        """Replace items, up to `MAX_ITEMS`, in the order of the catalogue.

        Items of one version in `place` are changed together, and others one after another, so that
        `catalogue_changes` has the order of the source.
        """
        ...

    async def discard_item_names(self, item_ids: Sequence[str]) -> None:
        """Leave names to `clean_up`, which deletes those that no event uses."""
        ...

    async def put_users(
        self, users: Sequence[StoredUser], absent: Sequence[str], position: str
    ) -> None:
        """Replace users by these, drop the `absent` ones, and record the position.

        Ids of events are unique: where another user, or an earlier one of these, has an event of a
        user to be stored, since they were merged at the source meanwhile, that one is dropped too.
        A dropped user is not added to the ledger of forgotten users.
        """
        ...

    async def finish_copy(self) -> None:
        """Record that all users are compared and copied; tidy up after so many writes."""
        ...

    async def mark_copy(self, *, is_whole: bool) -> None:
        """Record whether the copy equals its source; until then, the store is not opened."""
        ...


class CopiedStore(Protocol):
    """The part of a store by which it is copied."""

    def bulk(self) -> BulkAccess:
        """Return access in bulk; each object is for one copy at a time."""
        ...


MAX_ITEMS = 1_000  # in one call of `put_items`


def latest_holders(users: Sequence[StoredUser]) -> list[StoredUser]:
    """Return users without those of whom a later one has an event.

    Users who are read one after another may have the same event, where the first was merged with
    the second in between.
    """
    holders = {event.event_id: user.user_id for user in users for event in user.events}
    return [
        user
        for user in users
        if all(holders[event.event_id] == user.user_id for event in user.events)
    ]
