"""One record as one row of a file: the fields of the HTTP contract, their types, and the way back.

A row holds JSON values. Formats without types (CSV) first turn their cells into them: lists are
split on "|", attributes and vectors are JSON, an empty cell is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import orjson

from service.domain.errors import Invalid
from service.domain.records import (
    DISLIKE,
    Event,
    Item,
    Judgment,
    User,
    Vector,
    check_event,
    check_item,
    check_judgment,
    check_user,
    check_weight,
)
from service.domain.timestamps import from_datetime, from_rfc3339, to_rfc3339

Times = Literal["rfc3339", "utc", "s", "ms", "us"]
UNITS: Mapping[Times, int] = {"s": 1_000_000, "ms": 1_000, "us": 1}

R = TypeVar("R", Event, Item, User, Judgment)

# ------------------------------------------------------------- JSON values to fields


def _as_it_is(value: Any, _: Times) -> Any:
    return value


def _number(value: Any, _: Times) -> float:
    return float(check_weight(value))


def _rating(value: Any, _: Times) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def _names(value: Any, _: Times) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings, not {type(value).__name__}")
    return tuple(value)


def _vector(value: Any, _: Times) -> Vector:
    if not isinstance(value, list) or not {type(member) for member in value} <= {int, float}:
        raise ValueError("must be a list of numbers")
    with np.errstate(over="ignore"):  # what is too large becomes infinite: the record's check
        return np.asarray(value, np.float64).astype(np.float32)  # refuses that


def _time(value: Any, times: Times) -> int:
    if times in UNITS:
        if type(value) is not int:
            raise ValueError(f"must be an integer, as the file's times are said to be in {times}")
        return value * UNITS[times]
    if isinstance(value, str):
        return from_rfc3339(value, zone_required=times == "rfc3339")
    if isinstance(value, date):  # from Parquet; a datetime is a date too
        if times != "utc" and not (isinstance(value, datetime) and value.tzinfo):
            raise ValueError("must have a zone, or the file be read with times=utc")
        if not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        return from_datetime(value)
    if type(value) is int:
        raise ValueError(
            "must be an RFC 3339 time; for numbers, read the file with times=s, ms or us"
        )
    raise ValueError(f"must be an RFC 3339 time, not {type(value).__name__}")


# ------------------------------------------------------------- cells to JSON values


def _number_cell(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError("must be a number") from None


def _flag_cell(cell: str) -> bool:
    if cell not in ("true", "false"):
        raise ValueError("must be true or false")
    return cell == "true"


def _names_cell(cell: str) -> list[str]:
    return [name for part in cell.split("|") if (name := part.strip())]


def _json_cell(cell: str) -> Any:
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None


def _time_cell(cell: str) -> int | str:
    return int(cell) if cell.isascii() and cell.removeprefix("-").isdigit() else cell


class Kind(NamedTuple):
    """How a field is read: from a JSON value, and a JSON value from a cell of text."""

    parse: Callable[[Any, Times], Any]
    cell: Callable[[str], Any]


TEXT = Kind(_as_it_is, str)  # ids too: the records' own checks know the rules
NUMBER = Kind(_number, _number_cell)
FLAG = Kind(_as_it_is, _flag_cell)
NAMES = Kind(_names, _names_cell)
OBJECT = Kind(_as_it_is, _json_cell)
VECTOR = Kind(_vector, _json_cell)
TIME = Kind(_time, _time_cell)


@dataclass(frozen=True, slots=True)
class Shape(Generic[R]):
    """What a row of one kind of record may and must hold."""

    build: Callable[..., R]
    check: Callable[[R], None]
    required: tuple[str, ...]
    fields: Mapping[str, Kind]

    @property
    def vectors(self) -> tuple[str, ...]:
        """The fields that hold vectors."""
        return tuple(name for name, kind in self.fields.items() if kind is VECTOR)

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Raise `Invalid` at the first name that is no field."""
        for name in names:
            if name not in self.fields:
                raise Invalid(f"/{name}", f"is unknown; allowed are {', '.join(self.fields)}")

    def record(self, row: Mapping[str, Any], times: Times = "rfc3339") -> R:
        """The record of a row of JSON values; null is absent.

        Raises:
            Invalid: at the field that breaks a rule.
        """
        fields = self.fields
        if not row.keys() <= fields.keys():
            self.refuse_unknown(row)
        values = {}
        name = ""
        try:
            for name, value in row.items():
                if value is not None:
                    kind = fields[name]
                    values[name] = value if kind is TEXT else kind.parse(value, times)
        except ValueError as error:  # an Invalid is one
            problem = error.detail if isinstance(error, Invalid) else str(error)
            raise Invalid(f"/{name}", problem) from None
        for name in self.required:
            if name not in values:
                raise Invalid(f"/{name}", "is required")
        record = self.build(**values)
        self.check(record)
        return record

    def from_cells(self, cells: Mapping[str, str]) -> dict[str, Any]:
        """The JSON values of cells of text; empty cells are left out.

        Raises:
            Invalid: at the field whose cell cannot be read.
        """
        row = {}
        name = ""
        try:
            for name, cell in cells.items():
                if cell:
                    row[name] = self.fields[name].cell(cell)
        except ValueError as error:
            raise Invalid(f"/{name}", f"{error} (got {shortened(cell)})") from None
        return row


