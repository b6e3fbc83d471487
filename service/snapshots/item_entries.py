"""Conversion of stored items to entries of the catalogue."""

from __future__ import annotations

from models.catalogue.item_entry import ItemEntry
from service.domain.records import Item

_FIELDS = ("title", "description", "tags", "categories")


def to_entry(item: Item, dimension: int) -> ItemEntry:
    """Convert an item to an entry of the catalogue.

    An embedding of another dimension belongs to another encoder, and is left out.
    """
    own = item.embedding
    if own is not None and len(own) != dimension:
        own = None
    texts = (item.title, item.description, ", ".join(item.tags), ", ".join(item.categories))
    return ItemEntry(
        item.item_id,
        item.title,
        {name: text for name, text in zip(_FIELDS, texts, strict=True) if text},
        item.categories,
        item.attributes,
        own,
        item.hidden,
        item.published_at,
        item.tags,
    )
