"""Conversion between records and rows of files: the fields of the HTTP API and their types.

A row holds JSON values. Cells of formats without types (CSV) are parsed into JSON values first.

Pydantic models in place of the schemas were tried: parsing is no faster (4.9 µs an event, 4.4 here)
and the formats of times, cells and messages would still be written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import date
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from service.datasets.cells import (
    CellFormat,
    flag_cell,
    json_cell,
    names_cell,
    number_cell,
    number_text,
    shortened,
    text_cell,
    time_cell,
)
from service.datasets.time_formats import TimeFormat
from service.domain.errors import Invalid
from service.domain.records import (
    DISLIKE,
    MAX_LABELS,
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
from service.domain.timestamps import to_rfc3339

R = TypeVar("R", Event, Item, User, Judgment)

# ------------------------------------------------------------- JSON values to fields


def _unchanged(value: Any, _: TimeFormat) -> Any:
    return value


def _word(value: Any, times: TimeFormat) -> Any:
    if isinstance(value, list | dict):
        kind = f"a list of {len(value)}" if isinstance(value, list) else "an object"
        raise ValueError(f"must be one value, not {kind}; a row for each value is allowed")
    return _text(value, times)


def _text(value: Any, times: TimeFormat) -> Any:
    if isinstance(value, list):
        lines = [number_text(member) for member in value if member is not None]
        return "\n".join(lines) if all(isinstance(line, str) for line in lines) else value
    if isinstance(value, date):
        return times.text(value)
    return number_text(value)


def _object(value: Any, times: TimeFormat) -> Any:
    """Return a JSON value whose dates, which Parquet has, are texts of RFC 3339."""
    if isinstance(value, dict):
        return {name: _object(member, times) for name, member in value.items()}
    if isinstance(value, list):
        return [_object(member, times) for member in value]
    return times.text(value) if isinstance(value, date) else value


def _number(value: Any, _: TimeFormat) -> float:
    return float(check_weight(value))


def _rating(value: Any, _: TimeFormat) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def _names(value: Any, _: TimeFormat) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be a list of strings, not {type(value).__name__}")
    return tuple(map(number_text, value))


def _vector(value: Any, _: TimeFormat) -> Vector:
    if not isinstance(value, list) or not {type(member) for member in value} <= {int, float}:
        raise ValueError("must be a list of numbers")
    with np.errstate(over="ignore"):  # overflow becomes infinite, which the record's check refuses
        return np.asarray(value, np.float64).astype(np.float32)


def _time(value: Any, times: TimeFormat) -> int:
    return times.micros(value)


class FieldType(NamedTuple):
    """Type of a field: parsers of its JSON value and of its CSV cell."""

    parse: Callable[[Any, TimeFormat], Any]  # JSON value -> value of the record
    cell: Callable[[str, CellFormat], Any]  # text -> JSON value, None if absent


TEXT = FieldType(_text, text_cell)
WORD = FieldType(_word, text_cell)  # an id or a type: the checks of records know their rules
NUMBER = FieldType(_number, number_cell)
RATING = FieldType(_rating, number_cell)
FLAG = FieldType(_unchanged, flag_cell)
NAMES = FieldType(_names, names_cell)
OBJECT = FieldType(_object, json_cell)
VECTOR = FieldType(_vector, json_cell)
TIME = FieldType(_time, time_cell)


@dataclass(frozen=True, slots=True)
class RecordSchema(Generic[R]):
    """Schema of a type of record: its fields, which of them are required, and its checks."""

    build: Callable[..., R]
    check: Callable[[R], None]
    required: Sequence[str]
    fields: Mapping[str, FieldType]

    def record(self, row: Mapping[str, Any], times: TimeFormat) -> R:
        """Build the record of a row of JSON values, whose names are fields; null is absent.

        Raises:
            Invalid: at the field that breaks a rule.
        """
        types = self.fields
        values = {}
        name = ""
        try:
            for name, value in row.items():
                if value is not None:
                    kind = types[name]
                    is_text = type(value) is str and (kind is WORD or kind is TEXT)
                    values[name] = value if is_text else kind.parse(value, times)
        except ValueError as error:  # an Invalid is one
            problem = error.detail if isinstance(error, Invalid) else str(error)
            raise Invalid(f"/{name}", problem) from None
        for name in self.required:
            if name not in values:
                raise Invalid(f"/{name}", "is required")
        record = self.build(**values)
        self.check(record)
        return record


# A name has the same type in all records; every other field is text.
TYPES = {
    "event_id": WORD,
    "item_id": WORD,
    "user_id": WORD,
    "type": WORD,
    "weight": NUMBER,
    "rating": RATING,
    "gain": RATING,
    "timestamp": TIME,
    "published_at": TIME,
    "hidden": FLAG,
    "tags": NAMES,
    "categories": NAMES,
    "interests": NAMES,
    "attributes": OBJECT,
    "embedding": VECTOR,
    "key": VECTOR,
    "value": VECTOR,
}


def _schema(record: type[R], check: Callable[[R], None]) -> RecordSchema[R]:
    required = [
        field.name
        for field in fields(record)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    types = {field.name: TYPES.get(field.name, TEXT) for field in fields(record)}
    return RecordSchema(record, check, required, types)


EVENT = _schema(Event, check_event)
ITEM = _schema(Item, check_item)
USER = _schema(User, check_user)
JUDGMENT = _schema(Judgment, check_judgment)


def rated_events(below: float) -> RecordSchema[Event]:
    """Return the schema of events with an optional `rating`; below `below` they are dislikes."""

    def build(*, rating: float = math.inf, **fields: Any) -> Event:
        event = Event(**fields)
        return replace(event, type=DISLIKE) if rating < below else event

    return replace(EVENT, build=build, fields={**EVENT.fields, "rating": RATING})


def to_row(record: Event | Item | User) -> dict[str, Any]:
    """Return the JSON values of a record in the order of its schema; empty ones are omitted.

    `RecordSchema.record` restores an equal record: a vector is written as the exact doubles of
    its floats.
    """
    schema = EVENT if isinstance(record, Event) else ITEM if isinstance(record, Item) else USER
    values: dict[str, Any] = {}
    for name, kind in schema.fields.items():
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


def to_json_lines(records: Iterable[Event | Item | User]) -> Iterator[bytes]:
    for record in records:
        yield orjson.dumps(to_row(record), option=orjson.OPT_APPEND_NEWLINE)


_EXAMPLES = 5


class RepeatedRows:
    """Unites the fields of several rows of one record, and collects what cannot be united.

    Lists unite in the order of the rows, and objects member by member. For other fields the first
    value that is not blank stays, and later ones that differ from it are counted.
    """

    def __init__(self) -> None:
        self.rows = 0  # that were put into the record of an earlier row
        self.differing = 0  # values that were left out, since an earlier row has another
        self._examples: dict[tuple[str, str], list[Any]] = {}

    def unite(self, record: str, first: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of both.

        Raises:
            Invalid: a list would become too long; nothing was changed or counted then.
        """
        left_out: list[tuple[str, Any, Any]] = []
        united = _united_members("", first, later, left_out)
        self.rows += 1
        self.differing += len(left_out)
        for name, kept, value in left_out:
            values = self._examples.get((record, name))
            if values is None and len(self._examples) < _EXAMPLES:
                values = self._examples[record, name] = [kept]
            if values is not None and len(values) < _EXAMPLES:
                values.append(value)
        return united

    def warning(self) -> str | None:
        """Return a sentence about the values that were left out; None if there are none."""
        if not self.differing:
            return None
        examples = ", ".join(
            f"{record!r} {name} {' then '.join(map(shortened, values))}"
            for (record, name), values in self._examples.items()
        )
        more = ", …" if self.differing > sum(len(v) - 1 for v in self._examples.values()) else ""
        return (
            f"values left out, since an earlier row of the id has another: {self.differing:,}: "
            f"{examples}{more}; to keep the last value, sort the file so that its row comes first"
        )


