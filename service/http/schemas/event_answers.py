"""Events that a search of a history found: their documented shape, and their values for JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.domain.queries import Answer
from service.http.schemas.answers import MarkedOut, WarningOut, answer_out
from service.http.schemas.rendering import written_time
from service.http.schemas.scalars import Id, Timestamp


class FoundEventOut(BaseModel):
    """One event, with what is answered of its item."""

    event_id: str | None = Field(
        description="Null for an event of the request's `history`, and where `degraded` is true "
        "because the store does not answer."
    )
    item_id: Id
    title: str
    type: str
    timestamp: Timestamp
    score: float
    parts: dict[str, float] = Field(
        description="The addends of the score: `match` of the item with the query, and `recency` "
        "of the event, at most 0.5 / `temperature` and half of it at an age of 30 days."
    )
    weight: float = Field(description="The softmax weight of the event among all of the history.")
    matched: dict[str, float] = Field(
        description="The share of the item's weight that each field's key holds."
    )
    highlights: dict[str, list[MarkedOut]] | None = Field(
        None, description="The title and a snippet of the description, as spans."
    )
    fields: dict[str, Any] | None = Field(
        None, description="The fields that were asked for, as far as the item has them."
    )


class FoundEventsOut(BaseModel):
    """The answer to a search with `"memory": "history"`, best event first."""

    events: list[FoundEventOut]
    model_version: str
    retrieval: str = Field(description="`exact`, or `coarse` where keys were left out.")
    degraded: bool = Field(description="As in the answer to a search of the catalogue.")
    keys_attended: int = Field(description="Number of field keys that were attended.")
    mass: float = Field(
        description="Share of the softmax over the field keys of the history's items that was "
        "attended."
    )
    corrections: dict[str, list[str]] | None = Field(
        None, description="As in the answer to a search of the catalogue, whose words they are."
    )
    did_you_mean: str | None = Field(None, description="The query in another spelling: an offer.")
    warnings: list[WarningOut] | None = Field(
        None, description="Left out where there is nothing to say."
    )
    scenario: str | None = Field(None, description="The scenario that was asked.")
    scenario_version: int | None = None


def found_events_out(answer: Answer) -> dict[str, Any]:
    """Return the values of a `FoundEventsOut` of an answer whose items are `AnswerEvent`s."""
    out = answer_out(answer)
    events = [{**each, "timestamp": written_time(each["timestamp"])} for each in out.pop("items")]
    return {"events": events, **out}
