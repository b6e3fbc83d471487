"""Bodies, parameters and answers of the routes of records: items, events and users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from service.domain.records import MAX_LABELS, Event, Item, ItemPatch, User
from service.domain.timestamps import to_rfc3339
from service.http.limits import segment
from service.questions.scalars import (
    NAME_SCHEMA,
    Attributes,
    Body,
    EventType,
    Id,
    Labels,
    Limit,
    Params,
    Timestamp,
    Vector,
    Weight,
    check_dims,
    check_name,
    example,
)

Row = TypeVar("Row")
Record = TypeVar("Record")

MAX_ITEMS = 1000  # of one JSON body; NDJSON takes any number
MAX_EVENTS = 10_000
_SLICE = 50  # rows, some 0.3 ms

PathName = Annotated[
    str, AfterValidator(segment), AfterValidator(check_name), WithJsonSchema(NAME_SCHEMA)
]

# ------------------------------------------------------------------------------ requests


class Page(Params):
    """Query parameters of a page of a list."""

    cursor: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The `cursor` of the previous page; by default the first page."
    )
    limit: Limit = 100


class ItemParams(Params):
    """Query parameters of one item."""

    plain: bool = Field(False, description="Answer titles and descriptions without their markup.")


class ItemsPage(ItemParams, Page):
    """Query parameters of a page of items."""

    hidden: bool = Field(False, description="Only items that are hidden.")


class UsersPage(Page):
    """Query parameters of a page of users."""

    prefix: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] = Field(
        "", description="Only users whose id begins with this, upper and lower case as it is."
    )
    counts: bool = Field(False, description="Count the stored events of each user.")


class ItemDetails(Body):
    """Fields of an item; null stands for the default."""

    title: str | None = Field("", examples=["Asyncio from the ground up"])
    description: str | None = ""
    tags: Labels | None = Field([], max_length=MAX_LABELS, examples=[["python", "async"]])
    categories: Labels | None = Field([], max_length=MAX_LABELS, examples=[["talk"]])
    attributes: Attributes | None = Field({})
    embedding: Vector | None = Field(
        None, description="Replaces the embedding of the text; HEED_EMBEDDING_DIM numbers."
    )
    hidden: bool | None = Field(False, description="Stays in histories, and is in no answer.")
    published_at: Timestamp | None = None

    def to_patch(self, item_id: str, dims: int, pointer: str = "") -> ItemPatch:
        """Return the changes of the fields that the request has.

        Raises `Invalid` unless the embedding has `dims` dimensions.
        """
        check_dims(self.embedding, dims, f"{pointer}/embedding")
        changes = {name: getattr(self, name) for name in self.model_fields_set - {"item_id"}}
        for name in ("tags", "categories"):
            if changes.get(name) is not None:
                changes[name] = tuple(changes[name])
        return ItemPatch(item_id, changes)


class ItemPatchIn(ItemDetails):
    """A JSON Merge Patch (RFC 7396) of an item: fields that are left out stay as they are."""

    model_config = example(attributes={"stock": 7, "discount": None})


class ItemIn(ItemDetails):
    """One item of the catalogue."""

    item_id: Id

    def to_item(self, dims: int, pointer: str = "") -> Item:
        """Return the record. Raises `Invalid` unless the embedding has `dims` dimensions."""
        item = self.to_patch(self.item_id, dims, pointer).apply(None)
        # A patch removes a member by null, and an item may have a null.
        return replace(item, attributes=self.attributes or {})


class ItemsIn(Body):
    """Items to insert or replace, all or none."""

    model_config = example(
        items=[
            {
                "item_id": "talk-7",
                "title": "Asyncio from the ground up",
                "tags": ["async"],
                "categories": ["talk"],
                "attributes": {"language": "en"},
                "published_at": "2026-01-31T09:30:00Z",
            }
        ]
    )

    items: Annotated[list[ItemIn], Field(max_length=MAX_ITEMS)]
    update: bool = Field(
        False,
        description="Change only the fields that each item has, by JSON Merge Patch (RFC 7396), "
        "instead of replacing the item.",
    )


class EventIn(Body):
    """One event of a user on an item."""

    user_id: Id
    item_id: Id
    event_id: Id | None = Field(
        None, description="Makes the event idempotent; without it each event is new."
    )
    type: EventType = "view"
    weight: Weight = 1.0
    timestamp: Timestamp | None = Field(None, description="Time of the event; by default now.")
    key: Vector | None = Field(
        None,
        description="Key of the event's row in place of the item's; HEED_EMBEDDING_DIM numbers.",
    )
    value: Vector | None = Field(
        None,
        description="Value of the event's row in place of the item's; HEED_EMBEDDING_DIM numbers.",
    )

    def to_event(self, dims: int, pointer: str = "") -> Event:
        """Return the record. Raises `Invalid` when a vector has other than `dims` dimensions."""
        if self.key is not None or self.value is not None:
            check_dims(self.key, dims, f"{pointer}/key")
            check_dims(self.value, dims, f"{pointer}/value")
        return Event(**vars(self))


class EventsIn(Body):
    """Events to append, all or none."""

    model_config = example(
        events=[
            {
                "event_id": "e-1",
                "user_id": "ada",
                "item_id": "talk-7",
                "type": "view",
                "weight": 1.0,
                "timestamp": "2026-01-31T09:30:00Z",
            }
        ]
    )

    events: Annotated[list[EventIn], Field(max_length=MAX_EVENTS)]


class UserIn(Body):
    """A profile. Its interests, categories or item ids, are rows of the user's memory."""

    model_config = example(attributes={"country": "NL"}, interests=["talk", "talk-7"])

    attributes: Attributes = Field({})
    interests: Labels = Field([], max_length=MAX_LABELS, examples=[["talk", "item-1"]])

    def to_user(self, user_id: str) -> User:
        """Return the record."""
        return User(user_id, self.attributes, tuple(self.interests))


class MergeIn(Body):
    """The user whose history and profile are moved."""

    model_config = example(**{"from": "anonymous-42"})

    # Read by its wire name only; `from` is no name in Python.
    source: Id = Field(alias="from", description="For example the anonymous id before sign-in.")


async def convert_rows(rows: Sequence[Row], convert: Callable[[int, Row], Record]) -> list[Record]:
    """Convert rows, by their position and themselves, and return the records in their order.

    The event loop runs what is due after each slice of rows: a thousand rows at once would delay
    every question that arrives meanwhile.
    """
    records: list[Record] = []
    for start in range(0, len(rows), _SLICE):
        if start:
            await asyncio.sleep(0)
        part = rows[start : start + _SLICE]
        records.extend(convert(start + i, row) for i, row in enumerate(part))
    return records


# ------------------------------------------------------------------------------- answers


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


def fields_of(record: Any, **replaced: object) -> dict[str, Any]:
    """Return the fields of a record, some replaced; `asdict` would copy arrays."""
    return {name: getattr(record, name) for name in record.__slots__} | replaced


def item_out(item: Item) -> dict[str, Any]:
    """Return the values of an `ItemOut`."""
    return fields_of(item, published_at=written_time(item.published_at))


def events_out(events: Sequence[Event], *, cursor: str | None) -> dict[str, Any]:
    """Return the values of an `EventsOut`."""
    listed = [fields_of(event, timestamp=written_time(event.timestamp)) for event in events]
    return {"events": listed, "cursor": cursor}


def written_time(micros: int | None) -> str | None:
    """Return a time in RFC 3339, None for None."""
    return None if micros is None else to_rfc3339(micros)
