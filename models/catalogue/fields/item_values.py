"""Flattening of items to typed values of fields."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from models.catalogue.item_entry import ItemEntry

_ATTRIBUTES = "attributes."  # the prefix of an attribute's field name


class Special(Enum):
    """Values that are neither strings nor numbers; the value is the keyword code."""

    NULL = 1
    FALSE = 2
    TRUE = 3
    OBJECT = 4  # an object, whose members are fields of their own


Keyword = str | Special


class FieldValues:
    """Values that items have in one field, by type, each with the item's row.

    A row may have a value twice. Values and rows stand in lists of their own, because a tuple for
    each value of a million items keeps Python's garbage collector busy for longer than all else.
    """

    __slots__ = ("keyword_rows", "keywords", "number_rows", "numbers", "point_rows", "points")

    def __init__(self) -> None:
        self.keyword_rows: list[int] = []
        self.keywords: list[Keyword] = []
        self.number_rows: list[int] = []
        self.numbers: list[float] = []
        self.point_rows: list[int] = []
        self.points: list[complex] = []  # latitude + longitude·i, in degrees

    def add(self, row: int, keyword: Keyword) -> None:
        """Append a keyword."""
        self.keyword_rows.append(row)
        self.keywords.append(keyword)


ValuesByField = defaultdict[str, FieldValues]


def item_values(rows: Sequence[int], entries: Iterable[ItemEntry]) -> ValuesByField:
    """Return the values of items in title, categories, tags and attributes, by field name.

    An attribute NAME is the field `attributes.NAME`, and a member of an object in it
    `attributes.NAME.MEMBER`. A list has the values of its elements; a list in a list has none. An
    empty title is no value.
    """
    found = ValuesByField(FieldValues)
    for row, entry in zip(rows, entries, strict=True):
        if entry.title:
            found["title"].add(row, entry.title)
        for category in entry.categories:
            found["categories"].add(row, category)
        for tag in entry.tags:
            found["tags"].add(row, tag)
        add_members(found, _ATTRIBUTES, row, entry.attributes)
    return found


def attribute_values(rows: Sequence[int], attributes: Iterable[Mapping[str, Any]]) -> ValuesByField:
    """Return the values of items in attributes alone."""
    found = ValuesByField(FieldValues)
    for row, members in zip(rows, attributes, strict=True):
        add_members(found, _ATTRIBUTES, row, members)
    return found


def add_members(found: ValuesByField, prefix: str, row: int, members: Mapping[str, Any]) -> None:
    """Add the values of the members of an object."""
    for name, value in members.items():
        path = prefix + name
        if isinstance(value, list | tuple):
            for element in value:
                if not isinstance(element, list | tuple):
                    _add(found, path, row, element)
        else:
            _add(found, path, row, value)


def _add(found: ValuesByField, path: str, row: int, value: Any) -> None:
    values = found[path]
    if isinstance(value, str):
        values.add(row, value)
    elif value is None or isinstance(value, bool):
        values.add(row, keyword_of(value))
    elif isinstance(value, Mapping):
        values.add(row, Special.OBJECT)
        point = _point(value)
        if point is not None:
            values.point_rows.append(row)
            values.points.append(point)
        add_members(found, path + ".", row, value)
    else:
        values.number_rows.append(row)
        values.numbers.append(value)


def keyword_of(value: str | bool | None) -> Keyword:
    """Return the keyword that stands for a JSON string, boolean or null."""
    if value is None:
        return Special.NULL
    if isinstance(value, bool):
        return Special.TRUE if value else Special.FALSE
    return value


def is_number(value: object) -> bool:
    """Report whether a JSON value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def exact_number(number: float) -> float | complex:
    """Return a number as a float, or as nearest float + rest·i if no float equals it.

    numpy compares complex numbers by their parts, so that these numbers are ordered exactly, among
    floats too.
    """
    nearest = float(number)
    if isinstance(number, float) or int(nearest) == number:
        return nearest
    return complex(nearest, number - int(nearest))


def plain_number(number: float | complex) -> float | int:
    """Return the number of an `exact_number`, an integer as 3, not 3.0."""
    if isinstance(number, complex):
        if number.imag:
            return int(number.real) + int(number.imag)
        number = number.real
    # Larger integers are refused on input, and answers cannot contain them.
    return int(number) if number % 1 == 0 and -(2**63) <= number < 2**63 else number


def split_types(values: Iterable[Any]) -> tuple[list[Keyword], list[float]]:
    """Return the keywords and the finite numbers among JSON scalars."""
    values = list(values)
    keywords = [keyword_of(value) for value in values if not is_number(value)]
    numbers = [value for value in values if is_number(value)]
    return keywords, [number for number in numbers if math.isfinite(number)]


def _point(members: Mapping[str, Any]) -> complex | None:
    lat, lon = members.get("lat"), members.get("lon")
    if not (is_number(lat) and is_number(lon)):
        return None
    point = complex(lat, lon)  # type: ignore[arg-type]  # both are numbers
    return point if abs(point.real) <= 90 and abs(point.imag) <= 180 else None
