"""Bodies of writes: items, events, profiles, merges and training."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from service.domain.item_patch import ItemPatch
from service.domain.records import MAX_LABELS, Event, Item, User
from service.http.schemas.base import Body, Labels, Weight, example
from service.http.schemas.scalars import (
    Attributes,
    EventType,
    Id,
    Options,
    Timestamp,
    Vector,
    check_dims,
)

MAX_ITEMS = 1000  # of one JSON body; NDJSON takes any number
MAX_EVENTS = 10_000


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


class TrainIn(Body):
    """Options of a training."""

    options: Options = Field(
        {},
        description="Options of `heed train`: `preset` (quick or best), `epochs`, `seed`.",
        examples=[{"preset": "best", "seed": 7}],
    )


class EmptyIn(Body):
    """An empty body: the path names the resource."""
