"""Fields of items beside their scores in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from models.compute.checkpoint import checkpoint
from service.domain.item_selection import ATTRIBUTES
from service.domain.queries import AnswerItem
from service.domain.records import Item
from service.domain.timestamps import to_rfc3339

_ABSENT = object()


def add_fields(
    items: Sequence[AnswerItem], stored: Sequence[Item | None], names: Sequence[str]
) -> None:
    """Add those of the fields that an item has to each item of an answer."""
    for item, record in zip(items, stored, strict=True):
        checkpoint()
        found = {} if record is None else {name: _field(record, name) for name in names}
        item["fields"] = {name: value for name, value in found.items() if value is not _ABSENT}


def _field(item: Item, name: str) -> Any:
    if name.startswith(ATTRIBUTES):
        return _member(item.attributes, name.removeprefix(ATTRIBUTES))
    if name == "published_at":
        return _ABSENT if item.published_at is None else to_rfc3339(item.published_at)
    return getattr(item, name)


def _member(members: Mapping[str, Any], path: str) -> Any:
    """Return the member at a path; a name that holds dots itself goes before nested ones."""
    if path in members:
        return members[path]
    for at, letter in enumerate(path):
        inner = members.get(path[:at]) if letter == "." else None
        if isinstance(inner, Mapping):
            found = _member(inner, path[at + 1 :])
            if found is not _ABSENT:
                return found
    return _ABSENT
