"""Scenarios in use, read from the store by every request, and remembered for its outages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cachetools import LRUCache

from service.domain.errors import NotFound, StoreUnreachable
from service.domain.records import Scenario
from service.stores.base import Store

_REMEMBERED = 256  # names


class CurrentScenario(NamedTuple):
    """A scenario, and whether it may be of an earlier version."""

    scenario: Scenario
    is_stale: bool  # the store cannot be reached: it may have another version by now


class LiveScenarios:
    """Reads and writes the version in use of each scenario of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: LRUCache[str, Scenario] = LRUCache(_REMEMBERED)

    async def read(self, name: str) -> Scenario:
        """Return the version in use. Raises `NotFound` and `StoreUnreachable`."""
        found = await self._store.scenario(name)
        if found is None:
            self._known.pop(name, None)
            raise NotFound(f"no scenario {name!r}")
        self._known[name] = found
        return found

    async def current(self, name: str) -> CurrentScenario:
        """Return the version in use, or the last one known while the store cannot be reached.

        Raises:
            NotFound: there is no such scenario.
            StoreUnreachable: nothing is known of it.
        """
        try:
            return CurrentScenario(await self.read(name), is_stale=False)
        except StoreUnreachable:
            if name not in self._known:
                raise
            return CurrentScenario(self._known[name], is_stale=True)

    async def put(self, name: str, body: Mapping[str, Any]) -> Scenario:
        """Store a version, which is in use from then on. Raises as `Store.put_scenario` does."""
        stored = self._known[name] = await self._store.put_scenario(name, body)
        return stored

    async def delete(self, name: str) -> None:
        """Delete a scenario, whose versions remain.

        Raises `NotFound`, and `Conflict` where another one falls back to it.
        """
        is_deleted = await self._store.delete_scenario(name)
        self._known.pop(name, None)
        if not is_deleted:
            raise NotFound(f"no scenario {name!r}")
