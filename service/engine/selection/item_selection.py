"""The items that a filter lets pass, with counts of their values and warnings about the filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.facets import CountedItems, FacetCounts, count_values
from models.catalogue.item_filter import Condition, Group, ItemFilter
from models.catalogue.snapshot import Snapshot
from service.domain.item_selection import (
    NO_FILTER,
    FacetRequest,
    FacetResult,
    FieldCondition,
    Filter,
    FilterWarning,
    SortField,
)
from service.domain.queries import Answer
from service.domain.timestamps import to_rfc3339
from service.engine.selection.warnings import attribute_warnings, filter_warnings


@dataclass(frozen=True, slots=True, eq=False)
class ItemSelection:
    """Items that may be answered, and what an answer says about them."""

    allowed: NDArray[np.bool_]  # [N]
    warnings: tuple[FilterWarning, ...] = ()

    def with_warnings(self, more: tuple[FilterWarning, ...]) -> ItemSelection:
        """Return this selection with more warnings."""
        return replace(self, warnings=self.warnings + more)

    def described(self, answer: Answer, counted: Counted | None = None) -> Answer:
        """Return an answer with the warnings, and with counts where there are any."""
        if self.warnings:
            answer = replace(answer, warnings=(*(answer.warnings or ()), *self.warnings))
        if counted is not None:
            answer = replace(answer, total=counted.total, facets=counted.facets)
        return answer


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of items that match, and of those with each value of some fields."""

    total: int | None  # None = not all were counted
    facets: tuple[FacetResult, ...]


def select_items(
    snapshot: Snapshot,
    wanted: Filter,
    facets: Sequence[FacetRequest] = (),
    sort: Sequence[SortField] = (),
) -> ItemSelection:
    """Apply a filter to the catalogue, and look for fields in a question that no item has."""
    catalogue = snapshot.catalogue
    named = {f"/facets/{place}/field": facet.field for place, facet in enumerate(facets)}
    named |= {f"/sort/{place}/field": key.field for place, key in enumerate(sort)}
    warnings = attribute_warnings(catalogue.fields, named)
    if wanted == NO_FILTER:
        return ItemSelection(catalogue.servable, warnings)
    allowed = catalogue.allowed(item_filter(wanted))
    return ItemSelection(allowed, filter_warnings(catalogue.fields, wanted) + warnings)


def item_filter(wanted: Filter) -> ItemFilter:
    """Return a filter as the catalogue takes it."""
    if isinstance(wanted, FieldCondition):
        return Condition(wanted.field, {str(name): own for name, own in wanted.comparisons.items()})
    return Group(wanted.kind, tuple(map(item_filter, wanted.members)))


def count_items(
    snapshot: Snapshot, mask: NDArray[np.bool_], facets: Sequence[FacetRequest]
) -> Counted | None:
    """Count the values of fields over items [N]; None where no facet is asked for."""
    if not facets:
        return None
    items, fields = CountedItems(mask), snapshot.catalogue.fields
    counted = [
        _facet_result(facet, count_values(fields, facet.field, items, facet.limit))
        for facet in facets
    ]
    return Counted(items.count, tuple(counted))


def _facet_result(facet: FacetRequest, counts: FacetCounts) -> FacetResult:
    values, ends = counts.values, (counts.minimum, counts.maximum)
    if facet.field != "published_at":
        return FacetResult(facet.field, values, counts.other, *ends)
    times = tuple((_time(micros), count) for micros, count in values)
    return FacetResult(facet.field, times, counts.other, *map(_time, ends))


def _time(micros: Any) -> str | None:
    return None if micros is None else to_rfc3339(micros)
