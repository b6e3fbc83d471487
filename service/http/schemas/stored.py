"""What is answered about what is stored: items, events, profiles, and what became of writes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from service.domain.records import Event, Item, User
from service.http.schemas.rendering import written_time
from service.http.schemas.scalars import Id, Timestamp


class Stored(BaseModel):
    """How many items were stored."""

    stored: int = Field(examples=[2])


class LineError(BaseModel):
    """What was wrong with one line of an NDJSON stream."""

    line: int = Field(description="Counted from 1.")
    detail: str


class StoredLines(Stored):
    """How many lines of a stream were stored, and why the others were not."""

    errors: list[LineError] = Field(description="The first hundred.")
    failed: int = Field(description="How many lines were not stored.")


class AppendedOut(BaseModel):
    """How many events are now durable, and how many already were."""

    stored: int = Field(examples=[2])
    duplicates: int = Field(examples=[0])


class ItemOut(BaseModel):
    """One item of the catalogue."""

    item_id: Id
    title: str
    description: str
    tags: list[str]
    categories: list[str]
    attributes: dict[str, Any]
    embedding: list[float] | None
    hidden: bool
    published_at: Timestamp | None


class ItemsOut(BaseModel):
    """A page of items."""

    items: list[ItemOut]
    cursor: str | None = Field(description="For the next page; null on the last.")


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
    cursor: str | None = Field(description="For the next page; null on the last.")


class UserOut(BaseModel):
    """A profile."""

    user_id: Id
    attributes: dict[str, Any]
    interests: list[str]


class UsersOut(BaseModel):
    """A page of users."""

    users: list[UserOut]
    cursor: str | None = Field(description="For the next page; null on the last.")


class Forgotten(BaseModel):
    """How many events were forgotten."""

    forgotten: int


class Merged(BaseModel):
    """How many events moved."""

    moved: int


def item_out(item: Item) -> dict[str, Any]:
    """An `ItemOut`."""
    return {
        "item_id": item.item_id,
        "title": item.title,
        "description": item.description,
        "tags": item.tags,
        "categories": item.categories,
        "attributes": dict(item.attributes),
        "embedding": item.embedding,
        "hidden": item.hidden,
        "published_at": written_time(item.published_at),
    }


def event_out(event: Event) -> dict[str, Any]:
    """An `EventOut`."""
    return {
        "event_id": event.event_id,
        "user_id": event.user_id,
        "item_id": event.item_id,
        "type": event.type,
        "weight": event.weight,
        "timestamp": written_time(event.timestamp),
        "key": event.key,
        "value": event.value,
    }


def user_out(user: User) -> dict[str, Any]:
    """A `UserOut`."""
    return {
        "user_id": user.user_id,
        "attributes": dict(user.attributes),
        "interests": user.interests,
    }
