"""The columns of one field, and of all fields of the items."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.fields.item_values import FieldValues, exact_number
from models.catalogue.fields.keyword_column import KeywordColumn, Ranks, StringOrder
from models.catalogue.fields.value_column import ValueColumn, distinct_pairs
from models.data.vocabulary import Vocabulary

NO_NUMBER, NO_POINT = float("nan"), complex("nan")


@dataclass(frozen=True, slots=True, eq=False)
class FieldColumns:
    """The values of one field by type; None where no item ever had one of that type."""

    keywords: KeywordColumn | None = None
    # float64; complex128 once an integer is not exact as a float (see `exact_number`); int64 for
    # `published_at`.
    numbers: ValueColumn[Any] | None = None
    points: ValueColumn[np.complex128] | None = None

    def updated(self, rows: NDArray[np.int64], new: FieldValues, size: int) -> FieldColumns:
        """Return these columns after rows [c], ascending, got other values; `size` is N."""
        keywords, numbers, points = self.keywords, self.numbers, self.points
        if keywords is not None or new.keywords:
            keywords = keywords or KeywordColumn.empty()
            keywords = keywords.updated(rows, new.keyword_rows, new.keywords, size)
        if numbers is not None or new.numbers:
            numbers = numbers or ValueColumn.empty(np.float64, NO_NUMBER)
            owners, values = np.array(new.number_rows, np.int64), _numbers(new.numbers)
            numbers = numbers.holding(np.result_type(numbers.dtype, values.dtype).type)
            values = values.astype(numbers.dtype, copy=False)
            numbers = numbers.updated(rows, *distinct_pairs(owners, values), size)
        if points is not None or new.points:
            points = points or ValueColumn.empty(np.complex128, NO_POINT)
            owners, places = np.array(new.point_rows, np.int64), np.array(new.points, np.complex128)
            points = points.updated(rows, *distinct_pairs(owners, places), size)
        return FieldColumns(keywords, numbers, points)

    def exists(self, size: int, rows: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
        """Mark the rows that have a value as `ValueColumn.mask` does; null is a value."""
        inside = np.zeros(size if rows is None else len(rows), np.bool_)
        if self.keywords is not None:
            inside |= self.keywords.codes.mask(self.keywords.codes.filled, size, rows)
        if self.numbers is not None:
            inside |= self.numbers.mask(self.numbers.filled, size, rows)
        return inside  # a point is also an object, which is a keyword


def _numbers(numbers: list[float]) -> NDArray[Any]:
    values = np.array(numbers, np.float64)
    # All integers below 2^53 are exact floats.
    if (np.abs(values) >= 2.0**53).any():
        return np.array([exact_number(number) for number in numbers])
    return values


@dataclass(frozen=True, slots=True, eq=False)
class ItemColumns:
    """The columns of all fields; `updated` returns the next version."""

    fields: Mapping[str, FieldColumns] = field(default_factory=dict)

    def updated(
        self, old: Mapping[str, Collection[int]], new: Mapping[str, FieldValues], size: int
    ) -> ItemColumns:
        """Return the columns after items changed.

        Args:
            old: rows that may have had values before, by field.
            new: all values of these rows, and of others that had none.
            size: N, the number of rows of the catalogue.
        """
        fields, none = dict(self.fields), FieldValues()
        for name in old.keys() | new.keys():
            given = new.get(name, none)
            changed = {*given.keyword_rows, *given.number_rows, *old.get(name, ())}
            rows = np.array(sorted(changed), np.int64)
            fields[name] = fields.get(name, FieldColumns()).updated(rows, given, size)
        return ItemColumns(fields)


NEVER = np.iinfo(np.int64).min  # published_at of items without one


@dataclass(frozen=True, slots=True, eq=False)
class ItemFields:
    """Fields by name: `item_id`, `published_at`, and those that have columns."""

    size: int  # N
    vocabulary: Vocabulary  # of ids; may have grown past N
    id_order: StringOrder  # of the vocabulary
    published: NDArray[np.int64]  # [N] microseconds UTC, or `NEVER`
    columns: ItemColumns

    def columns_of(self, name: str) -> FieldColumns:
        """Return the columns of a field other than `item_id`; without any where no item has it."""
        if name == "published_at":
            return FieldColumns(numbers=ValueColumn.of(self.published, NEVER))
        return self.columns.fields.get(name, FieldColumns())

    def id_ranks(self) -> Ranks:
        """Return the ranks of all ids in the order of their code points."""
        return self.id_order.ranks(self.size)
