"""Mapping of the page's roles and labels to fields of items, from the text of one setting."""

from __future__ import annotations

import re
from collections.abc import Mapping

from service.domain.records import ATTRIBUTES

DEFAULT = "price=attributes.price, url=attributes.url"
IMAGE = "image"  # the role whose pictures come from other hosts

_OWN = ("item_id", "title", "description", "tags", "categories", "published_at")
_FIELD = re.compile(rf"(?:{'|'.join(_OWN)}|{re.escape(ATTRIBUTES)}.+)")


def parse(text: str) -> Mapping[str, str]:
    """Return the field of each role or label in `role=field, label=field, …`.

    Raises:
        ValueError: naming the part that is wrong, and what is allowed.
    """
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, field = (word.strip() for word in part.partition("="))
        if not (role and equals and field):
            raise ValueError(f"{part!r} must be role=field, such as {IMAGE}={ATTRIBUTES}picture")
        if _FIELD.fullmatch(field) is None:
            allowed = f"one of {', '.join(_OWN)} and {ATTRIBUTES}NAME"
            raise ValueError(f"{field!r} in {part!r} must be {allowed}")
        if role in fields:
            raise ValueError(f"{role!r} stands there twice")
        fields[role] = field
    return fields
