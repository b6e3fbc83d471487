"""Which items may be answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ItemFilter:
    """Which items may be answered; an empty one lets every servable item pass."""

    any: frozenset[str] = frozenset()  # categories: at least one of these
    all: frozenset[str] = frozenset()  # categories: every one of these
    none: frozenset[str] = frozenset()  # categories: not one of these
    attributes: Mapping[str, Any] = field(default_factory=dict)
    published_since: int | None = None  # inclusive
    published_until: int | None = None  # exclusive


def attribute_matches(value: Any, wanted: Any) -> bool:
    """Whether an attribute has the wanted value: is it, or one of a list, on either side."""
    values = value if isinstance(value, list) else [value]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    # 1 == True in Python, but not in JSON.
    return any(v == w and isinstance(v, bool) == isinstance(w, bool)
               for v in values for w in accepted)  # fmt: skip
