"""Protocol of the catalogue in a store, which every `Store` includes, and its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from service.domain.item_patch import ItemPatch
from service.domain.records import Item


class PatchResult(NamedTuple):
    """Items that were patched: their number, and which of them are new."""

    stored: int  # distinct ids
    created: tuple[str, ...]  # ids that were not in the catalogue, in the order of the patches


class CatalogueDigest(NamedTuple):
    """Identity of all items of one version: equal digests mean equal changes from version 0 on."""

    version: int
    digest: str  # hex, SHA-256 of ids, documents, embeddings and versions of change


class CatalogueChanges(NamedTuple):
    """Changes of the catalogue up to `version`: items inserted or replaced, and deleted ids."""

    version: int
    upserted: list[Item]
    deleted: list[str]


# Called by a write, on any thread, with the catalogue's version before and after it, before other
# readers can see the change; also for a change that is then rolled back.
OnCatalogueChange = Callable[[int, int], None]


class CatalogueStore(Protocol):
    """Items, with the version of the catalogue and the changes since any version."""

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

    async def catalogue_version(self) -> int:
        """Return the version of the last change of the catalogue; 0 if there was none. Cheap."""
        ...

    def announced_catalogue(self) -> int:
        """Return a version of the catalogue that requests must see, without waiting for anything.

        It is that of this client's last acknowledged change or a later one, and that of another
        client's change within a second.
        """
        ...

    async def catalogue_digest(self) -> CatalogueDigest:
        """Return the digest of what `catalogue_changes(0)` would return. Reads all items."""
        ...

    async def catalogue_changes(self, after: int, limit: int | None = None) -> CatalogueChanges:
        """Return the changes after version `after`; `after=0` gives the whole catalogue.

        With `limit`, about so many items; what is left is after the version that comes with them.
        """
        ...

    # Training and export read everything, outside any event loop.

    def scan_items(self) -> Iterator[Item]:
        """Iterate over the catalogue by item_id."""
        ...
