"""Conditions on the items of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ItemFilter:
    """Conditions that an item must meet; an empty filter lets every servable item pass.

    `Catalogue.allowed` applies them. A request brings them as `service.domain.queries.Filter`.
    """

    any: frozenset[str] = frozenset()  # categories: at least one of these
    all: frozenset[str] = frozenset()  # categories: every one of these
    none: frozenset[str] = frozenset()  # categories: not one of these
    attributes: Mapping[str, Any] = field(default_factory=dict)
    published_since: int | None = None  # inclusive
    published_until: int | None = None  # exclusive


def attribute_matches(value: Any, wanted: Any) -> bool:
    """Whether an attribute is the wanted value; a list stands for any of its values."""
    values = value if isinstance(value, list) else [value]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    # 1 == True in Python, but not in JSON.
    return any(v == w and isinstance(v, bool) == isinstance(w, bool)
               for v in values for w in accepted)  # fmt: skip
