"""Conditions on the fields of items, and the items that meet them.

A condition on a field holds for an item when one of the item's values there meets every comparison
of the condition; so an item without a value meets none. Values compare within their JSON type: 1
equals 1.0, and is neither true nor "1".
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import asin, cos, degrees, pi, radians, sin
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import FieldColumns, ItemFields, KeywordColumn, ValueColumn
from models.catalogue.item_values import exact_number, is_number, split_types
from models.compute.checkpoint import checkpoint

RADIUS = 6371.0088  # km, the mean of the Earth's (IUGG)
_DEGREE = radians(1) * RADIUS  # km for each degree of latitude
_SLACK = 1e-9  # degrees by which rounding may move a point out of its band of latitudes


def within(points: NDArray[np.complex128], lat: float, lon: float, km: float) -> NDArray[np.bool_]:
    """Mark the points [n] at most `km` from a place, bool [n]; NaN is no point.

    Points are latitude + longitude·i in degrees. The haversine is computed only for points in the
    box of latitudes and longitudes around the circle.
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
    kilometres: NDArray[np.float64] = 2 * RADIUS * np.arcsin(np.sqrt(haversines))
    return kilometres


def _haversines(points: NDArray[np.complex128], lat: float, lon: float) -> NDArray[np.float64]:
    """Return the squared sine of half of each angle [n] between a point and a place."""
    latitudes, longitudes = np.radians(points.real), np.radians(points.imag)
    a = np.sin((latitudes - radians(lat)) / 2) ** 2
    b = np.sin((longitudes - radians(lon)) / 2) ** 2
    haversines: NDArray[np.float64] = a + cos(radians(lat)) * np.cos(latitudes) * b
    return haversines


_BOUNDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_COMPARED = 8  # numbers that are compared one after the other; more are searched for

_BLOCK = 16_384  # ids between two checkpoints
_NARROW = 8  # once fewer than one in this many rows is left, only those are looked at

_Test = Callable[[NDArray[Any]], NDArray[np.bool_]]  # values [n] -> bool [n]


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparisons of one field with values, by operator.

    The operators are `eq, in, gt, gte, lt, lte, exists, contains, within_km`. A value is a JSON
    scalar, for `in` a list of those, for `exists` a boolean, and for `within_km` (latitude,
    longitude, kilometres). Of `published_at` it is microseconds UTC.
    """

    field: str
    comparisons: Mapping[str, Any]
    # JSON pointers, within the filter, to the name of the field and to the operand of each operator
    pointers: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Filters: all, at least one, or none must hold."""

    kind: Literal["all", "any", "none"]
    members: tuple[ItemFilter, ...] = ()
    pointers: tuple[str, ...] = dataclasses.field(
        default=(), compare=False
    )  # of each member, within the group


ItemFilter: TypeAlias = Condition | Group

EVERYTHING = Group("all")
_SLOW = 20  # cost of comparing strings or distances, in comparisons of numbers
_LISTED = 50  # values of `in` that cost one more comparison


def comparisons(wanted: ItemFilter) -> float:
    """Return the cost of a filter for each item, in comparisons of numbers."""
    if isinstance(wanted, Group):
        return sum(map(comparisons, wanted.members))
    total = 0.0
    for name, operand in wanted.comparisons.items():
        is_slow = _is_slow_operator(name, operand)
        total += _SLOW if is_slow else 1 + (len(operand) / _LISTED if name == "in" else 0)
    return total


def _is_slow_operator(name: str, operand: Any) -> bool:
    return name in ("contains", "within_km") or (name in _BOUNDS and isinstance(operand, str))


def conditions(wanted: ItemFilter, pointer: str = "") -> Iterator[tuple[Condition, str]]:
    """Yield each condition of a filter with the JSON pointer that its own begin with."""
    if isinstance(wanted, Condition):
        yield wanted, pointer
        return
    inner = wanted.pointers or [""] * len(wanted.members)
    for member, place in zip(wanted.members, inner, strict=True):
        yield from conditions(member, pointer + place)