def _united_members(
    path: str, first: Mapping[str, Any], later: Mapping[str, Any], left_out: list[Any]
) -> dict[str, Any]:
    united = dict(first)
    for name, value in later.items():
        kept = first.get(name)
        inner = f"{path}{name}"
        if is_blank(value):
            united.setdefault(name, value)
        elif is_blank(kept):
            united[name] = value
        elif isinstance(kept, Mapping) and isinstance(value, Mapping):
            united[name] = _united_members(f"{inner}.", kept, value, left_out)
        elif isinstance(kept, list | tuple) and isinstance(value, list | tuple):
            more = [member for member in value if member not in kept]
            if not path and len(kept) + len(more) > MAX_LABELS:
                raise Invalid(
                    f"/{name}",
                    f"has {len(kept) + len(more):,} entries with those of earlier rows of this id; "
                    f"at most {MAX_LABELS:,} are allowed",
                )
            united[name] = type(kept)([*kept, *more]) if more else kept
        elif not (np.array_equal(kept, value) if isinstance(kept, np.ndarray) else kept == value):
            left_out.append((inner, kept, value))
    return united


def is_blank(value: Any) -> bool:
    """Report whether a field has no value: absent, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


class OccurrenceCounter:
    """Numbers equal digests 0, 1, … in the order of their arrival, in 12 bytes a distinct digest.

    Counts lie in sorted runs, of which two of about the same length are merged, as in a
    log-structured merge tree: a dictionary would take ten times the memory.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = []

    def number(self, digests: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return, for each digest [n], how many equal ones came before it in all calls."""
        distinct, inverse, counts = np.unique(digests, return_inverse=True, return_counts=True)
        before = np.zeros(len(distinct), np.int64)
        for known, known_counts in self._runs:
            places = np.minimum(np.searchsorted(known, distinct), len(known) - 1)
            before += np.where(known[places] == distinct, known_counts[places], 0)
        # The rank of a digest among equal ones of this call: its place in its sorted group.
        order = np.argsort(inverse, kind="stable")
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        within = np.empty(len(digests), np.int64)
        within[order] = np.arange(len(digests)) - starts
        if len(distinct):
            self._add(distinct, counts.astype(np.uint32))
        numbered: NDArray[np.int64] = before[inverse] + within
        return numbered

    def _add(self, digests: NDArray[np.uint64], counts: NDArray[np.uint32]) -> None:
        while self._runs and len(self._runs[-1][0]) <= 2 * len(digests):
            last, last_counts = self._runs.pop()
            joined, inverse = np.unique(np.concatenate([last, digests]), return_inverse=True)
            totals = np.zeros(len(joined), np.uint32)
            np.add.at(totals, inverse, np.concatenate([last_counts, counts]))
            digests, counts = joined, totals
        self._runs.append((digests, counts))
