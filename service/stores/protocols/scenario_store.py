"""Protocol of the scenarios in a store, which every `Store` includes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from service.domain.scenarios import Scenario


class ScenarioStore(Protocol):
    """Scenarios by name, each with all its versions."""

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
        self, *, cursor: str | None = None, limit: int = 100, deleted: bool = False
    ) -> tuple[list[Scenario], str | None]:
        """Return a page of the scenarios by name, and the cursor of the next page.

        With `deleted`, of those that were deleted, whose last version says so.
        """
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
