"""Mappings of the columns of a file to the fields of a record."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from service.datasets.files.cells import (
    ATTRIBUTE_CELLS,
    AttributeType,
    CellFormat,
    CellParser,
    text_cell,
)
from service.datasets.files.row_reader import Negative, RowReader, WeightRule, column_value
from service.domain.errors import Invalid
from service.domain.item_selection import ATTRIBUTES

Texts = Literal["all", "typed", "mapped"]
"""Texts that are parsed: all, as in CSV; those of fields that are no texts, as in Parquet; those of
such fields where the caller maps them, as in JSON."""


_LISTED, _LONGEST = 50, 100  # names, and characters of each, in a message
_COMPARED = 1_000  # names that are searched for a similar one


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """Columns and constants of the fields of a record.

    A field that is not mapped is read from the column of its name, whatever its case, with spaces
    or hyphens for underscores.
    """

    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of each field
    types: Mapping[str, AttributeType] = field(default_factory=dict)  # of mapped attributes
    constants: Mapping[str, str] = field(default_factory=dict)
    weight: WeightRule | None = None
    negative: Negative | None = None  # what becomes of rows whose weight is below 0

    @classmethod
    def parse(
        cls,
        columns: Mapping[str, str | list[str]],
        constants: Mapping[str, str],
        weight: str | None = None,
        negative: Negative | None = None,
    ) -> FieldMapping:
        """Build a mapping from options.

        Args:
            columns: the column or columns of each field; `attributes.NAME:TYPE` says the type of an
                attribute.
            constants: the value of each field that is the same in every row.
            weight: `COLUMN` or `COLUMN:log`.
            negative: what becomes of rows whose weight is negative.

        Raises:
            Invalid: a type is unknown, or the options do not go together.
        """
        bound: dict[str, tuple[str, ...]] = {}
        types: dict[str, AttributeType] = {}
        for target, named in columns.items():
            name, colon, kind = target.partition(":")
            if colon:
                types[name] = _attribute_type(name, kind)
            bound[name] = (named,) if isinstance(named, str) else tuple(named)
        if negative is not None and weight is None:
            raise Invalid("", "--negative needs --weight-from, the column that may be negative")
        rule = None if weight is None else WeightRule.parse(weight)
        return cls(bound, types, constants, rule, negative)

    def bind(
        self, names: Sequence[str], allowed: Sequence[str], required: Sequence[str]
    ) -> BoundMapping:
        """Find the columns of a file.

        Args:
            names: the file's columns.
            allowed: the record's fields.
            required: those of them that a record must have.

        Raises:
            Invalid: a field is unknown or a column missing; it names those that there are.
        """
        columns: dict[str, tuple[str, ...]] = {}
        by_name = {plain_name(name): name for name in reversed(names)}
        for target, wanted in self.columns.items():
            _check_field(target, allowed)
            columns[target] = tuple(_find(column, names, "--map") for column in wanted)
        for target in self.constants:
            _check_field(target, allowed)
            if target in columns:
                raise Invalid("", f"{target} has both a column and a constant")
        weight = self.weight
        if weight is not None:
            weight = weight._replace(column=_find(weight.column, names, "--weight-from"))
        mapped = {name for bound in columns.values() for name in bound}
        for target in allowed:
            if target not in columns and target not in self.constants:
                name = target if target in names else by_name.get(target)
                # A column that was given to one field is not another's for its name.
                if name is None or name in mapped:
                    continue
                if target != "weight" or weight is None or name != weight.column:
                    columns[target] = (name,)
        if weight is not None and ("weight" in columns or "weight" in self.constants):
            raise Invalid("", "weight has both a column and --weight-from")
        missing = [name for name in required if name not in (*columns, *self.constants)]
        if missing:
            listed = listed_names(names) or "none"
            options = " ".join(f"--map {target}=COLUMN" for target in missing)
            raise Invalid(
                f"/{missing[0]}", f"is required; there are {listed}. Name it with {options}"
            )
        read = {name for bound in columns.values() for name in bound}
        read |= set() if weight is None else {weight.column}
        for name in read:
            if list(names).count(name) > 1:
                raise Invalid(f"/{name}", "must not occur twice")
        unread = [name for name in names if name not in read]
        return BoundMapping(self, columns, weight, unread)


@dataclass(slots=True)
class BoundMapping:
    """A mapping whose columns are those of one file."""

    mapping: FieldMapping
    columns: dict[str, tuple[str, ...]]
    weight: WeightRule | None
    unread: list[str]  # columns that no field is read from
    types: dict[str, AttributeType] = field(default_factory=dict)  # of attributes, found out

    def reader(self, schema: Any, form: CellFormat, texts: Texts) -> RowReader:
        """Return a function that converts rows.

        Args:
            schema: of the record.
            form: of cells.
            texts: that are parsed.

        Raises:
            Invalid: a constant is not of its field's type.
        """
        constants: dict[str, Any] = {}
        for target, text in self.mapping.constants.items():
            try:
                constants[target] = (
                    text
                    if target.startswith(ATTRIBUTES)
                    else schema.fields[target].cell(text, form)
                )
            except ValueError as error:
                raise Invalid("", f"--constant {target}={text}: {error}") from None
        parsers = {target: self._parser(target, schema, texts) for target in self.columns}
        return RowReader(self.columns, self.weight, self.mapping.negative, form, parsers, constants)

    def _parser(self, target: str, schema: Any, texts: Texts) -> CellParser | None:
        """Return the parser of the text of a field; None where text stays as it is."""
        if target.startswith(ATTRIBUTES):
            return ATTRIBUTE_CELLS[self.types.get(target, "text")]
        parse: CellParser = schema.fields[target].cell
        if texts == "all" or (
            parse is not text_cell and (texts == "typed" or target in self.mapping.columns)
        ):
            return parse
        return None

    def source(self, target: str, source: Mapping[str, Any]) -> Any:
        """Return the first value of a field in a row of the file; None without one."""
        for name in self.columns.get(target, ()):
            if (value := column_value(source, name)) is not None:
                return value
        return None


def split_assignment(text: str, option: str, right: str) -> tuple[str, str]:
    """Split `FIELD=VALUE`; the option and the name of its right side are for the message."""
    left, equals, value = text.partition("=")
    if not equals or not left.strip() or not value:
        raise Invalid("", f"{option} must be FIELD={right}, not {text!r}")
    return left.strip(), value


def _attribute_type(name: str, kind: str) -> AttributeType:
    for known in ATTRIBUTE_CELLS:
        if name.startswith(ATTRIBUTES) and kind == known:
            return known
    allowed = " ".join(ATTRIBUTE_CELLS)
    raise Invalid("", f"--map {name}:{kind}: only attributes have a type, one of {allowed}")


def _check_field(target: str, allowed: Sequence[str]) -> None:
    if target not in allowed and not (
        "attributes" in allowed and target.startswith(ATTRIBUTES) and target != ATTRIBUTES
    ):
        listed = ", ".join(allowed) + (", attributes.NAME" if "attributes" in allowed else "")
        raise Invalid(f"/{target}", f"is unknown; allowed are {listed}")


def _find(column: str, names: Sequence[str], option: str) -> str:
    """Return the file's name of a column, whose case may differ."""
    if column in names:
        return column
    alike = [name for name in names if plain_name(name) == plain_name(column)]
    if len(alike) == 1:
        return alike[0]
    if "." in column and column.partition(".")[0] in names:
        return column
    close = difflib.get_close_matches(column, names[:_COMPARED], 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    listed = listed_names(names)
    raise Invalid("", f"{option}: there is no column {column!r}; there are {listed}.{hint}")


def listed_names(names: Sequence[str]) -> str:
    """Join names of columns for a message, and say how many are left out."""
    shown = ", ".join(
        name if len(name) <= _LONGEST else name[:_LONGEST] + "…" for name in names[:_LISTED]
    )
    more = len(names) - _LISTED
    return shown if more <= 0 else f"{shown} and {more:,} more"


def plain_name(name: str) -> str:
    """Return a column's name in lower case, with underscores for spaces and hyphens."""
    return re.sub(r"[\s-]+", "_", name.strip().lower())
