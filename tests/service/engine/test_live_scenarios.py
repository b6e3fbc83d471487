"""Scenarios in use, and the last ones read while the store cannot be reached."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from service.domain.errors import NotFound, StoreUnreachable
from service.domain.scenarios import Scenario
from service.engine.live_scenarios import LiveScenarios
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


def test_the_last_version_read_answers_while_the_store_is_away() -> None:
    """A scenario is read anew by every request, and said to be stale where that fails."""
    shelf = Shelf()
    scenarios = LiveScenarios(cast(Store, shelf))
    for version in (1, 2):
        shelf.versions["home"] = Scenario("home", version, 0, {"question": "popular"})
        assert asyncio.run(scenarios.current("home")) == (shelf.versions["home"], False)
    shelf.is_away = True
    assert asyncio.run(scenarios.current("home")) == (shelf.versions["home"], True)


def test_what_was_deleted_or_never_read_is_not_answered() -> None:
    """A deleted scenario stays deleted in an outage, and an unread one needs the store."""
    shelf = Shelf()
    scenarios = LiveScenarios(cast(Store, shelf))
    shelf.versions["home"] = Scenario("home", 1, 0, {"question": "popular"})
    asyncio.run(scenarios.current("home"))
    del shelf.versions["home"]
    with pytest.raises(NotFound, match="no scenario 'home'"):
        asyncio.run(scenarios.current("home"))
    shelf.is_away = True
    with pytest.raises(NotFound, match="no scenario 'home'"):
        asyncio.run(scenarios.current("home"))
    with pytest.raises(StoreUnreachable):
        asyncio.run(scenarios.current("other"))
