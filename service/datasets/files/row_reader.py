"""Conversion of the rows of a file to the fields of a record, by the mapping of its columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from service.datasets.files.cells import (
    CellFormat,
    CellParser,
    bare_cell,
    number_cell,
    number_text,
)
from service.domain.errors import Invalid
from service.domain.records import ATTRIBUTES, RETURN

Negative = Literal["skip", "return"]
_LISTS = ("tags", "categories", "interests")


class SkippedRow(Exception):
    """A row that the mapping leaves out on purpose."""


class WeightRule(NamedTuple):
    """Derivation of an event's weight from a column: the number itself, or 1 + ln of it."""

    column: str
    is_log: bool

    @classmethod
    def parse(cls, text: str) -> WeightRule:
        """Parse `COLUMN` or `COLUMN:log`."""
        column, colon, form = text.rpartition(":")
        if not colon or form != "log":
            return cls(text, is_log=False)
        return cls(column, is_log=True)


@dataclass(slots=True)
class RowReader:
    """Converts the rows of a file to those of a record's fields."""

    columns: Mapping[str, tuple[str, ...]]  # of each field
    weight: WeightRule | None
    negative: Negative | None  # what becomes of rows whose weight is below 0
    form: CellFormat
    parsers: Mapping[str, CellParser | None]  # of the text of each field
    constants: Mapping[str, Any]
    texts: frozenset[str] = frozenset()  # attributes whose numbers become texts

    def __call__(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row: text by the type of its field; other values, as of JSON, stay.

        Raises:
            Invalid: at the field whose text cannot be parsed.
            SkippedRow: the row is left out on purpose.
        """
        row: dict[str, Any] = {}
        target = ""
        try:
            for target, names in self.columns.items():
                parse = self.parsers[target]
                for name in names:
                    value = source.get(name)
                    if value is None and "." in name:
                        value = column_value(source, name)
                    if isinstance(value, str):
                        value = bare_cell(value, self.form)
                        if parse is not None and value is not None:
                            value = parse(value, self.form)
                    elif target in self.texts:
                        value = number_text(value)
                    if value is None:
                        continue
                    if target not in row:
                        row[target] = value
                    elif target in _LISTS:
                        row[target] = list(dict.fromkeys([*row[target], *value]))
            row.update(self.constants)
            target = "weight"
            if self.weight is not None:
                self._set_weight(self.weight, row, source)
        except ValueError as error:
            detail = error.detail if isinstance(error, Invalid) else str(error)
            raise Invalid(pointer(target), detail) from None
        for name in [name for name in row if name.startswith(ATTRIBUTES)]:
            base = row.get("attributes")
            base = base if isinstance(base, Mapping) else {}
            row["attributes"] = with_member(base, name.removeprefix(ATTRIBUTES), row.pop(name))
        return row

    def _set_weight(self, rule: WeightRule, row: dict[str, Any], source: Mapping[str, Any]) -> None:
        value = column_value(source, rule.column)
        if isinstance(value, str):
            value = bare_cell(value, self.form)
        number = number_cell(value, self.form) if isinstance(value, str) else value
        if number is None:
            return
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError("must be a number")
        if number < 0:
            if self.negative == "skip":
                raise SkippedRow
            if self.negative is None:
                raise ValueError("is negative; --negative skip or return says what becomes of it")
            row["type"] = RETURN
            number = -number
        if rule.is_log:
            if number < 1:
                raise ValueError(
                    f"must be at least 1 for its logarithm (got {number:g}); --skip-bad leaves "
                    f"such rows out, and --weight-from {rule.column} takes numbers above 0 as "
                    "they are"
                )
            number = 1 + math.log(number)
        row["weight"] = number


def pointer(target: str) -> str:
    """Return the JSON pointer of a field such as `attributes.place.lat` (RFC 6901)."""
    return "/" + target.replace("~", "~0").replace("/", "~1").replace(".", "/")


def with_member(base: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return an object with a value at a path such as `place.lat`, whose parts are objects."""
    first, dot, rest = path.partition(".")
    if dot:
        inner = base.get(first)
        value = with_member(inner if isinstance(inner, Mapping) else {}, rest, value)
    return {**base, first: value}


def column_value(source: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row; `a.b` is member b of the object a."""
    value = source.get(name)
    if value is None and "." in name and name not in source:
        value = source
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
