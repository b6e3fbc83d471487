"""Conversion of stored items to entries of the catalogue."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from models.catalogue.item_entry import ItemEntry
from models.text.keywords import normalize_keyword
from models.text.markup import plain_text
from service.domain.records import ATTRIBUTES, Item
from service.domain.settings import KEYWORD_FIELDS

# Items share the names of their attributes.
_normal_name = lru_cache(maxsize=4_096)(normalize_keyword)
_FIELDS = ("title", "description", "tags", "categories")


def to_entry(
    item: Item, dimension: int, keyword_fields: Sequence[str] = KEYWORD_FIELDS
) -> ItemEntry:
    """Convert an item to an entry of the catalogue.

    An embedding of another dimension belongs to another encoder, and is left out. Keywords are the
    item's id and the attributes named by `keyword_fields`, whatever the case and the separators of
    their names; `NAME.MEMBER` names a member of an object.
    """
    own = item.embedding
    if own is not None and len(own) != dimension:
        own = None
    labels = ", ".join(item.tags), ", ".join(item.categories)
    texts = [searched_text(text) for text in (item.title, item.description, *labels)]
    wanted = frozenset(map(_normal_name, keyword_fields))
    return ItemEntry(
        item.item_id,
        plain_text(item.title),
        {name: text for name, text in zip(_FIELDS, texts, strict=True) if text},
        item.categories,
        item.attributes,
        own,
        item.hidden,
        item.published_at,
        item.tags,
        {"item_id": [item.item_id], **dict(_keywords(item.attributes, wanted))},
    )


def searched_text(text: str) -> str:
    """Return a text as its words and its meaning are taken from: without markup, in NFKC."""
    return unicodedata.normalize("NFKC", plain_text(text))


def _keywords(
    members: Mapping[str, Any], wanted: frozenset[str], path: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Iterate over the names of wanted attributes, and their values as strings."""
    for name, value in members.items():
        if isinstance(value, Mapping):
            yield from _keywords(value, wanted, f"{path}{name}.")
        elif _normal_name(path + name) in wanted:
            values = value if isinstance(value, list | tuple) else [value]
            yield ATTRIBUTES + path + name, [text for each in values if (text := _written(each))]


def _written(value: object) -> str:
    """Return a string or a number as it is typed; empty for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value)
