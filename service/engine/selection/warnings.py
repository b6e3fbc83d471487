"""Warnings about parts of a filter that no item of the catalogue can meet."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from models.catalogue.columns import FieldColumns, ItemFields
from models.catalogue.item_values import is_number, keyword_of
from service.domain.item_selection import (
    ATTRIBUTES,
    FieldCondition,
    Filter,
    FilterWarning,
)

MAX_WARNINGS = 10
_COMPARED = 5_000  # values at most that a misspelt one is compared with
_ALIKE = 0.75  # share of equal letters from which a value is suggested (difflib's ratio)
_SINGULAR = {"categories": "category", "tags": "tag"}


def filter_warnings(fields: ItemFields, wanted: Filter) -> tuple[FilterWarning, ...]:
    """Return warnings about fields and values that no item has, the first few.

    These are values of `eq` and `in` that a user of an API misspells, of categories, tags and
    attributes, and comparisons with a number, a string or a place where no item has any. Conditions
    whose pointers are not known are not looked at.
    """
    found = (
        warning for condition in _conditions(wanted) for warning in _warnings(fields, condition)
    )
    return tuple(islice(found, MAX_WARNINGS))


def attribute_warnings(fields: ItemFields, named: Mapping[str, str]) -> tuple[FilterWarning, ...]:
    """Return warnings about attributes that no item has, among field names by JSON pointer."""
    found = (_unknown_attribute(fields, name, pointer) for pointer, name in named.items())
    return tuple(islice((warning for warning in found if warning is not None), MAX_WARNINGS))


def _unknown_attribute(fields: ItemFields, name: str, pointer: str) -> FilterWarning | None:
    """Return a warning about an attribute that no item has, None for any other field."""
    if not name.startswith(ATTRIBUTES) or _has_values(fields.columns_of(name)):
        return None
    known = (
        other
        for other, columns in fields.columns.fields.items()
        if other.startswith(ATTRIBUTES) and _has_values(columns)
    )
    closest = _closest(name, known)
    detail = f"no item has the attribute {name.removeprefix(ATTRIBUTES)!r}{closest}"
    return FilterWarning(pointer, detail)


def _conditions(wanted: Filter) -> Iterator[FieldCondition]:
    if isinstance(wanted, FieldCondition):
        yield wanted
        return
    for member in wanted.members:
        yield from _conditions(member)


def _warnings(fields: ItemFields, condition: FieldCondition) -> Iterator[FilterWarning]:
    name = condition.field
    columns = fields.columns_of(name)
    if name == "published_at" and "field" in condition.pointers and not _has_values(columns):
        yield FilterWarning(condition.pointers["field"], "no item has published_at")
    if not (name in _SINGULAR or name.startswith(ATTRIBUTES)):
        return
    if name.startswith(ATTRIBUTES) and not _has_values(columns):
        warning = _unknown_attribute(fields, name, condition.pointers.get("field", ""))
        if warning is not None and warning.pointer:
            yield warning
        return
    for operator in ("eq", "in"):
        if operator not in condition.comparisons or operator not in condition.pointers:
            continue
        operand, pointer = condition.comparisons[operator], condition.pointers[operator]
        several = operator == "in"
        for place, value in enumerate(operand if several else [operand]):
            if is_number(value):
                continue
            if not _is_known(columns, value):
                of = _SINGULAR.get(name, f"value of {name}")
                detail = f"no item has the {of} {_shown(value)}{_suggestion(columns, value)}"
                yield FilterWarning(f"{pointer}/{place}" if several else pointer, detail)
    for operator, operand in condition.comparisons.items():
        kind = _kind_of(operator, operand)
        if kind is None or kind in (kinds := _kinds(columns)) or operator not in condition.pointers:
            continue
        detail = f"no item has {kind} in {name}; its values are {' and '.join(kinds) or 'others'}"
        yield FilterWarning(condition.pointers[operator], detail)


def _kind_of(operator: str, operand: Any) -> str | None:
    """Return what an operator compares with; None for values that are looked up one by one."""
    if operator == "within_km":
        return "places"
    if operator == "contains":
        return "text"
    if operator in ("gt", "gte", "lt", "lte"):
        return "numbers" if is_number(operand) else "text"
    if operator == "in":
        return "numbers" if operand and all(map(is_number, operand)) else None
    return "numbers" if operator == "eq" and is_number(operand) else None


def _kinds(columns: FieldColumns) -> list[str]:
    """Return the kinds of values that some item has in a field."""
    found = []
    if columns.keywords is not None and columns.keywords.has_strings:
        found.append("text")
    if columns.numbers is not None and columns.numbers.has_values():
        found.append("numbers")
    if columns.points is not None and columns.points.has_values():
        found.append("places")
    return found


def _has_values(columns: FieldColumns) -> bool:
    keywords, numbers = columns.keywords, columns.numbers
    if keywords is not None and keywords.counts.array.any():
        return True
    return numbers is not None and numbers.has_values()


def _is_known(columns: FieldColumns, value: str | bool | None) -> bool:
    return columns.keywords is not None and columns.keywords.code(keyword_of(value)) > 0


def _suggestion(columns: FieldColumns, value: str | bool | None) -> str:
    if columns.keywords is None or not columns.keywords.counts.array.any():
        return "; its values are numbers"
    if not isinstance(value, str):
        text = _shown(value)
        for spelt in (text, text.title(), text.upper()):
            if columns.keywords.code(keyword_of(spelt)) > 0:
                return f"; did you mean the text {spelt!r}?"
        return ""
    flag = {"true": True, "false": False}.get(value.casefold())
    if flag is not None and columns.keywords.code(keyword_of(flag)) > 0:
        return f"; did you mean {_shown(flag)}, without quotation marks?"
    if columns.keywords.strings_known > _COMPARED:
        return ""
    return _closest(value, columns.keywords.strings())


def _closest(name: str, others: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the most similar of some names, if one is."""
    # Those whose length alone makes them too different need not be compared.
    alike = [other for other in islice(others, _COMPARED) if abs(len(other) - len(name)) <= 3]
    folded = {other.casefold(): other for other in alike}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=_ALIKE)
    return f"; did you mean {folded[close[0]].removeprefix(ATTRIBUTES)!r}?" if close else ""


def _shown(value: str | bool | None) -> str:
    """Return a value as JSON has it, a string in the quotes of a sentence."""
    return (
        repr(value)
        if isinstance(value, str)
        else {None: "null", True: "true", False: "false"}[value]
    )
