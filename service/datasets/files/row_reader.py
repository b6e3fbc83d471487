"""Conversion of the rows of a file to the fields of a record, by the mapping of its columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from service.datasets.files.cells import CellFormat, CellParser, number_cell, shortened
from service.domain.errors import Invalid
from service.domain.item_selection import ATTRIBUTES

Negative = Literal["skip", "return"]
RETURN = "return"  # the type of events of a negative quantity
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
                    if parse is not None and isinstance(value, str):
                        value = parse(value, self.form)
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
            got = "" if isinstance(error, Invalid) else self._got(target, source)
            raise Invalid(f"/{target.replace('.', '/', 1)}", detail + got) from None
        attributes = {
            name.removeprefix(ATTRIBUTES): row.pop(name)
            for name in [name for name in row if name.startswith(ATTRIBUTES)]
        }
        if attributes:
            base = row.get("attributes")
            row["attributes"] = {**base, **attributes} if isinstance(base, dict) else attributes
        return row

    def _set_weight(self, rule: WeightRule, row: dict[str, Any], source: Mapping[str, Any]) -> None:
        value = column_value(source, rule.column)
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
                raise ValueError("must be at least 1 for its logarithm")
            number = 1 + math.log(number)
        row["weight"] = number

    def _got(self, target: str, source: Mapping[str, Any]) -> str:
        names = self.columns.get(target, ())
        if target == "weight" and self.weight is not None:
            names = (self.weight.column,)
        values = [value for name in names if (value := column_value(source, name)) is not None]
        return f" (got {', '.join(map(shortened, values))})" if values else ""


def column_value(source: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row; `a.b` is member b of the object a."""
    value = source.get(name)
    if value is None and "." in name and name not in source:
        value = source
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value
