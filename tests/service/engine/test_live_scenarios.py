"""Scenarios in use, and the last ones read while the store cannot be reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from service.domain.errors import NotFound, StoreUnreachable
from service.domain.records import Scenario
from service.engine.engine import LiveScenarios
from service.stores.base import Store


class Shelf:
    """A store that has scenarios, and can be away."""

    def __init__(self) -> None:
        self.versions: dict[str, Scenario] = {}
        self.is_away = False

    async def scenario(self, name: str) -> Scenario | None:
        if self.is_away:
            raise StoreUnreachable("away")
        return self.versions.get(name)

    async def put_scenario(self, name: str, body: Mapping[str, Any]) -> Scenario:
        self.versions[name] = Scenario(name, 1, 0, body)
        return self.versions[name]

    async def delete_scenario(self, name: str) -> bool:
        return self.versions.pop(name, None) is not None


async def test_what_is_written_is_known_and_what_is_deleted_is_not() -> None:
    """A version that nobody has read yet answers in an outage; a deleted scenario does not."""
    shelf = Shelf()
    scenarios = LiveScenarios(cast(Store, shelf))
    for name in ("home", "gone", "vanished"):
        await scenarios.put(name, {"question": "popular"})
    shelf.versions["home"] = Scenario("home", 2, 0, {"question": "popular"})  # by another process
    assert await scenarios.current("home") == (shelf.versions["home"], False)
    await scenarios.delete("gone")
    del shelf.versions["vanished"]  # by another process
    for name in ("gone", "vanished"):
        with pytest.raises(NotFound, match=f"no scenario '{name}'"):
            await scenarios.current(name)
    with pytest.raises(NotFound, match="no scenario 'gone'"):
        await scenarios.delete("gone")
    shelf.is_away = True
    assert await scenarios.current("home") == (shelf.versions["home"], True)
    for name in ("gone", "vanished", "never read"):
        with pytest.raises(StoreUnreachable):
            await scenarios.current(name)