EVENT: Shape[Event] = Shape(
    Event,
    check_event,
    ("user_id", "item_id"),
    {
        "event_id": TEXT,
        "user_id": TEXT,
        "item_id": TEXT,
        "type": TEXT,
        "weight": NUMBER,
        "timestamp": TIME,
        "key": VECTOR,
        "value": VECTOR,
    },
)


def rated(below: float) -> Shape[Event]:
    """Events that may have a `rating` beside: those below this number are dislikes."""

    def build(*, rating: float = math.inf, **fields: Any) -> Event:
        event = Event(**fields)
        return replace(event, type=DISLIKE) if rating < below else event

    return replace(
        EVENT, build=build, fields={**EVENT.fields, "rating": Kind(_rating, _number_cell)}
    )


ITEM: Shape[Item] = Shape(
    Item,
    check_item,
    ("item_id",),
    {
        "item_id": TEXT,
        "title": TEXT,
        "description": TEXT,
        "tags": NAMES,
        "categories": NAMES,
        "attributes": OBJECT,
        "embedding": VECTOR,
        "hidden": FLAG,
        "published_at": TIME,
    },
)
USER: Shape[User] = Shape(
    User,
    check_user,
    ("user_id",),
    {"user_id": TEXT, "attributes": OBJECT, "interests": NAMES},
)

JUDGMENT: Shape[Judgment] = Shape(
    Judgment,
    check_judgment,
    ("query", "item_id"),
    {"query": TEXT, "item_id": TEXT, "gain": Kind(_rating, _number_cell)},
)


def shortened(value: object) -> str:
    """The value as Python writes it, cut to a length that a message can hold."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def row(record: Event | Item | User) -> dict[str, Any]:
    """The JSON values of a record, in the order of its shape; what is empty is left out.

    `Shape.record` gives the same record back: a vector is written as the exact doubles of its
    floats.
    """
    shape = EVENT if isinstance(record, Event) else ITEM if isinstance(record, Item) else USER
    values: dict[str, Any] = {}
    for name, kind in shape.fields.items():
        value = getattr(record, name)
        if value is None:
            continue
        if kind is TIME:
            value = to_rfc3339(value)
        elif kind is VECTOR:
            value = value.tolist()
        elif kind is not NUMBER and not value:
            continue
        elif kind is OBJECT:
            value = dict(value)
        values[name] = value
    return values


def lines(records: Iterable[Event | Item | User]) -> Iterator[bytes]:
    """The records as JSON lines, each with its newline, for export."""
    for record in records:
        yield orjson.dumps(row(record), option=orjson.OPT_APPEND_NEWLINE)
