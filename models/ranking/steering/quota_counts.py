"""Counts of the values that the items of an answer share, against the most that are allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.fields.item_fields import ItemFields
from models.catalogue.fields.item_values import Special
from models.catalogue.fields.value_column import ValueColumn
from models.ranking.steering.item_steering import Quota


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """Distinct values of one column among the items of a pool; their groups are consecutive."""

    column: ValueColumn[Any]
    values: NDArray[Any]  # [V]
    first: int  # the group of the first value


@dataclass(slots=True, eq=False)
class QuotaCounts:
    """The items of a pool that may still be taken, while quotas fill up.

    A group is one value of one quota's field. An item without a value is in no group; one with
    several is in the group of each.
    """

    open: NDArray[np.bool_]  # [P] may be taken
    _left: list[int]  # [G] how many more items each group takes
    _groups: NDArray[np.int64]  # of item p: _groups[_group_at[p]:_group_at[p + 1]]
    _group_at: NDArray[np.int64]  # [P + 1]
    _members: NDArray[np.int64]  # of group g: _members[_member_at[g]:_member_at[g + 1]]
    _member_at: NDArray[np.int64]  # [G + 1]
    _columns: tuple[_Column, ...]

    @classmethod
    def over(
        cls, fields: ItemFields, quotas: Sequence[Quota], rows: NDArray[np.int64]
    ) -> QuotaCounts:
        """Return the counts of a pool of distinct item rows [P], none of them taken yet.

        The pool has no items that a quota names as shown.
        """
        owners, groups, begins = (list[NDArray[np.int64]]() for _ in range(3))
        left, columns, pairs = list[int](), list[_Column](), 0
        by_row = np.argsort(rows) if quotas else rows
        for quota in quotas:
            for column, ignored in _columns_of(fields, quota.field):
                place, value = column.pairs_of(rows[by_row])
                owner = by_row[place]
                if ignored is not None:
                    owner, value = owner[value != ignored], value[value != ignored]
                order = np.argsort(value)
                owner, value = owner[order], value[order]
                is_first = np.ones(len(value), np.bool_)
                is_first[1:] = value[1:] != value[:-1]
                first = np.flatnonzero(is_first)
                owners.append(owner)
                groups.append(np.cumsum(is_first) + (len(left) - 1))
                begins.append(first + pairs)
                columns.append(_Column(column, value[first], len(left)))
                room = np.full(len(first), quota.most)
                if quota.shown:
                    counted = np.sort(column.pairs_of(np.unique(quota.shown))[1])
                    room += np.searchsorted(counted, value[first])
                    room -= np.searchsorted(counted, value[first], side="right")
                left += room.tolist()
                pairs += len(owner)
        none = np.zeros(0, np.int64)
        owner = np.concatenate([*owners, none])
        by_owner = np.argsort(owner)
        group = np.concatenate([*groups, none])
        is_open = np.ones(len(rows), np.bool_)
        is_open[owner[np.array(left, np.int64)[group] <= 0]] = False
        return cls(
            is_open,
            left,
            group[by_owner],
            np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))]),
            owner,
            np.concatenate([*begins, [pairs]]),
            tuple(columns),
        )

    @property
    def constrains(self) -> bool:
        """Report whether taking an item may close others."""
        return len(self._left) > 0

    def take(self, place: int) -> None:
        """Take the item at a place, and close the items of the groups that it fills."""
        self.open[place] = False
        begin, end = self._group_at[place : place + 2].tolist()
        for group in self._groups[begin:end].tolist():
            self._left[group] -= 1
            if self._left[group] <= 0:
                begin, end = self._member_at[group : group + 2].tolist()
                self.open[self._members[begin:end]] = False

    def copy(self) -> QuotaCounts:
        """Return counts that go on from here by themselves."""
        return replace(self, open=self.open.copy(), _left=self._left.copy())

    def closed_rows(self, size: int) -> NDArray[np.bool_]:
        """Mark all items of the catalogue that have a value of a full group, bool [size]."""
        closed = np.zeros(size, np.bool_)
        for one in self._columns:
            left = np.array(self._left[one.first : one.first + len(one.values)], np.int64)
            full = one.values[left <= 0]
            if len(full):
                closed |= one.column.mask(partial(np.isin, test_elements=full), size)
        return closed


def _columns_of(fields: ItemFields, name: str) -> Iterator[tuple[ValueColumn[Any], int | None]]:
    """Yield the columns whose values count, keywords and numbers, each with a value that does not.

    An attribute that is an object has members, which are fields of their own.
    """
    columns = fields.columns_of(name)
    if columns.keywords is not None:
        yield columns.keywords.codes, Special.OBJECT.value
    if columns.numbers is not None:
        yield columns.numbers, None
