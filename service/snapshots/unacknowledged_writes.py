"""Catalogue versions that this process is still writing, which no client has been told of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.stores.base import OnCatalogueChange


class UnacknowledgedWrites:
    """Tells which catalogue versions an answer may still lack.

    A version is entered by the store's writer before its transaction is committed, so that no
    reader sees a version that is missing here, and is removed when the write is acknowledged.
    Every write of the catalogue by this process must be tracked.
    """

    def __init__(self) -> None:
        self._previous: dict[int, int] = {}  # version -> the catalogue version before it

    @contextmanager
    def track(self) -> Iterator[OnCatalogueChange]:
        """Track the changes of one write, whose acknowledgement is the end of the block.

        Yields:
            A callback for the store, to be called on any thread.
        """
        versions: list[int] = []

        def on_change(previous: int, version: int) -> None:
            # Writes of one transaction share its version: the first knows the one before.
            if previous < version:
                self._previous.setdefault(version, previous)
                versions.append(version)

        try:
            yield on_change
        finally:
            for version in versions:
                self._previous.pop(version, None)

    def acknowledged_at(self, version: int) -> int:
        """The latest catalogue version, up to this one, that a client may have been told of."""
        while (previous := self._previous.get(version)) is not None:
            version = previous
        return version
