"""Items as they enter the catalogue: texts that are keys, and the typed values of their fields."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.field_keys import NewKeys, Vectors
from models.index.ann_index import normalize_rows

Encode = Callable[[Sequence[str]], Vectors]

EMBEDDING = "embedding"  # the field name of a vector that the client brought
_LABELS = frozenset({"tags", "categories"})  # fields that items share, and that name none


@dataclass(frozen=True, slots=True)
class ItemEntry:
    item_id: str
    title: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)  # field name -> text
    categories: Sequence[str] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    embedding: Vectors | None = None  # [D]
    hidden: bool = False
    published_at: int | None = None  # microseconds UTC
    tags: Sequence[str] = ()
    keywords: Mapping[str, Sequence[str]] = field(default_factory=dict)  # field name -> identifiers

    @property
    def is_named(self) -> bool:
        """Report whether the item has a title or another text beside tags and categories."""
        texts = (text for name, text in self.fields.items() if name not in _LABELS)
        return bool(self.title.strip()) or any(text.strip() for text in texts)


def keys_of_entries(
    entries: Iterable[ItemEntry],
    rows: NDArray[np.int64],
    known_names: tuple[str, ...],
    encode: Encode,
) -> tuple[NewKeys, tuple[str, ...]]:
    """Return the keys of entries at catalogue rows [n], one entry's side by side, and all fields.

    `known_names` are fields that have codes already. Raises ValueError when an embedding is not of
    the dimension that `encode` gives.
    """
    names = {name: code for code, name in enumerate(known_names)}
    texts: list[str] = []
    places: list[int] = []  # of each key among the entries
    codes: list[int] = []
    brought: dict[int, Vectors] = {}  # by the place among the keys
    for place, entry in enumerate(entries):
        for name, text in entry.fields.items():
            if text and not text.isspace():
                texts.append(text)
                places.append(place)
                codes.append(names.setdefault(name, len(names)))
        if entry.embedding is not None:
            brought[len(places)] = entry.embedding
            places.append(place)
            codes.append(-1)
    keys, field_codes = encode(texts), np.array(codes, dtype=np.int16)
    if brought:
        for vector in brought.values():
            if vector.shape != keys.shape[1:]:
                raise ValueError(f"embedding has dimension {vector.shape[-1]}, not {keys.shape[1]}")
        at = np.array([*brought])
        field_codes[at] = names.setdefault(EMBEDDING, len(names))
        keys = np.insert(keys, at - np.arange(len(at)), [*brought.values()], axis=0)
    keys = normalize_rows(keys)  # also of an encoder whose vectors were kept in half precision
    owners = rows[np.array(places, dtype=np.int64)].astype(np.int32)
    spoken = np.any(keys != 0, axis=1)  # a text without a token the encoder knows has no key
    if not spoken.all():
        keys, owners, field_codes = keys[spoken], owners[spoken], field_codes[spoken]
    return NewKeys(keys, owners, field_codes), tuple(names)


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
        self.keyword_rows.append(row)
        self.keywords.append(keyword)


ValuesByField = defaultdict[str, FieldValues]


def item_values(rows: Sequence[int], entries: Iterable[ItemEntry]) -> ValuesByField:
    """Return the values of items in title, categories, tags and attributes, by field name.

    An attribute NAME is the field `attributes.NAME`, and a member of an object in it
    `attributes.NAME.MEMBER`. A list has the values of its elements; a list in a list has none. An
    empty title is no value.
    """
    fields = ValuesByField(FieldValues)
    for row, entry in zip(rows, entries, strict=True):
        if entry.title:
            fields["title"].add(row, entry.title)
        for category in entry.categories:
            fields["categories"].add(row, category)
        for tag in entry.tags:
            fields["tags"].add(row, tag)
        _add_members(fields, _ATTRIBUTES, row, entry.attributes)
    return fields


def attribute_values(rows: Sequence[int], attributes: Iterable[Mapping[str, Any]]) -> ValuesByField:
    fields = ValuesByField(FieldValues)
    for row, members in zip(rows, attributes, strict=True):
        _add_members(fields, _ATTRIBUTES, row, members)
    return fields


def _add_members(fields: ValuesByField, prefix: str, row: int, members: Mapping[str, Any]) -> None:
    for name, value in members.items():
        path = prefix + name
        if isinstance(value, list | tuple):
            for element in value:
                if not isinstance(element, list | tuple):
                    _add(fields, path, row, element)
        else:
            _add(fields, path, row, value)


def _add(fields: ValuesByField, path: str, row: int, value: Any) -> None:
    values = fields[path]
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
        _add_members(fields, path + ".", row, value)
    else:
        values.number_rows.append(row)
        values.numbers.append(value)


def keyword_of(value: str | bool | None) -> Keyword:
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
