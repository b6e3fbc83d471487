"""Conversion of the rows of a file to the fields of a record, by the mapping of its columns."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from service.datasets.cells import (
    ATTRIBUTE_CELLS,
    AttributeType,
    CellFormat,
    CellParser,
    bare_cell,
    number_cell,
    number_text,
    shortened,
    text_cell,
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
        """Build a mapping from options; `attributes.NAME:TYPE` says the type of an attribute.

        `weight` is `COLUMN` or `COLUMN:log`.

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
        self,
        names: Sequence[str],
        allowed: Sequence[str],
        required: Sequence[str],
        *,
        is_open: bool = False,
    ) -> BoundMapping:
        """Find the columns of a file.

        With `is_open`, rows may have other columns than `names`, which are read into the fields of
        their names.

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
        for target in (*columns, *self.constants):
            parents = [
                name for name in (*columns, *self.constants) if target.startswith(f"{name}.")
            ]
            if parents and parents[0] != "attributes":
                raise Invalid("", f"{parents[0]} is mapped, and so is its member {target}")
        weight = self.weight
        if weight is not None:
            weight = weight._replace(column=_find(weight.column, names, "--weight-from"))
        mapped = {name for bound in columns.values() for name in bound}
        later = []
        for target in allowed:
            if target not in columns and target not in self.constants:
                name = target if target in names else by_name.get(target)
                if name is None and is_open:
                    later.append(target)
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
        partly = {name.partition(".")[0] for name in read}  # objects
        unread = [name for name in names if name not in read | partly]
        for target in later:
            if target != "weight" or weight is None:
                columns[target] = (target,)
        return BoundMapping(self, columns, weight, unread, frozenset(later))


@dataclass(slots=True)
class BoundMapping:
    """A mapping whose columns are those of one file; converts its rows once it is prepared."""

    mapping: FieldMapping
    columns: dict[str, tuple[str, ...]]
    weight: WeightRule | None
    unread: list[str]  # columns that no field is read from
    later: frozenset[str]  # fields of which the file has no column yet
    types: dict[str, AttributeType] = field(default_factory=dict)  # of attributes, found out
    form: CellFormat = field(default_factory=CellFormat)
    parsers: dict[str, CellParser | None] = field(default_factory=dict)  # of each field's text
    constants: dict[str, Any] = field(default_factory=dict)

    def has(self, target: str) -> bool:
        """Report whether the file has a column or a constant of a field, so far."""
        return target in {*self.columns, *self.mapping.constants} - self.later

    def prepare(self, schema: Any, form: CellFormat, texts: Texts) -> None:
        """Prepare `row` for a file whose cells have this form and some of whose texts are parsed.

        Raises:
            Invalid: a constant is not of its field's type.
        """
        self.form = form
        for target, text in self.mapping.constants.items():
            try:
                self.constants[target] = (
                    text
                    if target.startswith(ATTRIBUTES)
                    else schema.fields[target].cell(text, form)
                )
            except ValueError as error:
                raise Invalid("", f"--constant {target}={text}: {error}") from None
        self.parsers = {target: self._parser(target, schema, texts) for target in self.columns}

    def row(self, source: Mapping[str, Any]) -> dict[str, Any]:
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
                    elif self.types.get(target) == "text":
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
            if self.mapping.negative == "skip":
                raise SkippedRow
            if self.mapping.negative is None:
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

    def problem(self, error: Invalid, row: Mapping[str, Any]) -> str:
        """Return what is wrong with a row, with the file's columns and their values."""
        place, target = error.pointer, ""
        for name in (*self.columns, "weight"):
            if f"{place}/".startswith(f"{pointer(name)}/") and len(name) > len(target):
                target = name
        names = self.columns.get(target, ())
        if target == "weight" and self.weight is not None:
            names = (self.weight.column,)
        label = place.removeprefix("/")
        if names and names != (target,):
            label = f"{' or '.join(names)} ({label.replace('/', '.')})"
        values = [value for name in names if (value := column_value(row, name)) is not None]
        detail = error.detail
        hint = ""
        if (
            self.types.get(target) in ("number", "flag")
            and target not in self.mapping.types
            and values
        ):
            hint = f"; --map {target}:text={names[0]} keeps the column as text"
        if detail == "is required" and not values and not set(names) & row.keys():
            missing = " or ".join(names) if names != (target,) else listed_names(list(row))
            detail += f"; the row has {'no ' * (names != (target,))}{missing or 'no members'}"
        got = ", ".join(shortened(value) for value in values if value != "")
        got = "" if "(got " in detail else got
        return f"{label}: {detail}{got and f' (got {got})'}{hint}"


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
        "attributes" in allowed and target.startswith(ATTRIBUTES) and all(target.split("."))
    ):
        listed = ", ".join(allowed) + (", attributes.NAME" if "attributes" in allowed else "")
        advice = "; --dislikes-below N reads ratings" if target == "rating" else ""
        raise Invalid("", f"field {target} is unknown; allowed are {listed}{advice}")


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


def is_identifier(name: str, identifiers: Iterable[str]) -> bool:
    """Report whether a column is named as an identifier: SKU, product_sku, variantSku, ISBN-13."""
    words = re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower().strip("_")
    known = "|".join(re.escape(re.sub(r"[\W_]+", "_", each).lower()) for each in identifiers)
    return (
        re.search(rf"(?:^|_)(?:{known})(?:_?\d+)?(?:_(?:id|code|no|number))?$", words) is not None
    )


def check_path(name: str, rows: Iterable[Any]) -> None:
    """Raise `Invalid` if no row has the member that a dotted column such as `a.b` names."""
    parts = name.split(".")
    members: dict[int, dict[str, None]] = {}
    for row in rows:
        value = row
        for depth, part in enumerate(parts):
            if isinstance(value, list):
                raise Invalid(
                    "",
                    f"{'.'.join(parts[:depth])} is a list in the rows, so that {name!r} cannot be "
                    "read: write a row for each member of the list",
                )
            if not isinstance(value, Mapping):
                break
            if part not in value:
                members.setdefault(depth, {}).update(dict.fromkeys(value))
                break
            value = value[part]
        else:
            return
    if members:
        depth = max(members)
        close = difflib.get_close_matches(parts[depth], members[depth], 1)
        hint = f" Did you mean {'.'.join([*parts[:depth], close[0]])}?" if close else ""
        inside = ".".join(parts[:depth]) or "the rows"
        listed = listed_names(list(members[depth])) or "nothing"
        raise Invalid("", f"no row has {name!r}; {inside} has {listed}.{hint}")
