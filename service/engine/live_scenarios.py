"""Scenarios in use, read from the store by every request, and remembered for its outages."""

from __future__ import annotations

from typing import NamedTuple

from cachetools import LRUCache

from service.domain.errors import NotFound, StoreUnreachable
from service.domain.scenarios import Scenario
from service.stores.base import Store

_REMEMBERED = 256  # names


class CurrentScenario(NamedTuple):
    """A scenario, and whether it may be of an earlier version."""

    scenario: Scenario
    is_stale: bool  # the store cannot be reached: it may have another version by now


class LiveScenarios:
    """Reads the version in use of each scenario of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: LRUCache[str, Scenario | None] = LRUCache(_REMEMBERED)

    async def current(self, name: str) -> CurrentScenario:
        """Return the version in use, or the last one read while the store cannot be reached.

        Raises:
            NotFound: there is no such scenario.
            StoreUnreachable: there is none that was read before.
        """
        is_stale = False
        try:
            found = self._read[name] = await self._store.scenario(name)
        except StoreUnreachable:
            if name not in self._read:
                raise
            found, is_stale = self._read[name], True
        if found is None:
            raise NotFound(f"no scenario {name!r}")
        return CurrentScenario(found, is_stale)
