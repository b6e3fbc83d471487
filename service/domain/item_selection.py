"""Selection of items: filters, facets, sorting, and warnings about values that no item has.

Operands of comparisons are JSON values; times are integer microseconds UTC.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Operator = Literal["eq", "in", "gt", "gte", "lt", "lte", "exists", "contains", "within_km"]

ATTRIBUTES = "attributes."  # the prefix of an attribute's field name
MAX_FIELD_NAME = 1_000  # characters


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """Comparisons that one value of an item in a field must meet.

    The operand of `within_km` is (latitude, longitude, kilometres).
    """

    field: str
    comparisons: Mapping[Operator, Any]
    # JSON pointers to the field's name and to the operand of each operator, for warnings
    pointers: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class FilterGroup:
    """Filters of which all, at least one, or none must hold."""

    kind: Literal["all", "any", "none"]
    members: tuple[Filter, ...] = ()


Filter: TypeAlias = FieldCondition | FilterGroup

NO_FILTER = FilterGroup("all")  # holds for every item
_SLOW = 20  # cost of comparing strings or distances, in comparisons of numbers
_LISTED = 50  # values of `in` that cost one more comparison


def comparisons(wanted: Filter) -> float:
    """Return the cost of a filter for each item, in comparisons of numbers."""
    if isinstance(wanted, FilterGroup):
        return sum(map(comparisons, wanted.members))
    total = 0.0
    for operator, operand in wanted.comparisons.items():
        is_slow = operator in ("contains", "within_km") or (
            operator in ("gt", "gte", "lt", "lte") and isinstance(operand, str)
        )
        total += _SLOW if is_slow else 1 + (len(operand) / _LISTED if operator == "in" else 0)
    return total


@dataclass(frozen=True, slots=True)
class FacetRequest:
    """A field whose values are counted."""

    field: str
    limit: int = 10


@dataclass(frozen=True, slots=True)
class FacetResult:
    """Counts of a field's values, the most frequent first."""

    field: str
    values: tuple[tuple[Any, int], ...]
    other: int  # sum of the counts of the values that are left out
    minimum: float | str | None = None  # of the numbers or times
    maximum: float | str | None = None


@dataclass(frozen=True, slots=True)
class SortField:
    """A field that items are ordered by; items without it come last."""

    field: str
    descending: bool = False


@dataclass(frozen=True, slots=True)
class FilterWarning:
    """A part of a question that no item can meet, though it is well formed."""

    pointer: str
    detail: str