def matching(
    fields: ItemFields, wanted: ItemFilter, rows: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Mark the rows that pass a filter, bool [N], whether visible or not.

    With `rows` [m], ascending, only these are looked at, and the result is bool [m].
    """
    if isinstance(wanted, Condition):
        return _meeting(fields, wanted, rows)
    count = fields.size if rows is None else len(rows)
    if wanted.kind == "all":
        return _meeting_all(fields, wanted.members, rows, count)
    inside = np.zeros(count, np.bool_)
    for member in wanted.members:
        inside |= matching(fields, member, rows)
    return ~inside if wanted.kind == "none" else inside


def _meeting_all(
    fields: ItemFields,
    members: tuple[ItemFilter, ...],
    rows: NDArray[np.int64] | None,
    count: int,
) -> NDArray[np.bool_]:
    """Mark what passes all members: first by quick ones that let few pass, then among these."""
    inside = np.ones(count, np.bool_)
    few: NDArray[np.int64] | None = None  # the places of what is left, once that is little
    for member in sorted(members, key=lambda one: (_is_slow(one), _at_most(fields, one))):
        if few is None and _is_slow(member):
            few = np.flatnonzero(inside)
        if few is not None:
            met = matching(fields, member, few if rows is None else rows[few])
            few = few.take(np.flatnonzero(met))  # faster than a mask in brackets
            continue
        inside &= matching(fields, member, rows)
        if np.count_nonzero(inside) * _NARROW < count:
            few = np.flatnonzero(inside)
    if few is not None:
        inside[:] = False
        inside[few] = True
    return inside


def _is_slow(wanted: ItemFilter) -> bool:
    if isinstance(wanted, Condition):
        return any(_is_slow_operator(*comparison) for comparison in wanted.comparisons.items())
    return any(map(_is_slow, wanted.members))


def _at_most(fields: ItemFields, wanted: ItemFilter) -> int:
    """Return how many items may pass a filter, as far as counts of values say so."""
    most = fields.size
    if isinstance(wanted, Condition):
        sought = wanted.comparisons.get("in", [wanted.comparisons.get("eq")])
        if not wanted.comparisons.keys() & {"eq", "in"}:
            return most
        columns = fields.columns_of(wanted.field)
        keywords, numbers = split_types(sought)
        if columns.keywords is None or numbers:
            return most
        counts = columns.keywords.counts.array
        return min(most, sum(int(counts[columns.keywords.code(one)]) for one in keywords))
    if wanted.kind == "none" or not wanted.members:
        return most
    each = [_at_most(fields, member) for member in wanted.members]
    return min(each) if wanted.kind == "all" else min(most, sum(each))


def _meeting(
    fields: ItemFields, condition: Condition, rows: NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    checkpoint()
    size, comparisons = fields.size, condition.comparisons
    if condition.field == "item_id":
        return _ids_meeting(fields, comparisons, rows)
    columns, inside = fields.columns_of(condition.field), None
    if "exists" in comparisons:
        inside = columns.exists(size, rows)
        inside = inside if comparisons["exists"] else ~inside
    rest = {name: value for name, value in comparisons.items() if name != "exists"}
    if inside is not None and not rest:
        return inside
    compared = _compared(columns, rest, size, rows)
    return compared if inside is None else inside & compared


def _compared(
    columns: FieldColumns,
    comparisons: Mapping[str, Any],
    size: int,
    rows: NDArray[np.int64] | None,
) -> NDArray[np.bool_]:
    """Mark the rows with a value that meets all comparisons, `exists` not among them."""
    masks = list[NDArray[np.bool_]]()
    if columns.keywords is not None and (tests := _keyword_tests(columns.keywords, comparisons)):
        masks.append(columns.keywords.codes.mask(_all(tests), size, rows))
    if columns.numbers is not None and (tests := _number_tests(columns.numbers, comparisons)):
        # An item without a number is written as the smallest integer, for which `lt` would hold.
        missing = columns.numbers.missing
        is_above = any(comparisons.get(name, missing) > missing for name in ("gt", "gte"))
        if not (columns.numbers.has_nan or is_above):
            tests = [columns.numbers.filled, *tests]
        masks.append(columns.numbers.mask(_all(tests), size, rows))
    if columns.points is not None and comparisons.keys() == {"within_km"}:
        lat, lon, km = comparisons["within_km"]
        near = partial(within, lat=lat, lon=lon, km=km)
        masks.append(columns.points.mask(near, size, rows))
    if not masks:
        return np.zeros(size if rows is None else len(rows), np.bool_)
    inside, *others = masks
    for mask in others:
        inside |= mask
    return inside


def _keyword_tests(column: KeywordColumn, comparisons: Mapping[str, Any]) -> list[_Test]:
    """Return the tests of codes; none where no keyword can meet them."""
    tests = list[_Test]()
    for name, value in comparisons.items():
        if name in {"eq", "in"}:
            keywords, _ = split_types(value if name == "in" else [value])
            tests.append(column.is_any(keywords))
        elif name == "contains":
            tests.append(column.contains(value))
        elif name in _BOUNDS and isinstance(value, str):
            tests.append(column.meets(_bounded(name, value)))
        else:
            return []
    return tests


def _number_tests(column: ValueColumn[Any], comparisons: Mapping[str, Any]) -> list[_Test]:
    """Return the tests of numbers; none where no number can meet them."""
    tests = list[_Test]()
    for name, value in comparisons.items():
        listed = value if name == "in" else [value]
        numbers = [one for one in listed if is_number(one)]
        if column.has_nan:  # integers of 64 bits are exact
            numbers = list(map(exact_number, numbers))
        if name in {"eq", "in"}:
            tests.append(_is_any(numbers))
        elif name in _BOUNDS and numbers:
            tests.append(_compare(name, numbers[0]))
        else:
            return []
    return tests


def _ids_meeting(
    fields: ItemFields, comparisons: Mapping[str, Any], rows: NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    """Mark the items whose id meets all comparisons; ids need no column."""
    ids = fields.vocabulary.ids
    rows = np.arange(fields.size) if rows is None else rows
    inside = np.ones(len(rows), np.bool_)
    for name, value in comparisons.items():
        if name == "exists":
            inside &= value
        elif name in {"eq", "in"}:
            keywords, _ = split_types(value if name == "in" else [value])
            sought = fields.vocabulary.rows([one for one in keywords if isinstance(one, str)])
            inside &= np.isin(rows, sought)
        elif name == "contains" or (name in _BOUNDS and isinstance(value, str)):
            test = _contains(value) if name == "contains" else _bounded(name, value)
            left = np.flatnonzero(inside)
            for block in np.array_split(left, len(left) // _BLOCK + 1):
                checkpoint()
                inside[block] = [test(ids[row]) for row in rows[block].tolist()]
        else:
            inside[:] = False
    return inside


def _contains(part: str) -> Callable[[str], bool]:
    folded = part.casefold()
    return lambda text: folded in text.casefold()


def _bounded(name: str, bound: str) -> Callable[[str], bool]:
    compare = _BOUNDS[name]
    return lambda text: bool(compare(text, bound))


def _compare(name: str, bound: float | complex) -> _Test:
    compare = _BOUNDS[name]

    def holds(values: NDArray[Any]) -> NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):  # numpy warns of NaN in complex numbers
            met: NDArray[np.bool_] = compare(values, bound)
        return met

    return holds


def _is_any(numbers: Sequence[float | complex]) -> _Test:
    def holds(values: NDArray[Any]) -> NDArray[np.bool_]:
        if len(numbers) > _COMPARED:
            return np.isin(values, np.array(numbers))
        found = np.zeros(len(values), np.bool_)
        for number in numbers:
            found |= values == number
        return found

    return holds


def _all(tests: list[_Test]) -> _Test:
    if len(tests) == 1:
        return tests[0]

    def holds(values: NDArray[Any]) -> NDArray[np.bool_]:
        found = tests[0](values)
        for test in tests[1:]:
            found = found & test(values)
        return found

    return holds
