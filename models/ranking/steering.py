"""Steering: rules as boosts and masks over item rows, pins, quotas and exploration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import ItemFields, ValueColumn
from models.catalogue.item_values import Special

UNIT_OF = 100  # scores, the largest, whatever the length of the answer


def boost_unit(scores: NDArray[np.floating[Any]]) -> float:
    """Return the standard deviation of the `UNIT_OF` largest scores [n]; 1 if all are equal."""
    largest = -np.sort(-scores.astype(np.float64))[:UNIT_OF]
    deviation = float(largest.std()) if len(largest) else 0.0
    return deviation if deviation > 0 else 1.0


FEW_EVENTS = 20  # an item with fewer is explored


class Pin(NamedTuple):
    """An item that stands at a place whatever its score."""

    row: int
    position: int  # from 1


class Quota(NamedTuple):
    """The most items of an answer that may share a value of a field."""

    field: str  # of `ItemFields`, but not `item_id`
    most: int
    shown: tuple[int, ...] = ()  # rows of items before the answer, which count too


@dataclass(frozen=True, slots=True, eq=False)
class ItemSteering:
    """Instructions about a ranking of the N items of a catalogue.

    Boosts are added to the scores, or are relative: in `boost_unit` of the scores that are ranked.
    """

    boost: NDArray[np.float32] | None = None  # [N]
    buried: NDArray[np.bool_] | None = None  # [N] behind all others
    pins: tuple[Pin, ...] = ()  # of distinct rows and positions
    quotas: tuple[Quota, ...] = ()
    explore: float = 0.0  # share of the places for items of fewer than `FEW_EVENTS` events
    seed: int = 0  # of the random draws of `explore`
    is_relative: bool = False

    @property
    def pinned(self) -> NDArray[np.int64]:
        return np.array([pin.row for pin in self.pins], dtype=np.int64)

    def boosts_of(self, rows: NDArray[np.integer]) -> NDArray[np.float32] | None:
        """Return the boosts of some rows [L]; None without any rule that boosts."""
        return None if self.boost is None else self.boost[rows]

    def scaled(self, scores: NDArray[np.floating[Any]]) -> ItemSteering:
        """Return this steering with boosts that are added, for a ranking by these scores [n].

        The unit stays so small that every boost is a finite float32: sums of weights may be 1e38.
        """
        if self.boost is None or not self.is_relative:
            return self
        largest = max(1.0, float(np.abs(self.boost).max(initial=0.0)))
        # Half of it, so that no boost is rounded to infinity.
        unit = min(boost_unit(scores), float(np.finfo(np.float32).max) / largest / 2)
        return replace(self, boost=self.boost * np.float32(unit), is_relative=False)

    @property
    def reorders(self) -> bool:
        """Report whether more than the first items by score must be looked at."""
        return self.buried is not None or bool(self.quotas) or self.explore > 0


NO_STEERING = ItemSteering()


class _Column(NamedTuple):
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
        none = np.zeros(0, np.int64)
        if not quotas:
            begins_at = np.zeros(len(rows) + 1, np.int64)
            return cls(np.ones(len(rows), np.bool_), [], none, begins_at, none, begins_at[:1], ())
        owners, groups, begins = (list[NDArray[np.int64]]() for _ in range(3))
        left, columns, pairs = list[int](), list[_Column](), 0
        by_row = np.argsort(rows)
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
        """Return counts that change apart from these."""
        return replace(self, open=self.open.copy(), _left=self._left.copy())

    def closed_rows(self, size: int) -> NDArray[np.bool_]:
        """Mark all items of the catalogue that have a value of a full group, bool [size]."""
        closed = np.zeros(size, np.bool_)
        for column, values, first in self._columns:
            left = np.array(self._left[first : first + len(values)], np.int64)
            full = values[left <= 0]
            if len(full):
                closed |= column.mask(partial(np.isin, test_elements=full), size)
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
