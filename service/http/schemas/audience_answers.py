"""Audiences and affinities: their documented shape, and their values for JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.domain.ready_queries import AffinitiesAnswer, AudienceAnswer
from service.http.schemas.answers import (
    ContributionOut,
    MemoryRows,
    RemainderOut,
    RetrievalOut,
    RowsScanned,
    explanations_out,
)
from service.http.schemas.rendering import check_finite, fields_out, present_fields
from service.http.schemas.scalars import Id


class AudienceUserOut(BaseModel):
    """One user of an audience."""

    user_id: Id
    score: float = Field(
        description="Of the item, above the level of the user's scores of the reference items."
    )
    parts: dict[str, float] = Field(description="The addends of the score, by name.")
    reason: str = Field(description="`personal`: by the trained model; `content`: without one.")
    explanation: list[ContributionOut] | None = Field(
        None, description="The events that raise the score most. Left out with `explain` 0."
    )
    remainder: RemainderOut | None = Field(
        None, description="The contribution of all other events. Left out with `explain` 0."
    )


class AudienceOut(BaseModel):
    """Users for an item, best first."""

    users: list[AudienceUserOut]
    model_version: str
    scored: int = Field(
        description="Number of users whose scores were compared. If these are fewer than the "
        "`candidates`, they are those with most events on items that the same users take, or that "
        "are similar."
    )
    candidates: int = Field(description="Number of users who may be in the audience.")
    retrieval: RetrievalOut
    rows_scanned: RowsScanned = None
    memory_rows: MemoryRows = None
    degraded: bool


class AffinityOut(BaseModel):
    """One value of a field, as a user attends to it."""

    value: str | float | bool | None
    mass: float = Field(
        description="Softmax weight of the user's events on items with the value: the mean over "
        "heads and the 100 best items. An item with several values counts for each."
    )
    score: float | None = Field(
        description="Mean score of items with the value, above that of all items, or of an even "
        "sample of many; null where none of these has the value."
    )
    events: int = Field(description="Number of events on items with the value.")


class AffinitiesOut(BaseModel):
    """Values of a field, by falling attention."""

    field: str
    values: list[AffinityOut]
    model_version: str
    retrieval: RetrievalOut
    rows_scanned: RowsScanned = None
    memory_rows: MemoryRows = None
    degraded: bool


def audience_out(answer: AudienceAnswer) -> dict[str, Any]:
    """Return the values of an `AudienceOut`. Raises `ArithmeticError` for a score of NaN."""
    check_finite("scores", [user["score"] for user in answer.users])
    return present_fields(answer, users=explanations_out(answer.users))


def affinities_out(answer: AffinitiesAnswer) -> dict[str, Any]:
    """Return the values of an `AffinitiesOut`. Raises `ArithmeticError` for a score of NaN."""
    check_finite("masses", [each.mass for each in answer.values])
    check_finite("scores", [each.score for each in answer.values if each.score is not None])
    return present_fields(answer, values=[fields_out(each) for each in answer.values])
