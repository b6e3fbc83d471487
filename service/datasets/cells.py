"""Parsers of cells, the texts of files whose values have no types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from service.domain.records import parse_json

# Exports write these in place of a number, a time or a flag that is missing.
ABSENT = frozenset({"", "-", "null", "none", "na", "n/a", "nan", r"\n"})
_TRUE = frozenset({"true", "yes", "y", "1", "t"})
_FALSE = frozenset({"false", "no", "n", "0", "f"})
Decimal = Literal[".", ","]
_CURRENCY = re.compile(r"^([-+]?)\s?[£$€¥]\s?|\s?[£$€¥]$")
_NUMBERS: Mapping[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d+)?", re.ASCII),
    ",": re.compile(r"[-+]?(\d{1,3}([. ]\d{3})+|\d+)?(,\d+)?([eE][-+]?\d+)?", re.ASCII),
}
_FRACTION = re.compile(r"[-+]?0([.,])")  # no group of thousands begins with 0
MAX_NUMBER = 100  # characters
_EXACT = 2.0**53  # floats beyond do not have all integers
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_CODE = re.compile(r"0\d|\d+[eE]\d+$", re.ASCII)  # 007, and 12E4 that no program writes as a number
_GUARD = re.compile(r'="(.*)"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Marks that have a meaning inside cells."""

    decimal: Decimal = "."
    list_separator: str = "|"
    is_escaped: bool = False  # see `escaped`
    absent: frozenset[str] = frozenset()  # marks of absence in fields of any type


def bare_cell(cell: str, form: CellFormat) -> str | None:
    """Return a cell without the guard of a spreadsheet, as in `="007"`; None for a mark of absence.

    Only formats with `is_escaped` cells have guards.
    """
    text = cell.strip()
    if form.is_escaped and text[:2] == '="' and (guarded := _GUARD.fullmatch(text)):
        cell = text = guarded[1].replace('""', '"')
    return None if text in form.absent else cell


def text_cell(cell: str, form: CellFormat) -> str | None:
    """Return the text without the space around it; None if nothing is left."""
    if form.is_escaped and cell.startswith("'") and _FORMULA.match(cell):
        return cell[1:]
    return cell.strip() or None


def escaped(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula; `text_cell` restores the text.

    A text that begins as a formula, or with apostrophes before one, gets an apostrophe in front
    unless it is a number.
    """
    if _FORMULA.match(cell) and not (_is_number(cell, ".") or _is_number(cell, ",")):
        return "'" + cell
    return cell


def number_cell(cell: str, form: CellFormat) -> float | None:
    """Parse a number with a sign, a currency, groups of three digits; None if absent.

    Raises ValueError for other text.
    """
    text = _without_currency(cell)
    if text.lower() in ABSENT:
        return None
    if not _is_number(text, form.decimal):
        size = f" of at most {MAX_NUMBER} characters" if len(text) > MAX_NUMBER else ""
        raise ValueError(f"must be a number{size}")
    groups, mark = (",", ".") if form.decimal == "." else (".", ",")
    number = text.replace(groups, "").replace(" ", "").replace(mark, ".")
    return float(number) if "." in number or "e" in number.lower() else int(number)


def decimal_mark(cell: str) -> Decimal | None:
    """Return the decimal mark with which a cell is a number; None if none, or either, will do."""
    text = _without_currency(cell)
    point, comma = _is_number(text, "."), _is_number(text, ",")
    if point and comma and (fraction := _FRACTION.match(text)):
        return "." if fraction[1] == "." else ","
    if point == comma:
        return None
    return "." if point else ","


def has_two_readings(cell: str) -> bool:
    """Report whether the mark of a number may be of decimals or of thousands, as in 1,234."""
    text = _without_currency(cell)
    both = _is_number(text, ".") and _is_number(text, ",")
    return both and not {*text}.isdisjoint(".,") and not _FRACTION.match(text)


def _without_currency(cell: str) -> str:
    return _CURRENCY.sub(r"\1", cell.strip().replace("\xa0", " "))


def _is_number(text: str, decimal: Decimal) -> bool:
    if len(text) > MAX_NUMBER:
        return False
    return bool(_NUMBERS[decimal].fullmatch(text)) and any(map(str.isdigit, text))


def time_cell(cell: str, _: CellFormat) -> str | None:
    """Return the text of a time; None if absent."""
    text = cell.strip()
    return None if text.lower() in ABSENT else text


def flag_cell(cell: str, _: CellFormat) -> bool | None:
    """Parse true, false, yes, no, 1 or 0; None if absent. Raises ValueError for other text."""
    text = cell.strip().lower()
    if text in ABSENT:
        return None
    if text not in _TRUE | _FALSE:
        raise ValueError("must be true, yes, y, t, 1 or false, no, n, f, 0")
    return text in _TRUE


def names_cell(cell: str, form: CellFormat) -> list[str] | None:
    """Split a list at its separator; None if it has no members."""
    names = map(str.strip, cell.split(form.list_separator))
    return [name for name in names if name and name not in form.absent] or None


def json_cell(cell: str, _: CellFormat) -> Any:
    """Parse JSON; None if there is none. Raises ValueError for other text."""
    if not cell.strip():
        return None
    try:
        return parse_json(cell)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None


def number_text(value: Any) -> Any:
    """Return a number as it would be written, a whole one without a point; others unchanged.

    A float of more than 2^53 stays, since its last digits are unknown.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and (not math.isfinite(value) or abs(value) > _EXACT):
        return value
    return str(int(value) if value == int(value) else value)


CellParser = Callable[[str, CellFormat], Any]
"""Converts a cell to a JSON value, None if it is absent; raises ValueError for other text."""

AttributeType = Literal["number", "text", "flag", "list", "json"]
ATTRIBUTE_CELLS: Mapping[AttributeType, CellParser] = {
    "number": number_cell,
    "text": text_cell,
    "flag": flag_cell,
    "list": names_cell,
    "json": json_cell,
}


def shortened(value: object) -> str:
    """Return the `repr` of a value, truncated for use in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_flag(value: Any) -> bool:
    """Report whether a cell is true or false, spelled out."""
    return isinstance(value, str) and value.strip().lower() in ("true", "false")


def attribute_type(values: Iterable[Any], form: CellFormat) -> AttributeType:
    """Return "flag" if all are true or false, "number" if most are numbers and none is a code.

    Else "text". Absent values do not count. If values have types, half of them are enough. A
    code begins with a zero, such as 007, is guarded, such as ="7", has an exponent without a sign,
    such as 12E4, or has too many digits for an integer of 64 bits.
    """
    count = numbers = typed = flags = 0
    for value in values:
        number: float | None = None
        if isinstance(value, str):
            bare = (bare_cell(value, form) or "").strip()
            if bare.lower() in ABSENT:
                continue
            if bare != value.strip() or _CODE.match(bare):
                return "text"
            with suppress(ValueError):
                number = number_cell(bare, form)
        elif not isinstance(value, bool) and isinstance(value, int | float):
            number, typed = value, 1
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            return "text"
        count += 1
        numbers += number is not None
        flags += is_flag(value)
    if count and flags == count:
        return "flag"
    return "number" if count and 2 * numbers + typed > count else "text"
