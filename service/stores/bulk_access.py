"""Protocol of bulk access to records as they are stored, by which one store is copied to another.

A record comes with what the other protocols keep to themselves: the places of events in the order
of arrival, digests of bodies, the imports that events belong to, and what imports have replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from service.stores.values import CopyRecord, Registers, StoredItem, StoredUser


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
