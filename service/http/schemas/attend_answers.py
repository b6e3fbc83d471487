"""The answer of the attention operator: its documented shape."""

from __future__ import annotations

from pydantic import BaseModel, Field


class AttendedOut(BaseModel):
    """Attended rows by descending mean weight."""

    rows: list[int]
    ids: list[str] | None = Field(
        description="Event ids of a user's memory, item ids of the catalogue; null otherwise. An "
        "event id is empty where the database does not answer."
    )
    weights: list[list[float]] = Field(description="For each head, the weight of each row.")
    context: list[float] = Field(description="Over all attended rows, whatever the limit.")
    mass: list[float] = Field(description="For each head, the share of the softmax attended.")
    retrieval: str = Field(
        description="`exact`, or `coarse` where rows were approximated or left out."
    )
    model_version: str | None
    degraded: bool = Field(
        description="As in the answer to a recommendation: newer events, and ids of events, may be "
        "missing."
    )
