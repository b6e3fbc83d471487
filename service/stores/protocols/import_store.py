"""Protocol of the imports in a store and their undoing, which every `Store` includes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


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


class ImportStore(Protocol):
    """Imports: records that were stored together, and can be taken back together."""

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
