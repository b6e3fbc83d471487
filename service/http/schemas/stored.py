"""Answers about stored items, events and profiles, and about writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from service.domain.ready_queries import ItemEventsAnswer
from service.domain.records import Event, Item
from service.http.schemas.rendering import fields_out, written_time
from service.http.schemas.scalars import Attributes, Id, Timestamp


class Stored(BaseModel):
    """Number of stored items."""

    stored: int = Field(examples=[2])


class StoredUpdates(Stored):
    """Number of updated items, and the new ones among them."""

    created: list[str] = Field(
        description="Items that were not in the catalogue, with the fields of the request alone.",
        examples=[[]],
    )


class LineError(BaseModel):
    """Error in one line of an NDJSON stream."""

    line: int = Field(description="Counted from 1.")
    detail: str


class StoredLines(Stored):
    """Numbers of stored and failed lines of a stream, and the errors."""

    errors: list[LineError] = Field(description="Errors of the first hundred failed lines.")
    failed: int = Field(description="Number of lines that were not stored.")


class AppendedOut(BaseModel):
    """Numbers of stored events, of events that were stored before, and of unknown items."""

    stored: int = Field(examples=[2])
    duplicates: int = Field(examples=[0])
    unknown_items: int | None = Field(
        None,
        description="Number of the items that the catalogue does not have. Left out if it has all.",
    )
    unknown_examples: list[Id] | None = Field(
        None, description="The first of these items, at most five."
    )


class ItemOut(BaseModel):
    """One item of the catalogue."""

    item_id: Id
    title: str
    description: str
    tags: list[str]
    categories: list[str]
    attributes: Attributes
    embedding: list[float] | None
    hidden: bool
    published_at: Timestamp | None


class ItemsOut(BaseModel):
    """A page of items."""

    items: list[ItemOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


class EventOut(BaseModel):
    """One event of a history."""

    event_id: Id
    user_id: Id
    item_id: Id
    type: str
    weight: float
    timestamp: Timestamp
    key: list[float] | None
    value: list[float] | None


class EventsOut(BaseModel):
    """A page of a history, newest first."""

    events: list[EventOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


class ItemEventOut(BaseModel):
    """One event of an item."""

    user_id: Id
    type: str
    timestamp: Timestamp


class ItemEventsOut(BaseModel):
    """The newest events of an item, newest first."""

    events: list[ItemEventOut]
    total: int = Field(description="Number of all events of the item.")
    degraded: bool


class UserOut(BaseModel):
    """A profile."""

    user_id: Id
    attributes: Attributes
    interests: list[str]


class ListedUserOut(UserOut):
    """A profile in a list."""

    events: int | None = Field(
        None, description="Number of stored events. Left out unless `counts` asks for it."
    )


class UsersOut(BaseModel):
    """A page of users."""

    users: list[ListedUserOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


class Forgotten(BaseModel):
    """Number of deleted events."""

    forgotten: int


class Merged(BaseModel):
    """Number of moved events."""

    moved: int


def item_out(item: Item) -> dict[str, Any]:
    """Return the values of an `ItemOut`."""
    return fields_out(item, published_at=written_time(item.published_at))


def item_events_out(answer: ItemEventsAnswer) -> dict[str, Any]:
    """Return the values of an `ItemEventsOut`."""
    listed = [{**event, "timestamp": written_time(event["timestamp"])} for event in answer.events]
    return fields_out(answer, events=listed)


def events_out(events: Sequence[Event], *, cursor: str | None) -> dict[str, Any]:
    """Return the values of an `EventsOut`."""
    listed = [fields_out(event, timestamp=written_time(event.timestamp)) for event in events]
    return {"events": listed, "cursor": cursor}
