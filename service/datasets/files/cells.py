"""Parsers of cells, the texts of files whose values have no types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from service.domain.records import parse_json

# What exports write in place of a number, a time or a flag that is missing.
ABSENT = frozenset({"", "-", "null", "none", "na", "n/a", "nan", r"\n"})
_TRUE = frozenset({"true", "yes", "y", "1", "t"})
_FALSE = frozenset({"false", "no", "n", "0", "f"})
Decimal = Literal[".", ","]
_CURRENCY = re.compile(r"^([-+]?)\s?[£$€¥]\s?|\s?[£$€¥]$")
_NUMBERS: Mapping[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?([eE][-+]?\d+)?", re.ASCII),
    ",": re.compile(r"[-+]?(\d{1,3}([. ]\d{3})+|\d+)?(,\d+)?([eE][-+]?\d+)?", re.ASCII),
}
MAX_NUMBER = 100  # characters
_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_LEADING_ZERO = re.compile(r"0\d")


@dataclass(frozen=True, slots=True)
class CellFormat:
    """Marks that have a meaning inside cells."""

    decimal: Decimal = "."
    list_separator: str = "|"
    is_escaped: bool = False  # see `escaped`


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
    if point == comma:
        return None
    return "." if point else ","


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
        raise ValueError("must be true or false")
    return text in _TRUE


def names_cell(cell: str, form: CellFormat) -> list[str] | None:
    """Split a list at its separator; None if it has no members."""
    return [name for part in cell.split(form.list_separator) if (name := part.strip())] or None


def json_cell(cell: str, _: CellFormat) -> Any:
    """Parse JSON; None if there is none. Raises ValueError for other text."""
    if not cell.strip():
        return None
    try:
        return parse_json(cell)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error}") from None


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


def attribute_type(cells: Sequence[str], form: CellFormat) -> AttributeType:
    """Return "number" if nine of ten cells are numbers, none of them a code; or "text".

    Absent cells do not count. A code begins with a zero, such as 007, or has too many digits for an
    integer of 64 bits.
    """
    present = [text for cell in cells if (text := cell.strip()).lower() not in ABSENT]
    numbers = 0
    for text in present:
        if _LEADING_ZERO.match(text):
            return "text"
        try:
            number = number_cell(text, form)
        except ValueError:
            continue
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            return "text"
        numbers += number is not None
    return "number" if present and 10 * numbers >= 9 * len(present) else "text"
