"""Bodies and answers of scenarios."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.domain.scenarios import Scenario
from service.http.schemas.base import Body
from service.http.schemas.rendering import written_time
from service.http.schemas.scalars import Name, Timestamp

_SAVED: dict[str, Any] = {
    "question": "recommend",
    "limit": 10,
    "filter": {"none": [{"field": "categories", "eq": "draft"}]},
    "rules": [{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
    "at_most": [{"field": "categories", "count": 2}],
}


class ScenarioIn(Body):
    """A question to save: its name, and any of its fields, which are checked as in the question."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [_SAVED]})

    question: str = Field(
        description="recommend, search, similar, popular, together or rows.", examples=["popular"]
    )
    fallback: Name | None = Field(
        None,
        description="A scenario that fills up an answer with fewer items than `limit`. It is asked "
        "with those of the request's fields that it has; what these narrow holds for all items.",
    )


class ScenarioQuestion(Body):
    """Fields that narrow a scenario, or that it leaves open."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"examples": [{"user_id": "ada", "limit": 5}]}
    )


class ScenarioOut(BaseModel):
    """One version of a scenario."""

    name: str
    version: int = Field(description="Versions of a name count from 1.")
    written_at: Timestamp
    scenario: dict[str, Any] | None = Field(
        description="As it was put; null where this version is a deletion."
    )


class ScenariosOut(BaseModel):
    """A page of scenarios."""

    scenarios: list[ScenarioOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


class VersionsOut(BaseModel):
    """A page of the versions of a scenario, the last first."""

    versions: list[ScenarioOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


def scenario_out(scenario: Scenario) -> dict[str, Any]:
    """Return the values of a `ScenarioOut`."""
    return {
        "name": scenario.name,
        "version": scenario.version,
        "written_at": written_time(scenario.written),
        "scenario": scenario.body,
    }
