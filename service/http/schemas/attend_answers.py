"""The answer of the attention operator: its documented shape, and its values for JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.domain.queries import AttendResult, MemoryRow
from service.http.schemas.answers import MemoryRows, RetrievalOut, RowsScanned
from service.http.schemas.rendering import (
    check_finite,
    fields_out,
    present_fields,
    written_time,
)
from service.http.schemas.scalars import Timestamp


class AttendedEventOut(BaseModel):
    """The event, or the entry of a profile, that a row of a user's memory stands for."""

    event_id: str | None = Field(description="Null for an entry of a profile.")
    item_id: str | None
    title: str
    type: str = Field(
        description="The type of the event, or `profile`. An event on an item that was hidden "
        "or deleted is `hidden`, and not named."
    )
    timestamp: Timestamp | None


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
    retrieval: RetrievalOut
    rows_scanned: RowsScanned = None
    memory_rows: MemoryRows = None
    model_version: str | None
    degraded: bool = Field(
        description="As in the answer to a recommendation: newer events, and ids of events, may be "
        "missing."
    )
    events: list[AttendedEventOut] | None = Field(
        description="The rows of a user's memory, in the order of `rows`; null otherwise."
    )


def attended_out(attended: AttendResult) -> dict[str, Any]:
    """Return the values of an `AttendedOut`. Raises `ArithmeticError` for a context of NaN."""
    check_finite("the context", attended.context)
    events = None if attended.events is None else [_event(row) for row in attended.events]
    always = {"ids": attended.ids, "model_version": attended.model_version, "events": events}
    return present_fields(attended) | always


def _event(row: MemoryRow) -> dict[str, Any]:
    return fields_out(row, timestamp=written_time(row.timestamp))
