"""Columns of numbers and of places, and distances on the Earth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import asin, cos, degrees, pi, radians, sin
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.catalogue.cow_columns import CowArray
from models.compute.checkpoint import checkpoint

RADIUS = 6371.0088  # km, the mean of the Earth's (IUGG)
_DEGREE = radians(1) * RADIUS  # km for each degree of latitude
_SLACK = 1e-9  # degrees by which rounding may move a point out of its band of latitudes


def within(points: NDArray[np.complex128], lat: float, lon: float, km: float) -> NDArray[np.bool_]:
    """Mark the points [n] at most `km` from a place, bool [n]; NaN is no point.

    Points are latitude + longitude·i in degrees. The haversine is computed of those alone that are
    in the box of latitudes and longitudes around the circle.
    """
    reach = km / _DEGREE + _SLACK
    band: NDArray[np.bool_] = (points.real >= lat - reach) & (points.real <= lat + reach)
    at = np.flatnonzero(band)
    width = _longitudes(lat, km)
    if width < 180:
        apart = np.abs(points.imag.take(at) - lon)
        at = at[np.minimum(apart, 360 - apart) <= width + _SLACK]
    inside = np.zeros(len(points), np.bool_)
    bound = sin(min(km / RADIUS, pi) / 2) ** 2
    inside[at] = _haversines(points.take(at), lat, lon) <= bound
    return inside


def _longitudes(lat: float, km: float) -> float:
    """Return by how many degrees of longitude a point within `km` may differ; 180 near a pole."""
    angle = km / RADIUS
    if abs(radians(lat)) + angle >= pi / 2:
        return 180.0
    return degrees(asin(sin(angle) / cos(radians(lat))))


def distances(points: NDArray[np.complex128], lat: float, lon: float) -> NDArray[np.float64]:
    """Return the great-circle distances [n] in km, by the haversine formula (Sinnott 1984)."""
    haversines = np.minimum(_haversines(points, lat, lon), 1.0)
    found: NDArray[np.float64] = 2 * RADIUS * np.arcsin(np.sqrt(haversines))
    return found


def _haversines(points: NDArray[np.complex128], lat: float, lon: float) -> NDArray[np.float64]:
    """Return the squared sine of half of each angle [n] between a point and a place."""
    latitudes, longitudes = np.radians(points.real), np.radians(points.imag)
    a = np.sin((latitudes - radians(lat)) / 2) ** 2
    b = np.sin((longitudes - radians(lon)) / 2) ** 2
    found: NDArray[np.float64] = a + cos(radians(lat)) * np.cos(latitudes) * b
    return found


T = TypeVar("T", bound=np.generic)

_SPARSE = 16  # values that fewer than one in so many rows has are held as pairs of row and value
_MOST_DENSE = 4  # arrays of a value for every row
_FEW = 16  # rows that are looked for one by one among the extras
_BLOCK = 1 << 16  # values at a time: larger temporary arrays cost more in new pages than in work
_GLANCE = 1 << 12  # values at a time where the first ones mostly decide
_DEAD = 1_000  # extras that are no longer of a row, before they are left out


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumn(Generic[T]):
    """A frozen column; `updated` returns the next version.

    The first value of a row stands in `dense[0]`, the second in `dense[1]`, as long as many rows
    have so many values; further ones are extras, pairs of row and value. Rows from the end of such
    an array on have no value in it, so that a catalogue grows without an update of its columns.
    """

    dense: tuple[CowArray[T], ...]  # each [≤ N]
    extra_rows: CowArray[np.int32]  # [E]
    extra_values: CowArray[T]  # [E]
    missing: Any  # stands for no value, and in the extras for one that was removed; 0, NaN, …
    dead: int = 0  # extras that were removed

    @classmethod
    def empty(cls, dtype: type[T], missing: Any) -> ValueColumn[T]:
        """Return a column without values."""
        return cls((), CowArray(np.zeros(0, np.int32)), CowArray(np.zeros(0, dtype)), missing)

    @classmethod
    def of(cls, values: NDArray[T], missing: Any) -> ValueColumn[T]:
        """Return a column of at most one value a row [n]."""
        none = CowArray(np.zeros(0, np.int32))
        return cls((CowArray(values),), none, CowArray(values[:0]), missing)

    @property
    def dtype(self) -> np.dtype[T]:
        """The type of the values."""
        return self.extra_values.array.dtype

    @property
    def has_nan(self) -> bool:
        """Report whether `missing` is NaN, which meets no comparison."""
        return bool(self.missing != self.missing)

    def filled(self, values: NDArray[T]) -> NDArray[np.bool_]:
        """Mark what is a value and not `missing`, bool of the shape of `values`."""
        present: NDArray[np.bool_] = values != self.missing
        return ~np.isnan(values) if self.has_nan else present

    def holding(self, dtype: type[np.generic]) -> ValueColumn[Any]:
        """Return this column with values of a wider type."""
        if self.dtype == dtype:
            return self
        dense = tuple(CowArray(own.array.astype(dtype)) for own in self.dense)
        extra_values = CowArray(self.extra_values.array.astype(dtype))
        return replace(self, dense=dense, extra_values=extra_values)

    def has_values(self) -> bool:
        """Report whether any row has a value."""
        return any(
            bool(self.filled(own.array[begin : begin + _GLANCE]).any())
            for own in (*self.dense, self.extra_values)
            for begin in range(0, len(own), _GLANCE)
        )

    def values_of(self, rows: NDArray[np.int64], extras: NDArray[np.int64]) -> NDArray[T]:
        """Return all values of distinct rows, unordered; `extras` is from `extras_of` of these."""
        found = [own.array[rows[rows < len(own)]] for own in self.dense]
        values = np.concatenate([*found, self.extra_values.array[extras]])
        return values[self.filled(values)]

    def extras_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the extras of some rows."""
        extra_rows = self.extra_rows.array
        if not len(extra_rows):
            return np.zeros(0, np.int64)
        if len(rows) <= _FEW:
            return np.concatenate([np.flatnonzero(extra_rows == row) for row in rows] or [rows])
        sought = np.zeros(max(int(extra_rows.max()), int(rows.max())) + 1, np.bool_)
        sought[rows] = True
        return np.flatnonzero(sought[extra_rows])

    def pairs_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[T]]:
        """Return all values of some rows, ascending and distinct: the place of its row, the value.

        Args:
            rows: [n].
        """
        extras = self.extras_of(rows)
        places = [np.searchsorted(rows, self.extra_rows.array[extras])]
        values = [self.extra_values.array[extras]]
        for own in self.dense:
            places.append(np.arange(int(np.searchsorted(rows, len(own)))))
            values.append(own.array[rows[places[-1]]])
        place, value = np.concatenate(places), np.concatenate(values)
        filled = self.filled(value)
        return place[filled], value[filled]

    def updated(
        self,
        rows: NDArray[np.int64],
        owners: NDArray[np.int64],
        values: NDArray[T],
        size: int,
        extras: NDArray[np.int64] | None = None,
    ) -> ValueColumn[T]:
        """Return this column after some rows got other values in place of theirs.

        Args:
            rows: that change [c], ascending and distinct.
            owners: the row of each new value [m], ascending; each is one of `rows`.
            values: new values [m], no two of one row the same.
            size: N, the number of rows of the catalogue.
            extras: what `extras_of` returns for the rows, where it is known.
        """
        extras = self.extras_of(rows) if extras is None else extras
        _, place, inverse = np.unique(owners, return_index=True, return_inverse=True)
        number = np.arange(len(owners)) - place[inverse]  # of each value among those of its row
        dense = []
        for at, own in enumerate(self.dense):
            chosen = number == at
            given = np.full(len(rows), self.missing, self.dtype)
            given[np.searchsorted(rows, owners[chosen])] = values[chosen]
            # What lies behind the end stays there, unless it has a value.
            end = max(len(own), int(owners[chosen].max(initial=-1)) + 1)
            more = np.full(end - len(own), self.missing, self.dtype)
            known, new = rows < len(own), (rows >= len(own)) & (rows < end)
            more[rows[new] - len(own)] = given[new]
            dense.append(own.updated(rows[known], given[known], more))
        rest = number >= len(dense)
        updated = replace(self, dense=tuple(dense))._with_extras(  # noqa: SLF001
            extras, owners[rest], values[rest]
        )
        return updated._condensed(size)  # noqa: SLF001

    def mask(
        self,
        holds: Callable[[NDArray[T]], NDArray[np.bool_]],
        size: int,
        rows: NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """Mark the rows of which a value meets a condition, bool [size].

        Args:
            holds: maps values [n] to bool [n], false for `missing`.
            size: N, the number of rows of the catalogue.
            rows: only these [m], ascending; the result is then bool [m].
        """
        if rows is not None:
            return self._mask_of(rows, holds, size)
        inside = np.zeros(size, np.bool_)
        for own in self.dense:
            for begin in range(0, len(own), _BLOCK):
                checkpoint()
                block = own.array[begin : begin + _BLOCK]
                inside[begin : begin + len(block)] |= holds(block)
        for begin in range(0, len(self.extra_rows), _BLOCK):
            held = np.flatnonzero(holds(self.extra_values.array[begin : begin + _BLOCK]))
            inside[self.extra_rows.array[begin : begin + _BLOCK].take(held)] = True
        return inside

    def _mask_of(
        self, rows: NDArray[np.int64], holds: Callable[[NDArray[T]], NDArray[np.bool_]], size: int
    ) -> NDArray[np.bool_]:
        inside = np.zeros(len(rows), np.bool_)
        for own in self.dense:
            known = rows[: np.searchsorted(rows, len(own))]
            inside[: len(known)] |= holds(own.array.take(known))
        if len(self.extra_rows):
            sought = np.zeros(size, np.bool_)
            sought[rows] = True
            chosen = np.flatnonzero(sought.take(self.extra_rows.array))
            chosen = chosen[holds(self.extra_values.array.take(chosen))]
            inside[np.searchsorted(rows, self.extra_rows.array.take(chosen))] = True
        return inside

    def among(self, rows: NDArray[np.int64], mask: NDArray[np.bool_]) -> Iterator[NDArray[T]]:
        """Yield the values of marked rows in blocks, unordered, `missing` among them.

        `rows` are the marked rows of `mask` [N], ascending.
        """
        for own in self.dense:
            known = rows[: np.searchsorted(rows, len(own))]
            for begin in range(0, len(known), _BLOCK):
                block = known[begin : begin + _BLOCK]
                start, end = int(block[0]), int(block[-1]) + 1
                # Where all rows are marked nothing need be copied.
                is_whole = end - start == len(block)
                yield own.array[start:end] if is_whole else own.array.take(block)
        for begin in range(0, len(self.extra_rows), _BLOCK):
            marked = mask.take(self.extra_rows.array[begin : begin + _BLOCK])
            values = self.extra_values.array[begin : begin + _BLOCK]
            yield np.where(marked, values, np.asarray(self.missing, values.dtype))

    def smallest(
        self, rows: NDArray[np.int64], key: Callable[[NDArray[T]], NDArray[Any]], size: int
    ) -> NDArray[Any]:
        """Return the smallest key of the values of each of some rows [n]; infinity without a value.

        `key` maps values [m] to float64 or complex128 [m], and `missing` to infinity.
        """
        keys = np.full(len(rows), np.inf, key(self.extra_values.array[:0]).dtype)
        for own in self.dense:
            for begin in range(0, len(rows) if len(own) else 0, _BLOCK):
                block = rows[begin : begin + _BLOCK]
                found = key(own.array.take(block, mode="clip"))
                found[block >= len(own)] = np.inf
                least = keys[begin : begin + _BLOCK]
                np.minimum(least, found, out=least)
        if len(self.extra_rows):
            places = np.full(size, -1)
            places[rows] = np.arange(len(rows))
            place = places.take(self.extra_rows.array)
            chosen = np.flatnonzero(place >= 0)
            np.minimum.at(keys, place[chosen], key(self.extra_values.array.take(chosen)))
        return keys

    def _condensed(self, size: int) -> ValueColumn[T]:
        """Move the first extras of rows to an array of all rows, while many rows have any."""
        column = self
        while len(column.dense) < _MOST_DENSE and len(column.extra_rows) * _SPARSE >= size:
            live = np.flatnonzero(self.filled(column.extra_values.array))
            rows, values = column.extra_rows.array[live], column.extra_values.array[live]
            having = np.zeros(size, np.bool_)
            having[rows] = True
            if not len(rows) or np.count_nonzero(having) * _SPARSE < size:
                break
            at, place = np.unique(rows, return_index=True)
            firsts = np.full(size, self.missing, self.dtype)
            firsts[at] = values[place]
            rest = np.ones(len(rows), np.bool_)
            rest[place] = False
            dense = (*column.dense, CowArray(firsts))
            column = ValueColumn(dense, CowArray(rows[rest]), CowArray(values[rest]), self.missing)
        return column

    def _with_extras(
        self, removed: NDArray[np.int64], owners: NDArray[np.int64], values: NDArray[T]
    ) -> ValueColumn[T]:
        """Return this column without the extras at some places, and with others."""
        if not len(removed) and not len(values):
            return self
        gone = np.full(len(removed), self.missing, values.dtype)
        dead = self.dead + int(np.count_nonzero(self.filled(self.extra_values.array[removed])))
        extra_rows = self.extra_rows.extended(owners.astype(np.int32))
        extra_values = self.extra_values.updated(removed, gone, values)
        if dead > _DEAD and 2 * dead > len(extra_rows):
            live = self.filled(extra_values.array)
            extra_rows = CowArray(extra_rows.array[live])
            extra_values, dead = CowArray(extra_values.array[live]), 0
        return replace(self, extra_rows=extra_rows, extra_values=extra_values, dead=dead)


def distinct_pairs(
    owners: NDArray[np.int64], values: NDArray[T]
) -> tuple[NDArray[np.int64], NDArray[T]]:
    """Return pairs of row and value by rising row, without repetitions."""
    order = np.lexsort((values, owners))
    owners, values = owners[order], values[order]
    new = np.ones(len(owners), np.bool_)
    new[1:] = (owners[1:] != owners[:-1]) | (values[1:] != values[:-1])
    return owners[new], values[new]
