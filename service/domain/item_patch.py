"""Partial changes of items, by JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from service.domain.errors import Invalid
from service.domain.records import Item, check_attributes


@dataclass(frozen=True, slots=True)
class ItemPatch:
    """Changes of some fields of an item; the others stay as they are.

    A field that is None gets its default. `attributes` are merged: a member that is None is
    removed, and objects are merged in turn.
    """

    item_id: str
    changes: Mapping[str, Any]  # by field of `Item`, of the field's type or None

    def apply(self, item: Item | None) -> Item:
        """Apply the patch to an item, or to a new item of defaults.

        Raises `Invalid` if the merged attributes break a rule.
        """
        item = Item(self.item_id) if item is None else item
        changes = dict(self.changes)
        for field in fields(Item):
            if field.name in changes and changes[field.name] is None:
                changes[field.name] = getattr(_DEFAULTS, field.name)
        if self.changes.get("attributes") is not None:
            merged = merge_patch(item.attributes, self.changes["attributes"])
            if item.attributes:  # the merged attributes may exceed bounds that the patch meets
                try:
                    check_attributes(merged, "/attributes")
                except Invalid as error:
                    detail = f"of item {self.item_id!r}, once changed: {error.detail}"
                    raise Invalid(error.pointer, detail) from None
            changes["attributes"] = merged
        return replace(item, **changes)


_DEFAULTS = Item("")


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a merge patch to a JSON value (RFC 7396, section 2); neither is changed."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
