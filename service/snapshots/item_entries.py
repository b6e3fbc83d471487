"""Stored items as the catalogue keeps them."""

from __future__ import annotations

from models.catalogue.item_entry import ItemEntry
from service.domain.records import Item

_FIELDS = ("title", "description", "tags", "categories")


def to_entry(item: Item, dimension: int) -> ItemEntry:
    """An item as the catalogue keeps it: its texts by field, and its embedding if it fits.

    One of another dimension was stored for another encoder, and says nothing to this one.
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
    )
