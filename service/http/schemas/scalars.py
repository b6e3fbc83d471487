"""Pydantic types of ids, names, timestamps, numbers and vectors.

The rules of records are in `service.domain.records`; these types check them while a request is
parsed, so that an error names the field.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypeAliasType

from service.domain.errors import Invalid
from service.domain.names import NAME_PATTERN, NAME_RULE
from service.domain.records import check_attributes, check_id
from service.domain.timestamps import from_rfc3339
from service.http.limits import segment

# ------------------------------------------------------------------------------ strings

_ID = {"type": "string", "minLength": 1, "maxLength": 256, "example": "item-1"}

Id = Annotated[
    str,
    AfterValidator(check_id),
    WithJsonSchema(
        {**_ID, "description": "1 to 256 bytes of UTF-8 without NUL, stored as they are."}
    ),
]
PathId = Annotated[
    str,
    AfterValidator(segment),
    AfterValidator(check_id),
    WithJsonSchema({**_ID, "description": "An id, percent-encoded; a slash in it as `%2F`."}),
]
Label = Annotated[
    str,
    AfterValidator(check_id),
    WithJsonSchema({**_ID, "example": "jazz", "description": "1 to 256 bytes of UTF-8."}),
]
EventType = Annotated[
    str,
    StringConstraints(max_length=64),
    AfterValidator(check_id),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 1,
            "maxLength": 64,
            "example": "view",
            "description": "Any name. `dislike` marks an item as disliked, `return` as sent back.",
        }
    ),
]


def _check_name(value: str) -> str:
    if NAME_PATTERN.fullmatch(value) is None:
        raise PydanticCustomError("name", f"must be {NAME_RULE}")
    return value


Name = Annotated[
    str,
    AfterValidator(_check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}),
]
PathName = Annotated[
    str,
    AfterValidator(segment),
    AfterValidator(_check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}),
]

# Named in the document, so that clients have one type of attributes.
Attributes = TypeAliasType(
    "Attributes",
    Annotated[
        dict[str, Any],
        AfterValidator(check_attributes),
        Field(
            description="Any JSON object of at most 1,000 names, at most 32 deep.",
            examples=[{"language": "en"}],
        ),
    ],
)

_PLAIN: dict[str, Any] = {"type": ["string", "number", "boolean", "null"]}


def _check_flat(members: dict[str, Any], *, lists: bool) -> dict[str, Any]:
    allowed = "a string, number, boolean or null" + (", or a list of these" if lists else "")
    for name, value in members.items():
        choices = value if lists and isinstance(value, list) else [value]
        if any(isinstance(choice, list | dict) for choice in choices):
            escaped = name.replace("~", "~0").replace("/", "~1")
            raise Invalid(f"/{escaped}", f"must be {allowed}")
    return members


Options = Annotated[
    dict[str, Any],
    AfterValidator(check_attributes),
    AfterValidator(partial(_check_flat, lists=False)),
    WithJsonSchema({"type": "object", "additionalProperties": _PLAIN}),
]
Conditions = Annotated[
    dict[str, Any],
    AfterValidator(check_attributes),
    AfterValidator(partial(_check_flat, lists=True)),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"anyOf": [_PLAIN, {"type": "array", "items": _PLAIN}]},
        }
    ),
]

# --------------------------------------------------------------------------- timestamps


def _parse(text: object) -> int:
    if not isinstance(text, str):
        raise PydanticCustomError("timestamp", "must be a string: 2026-01-31T09:30:00Z")
    return from_rfc3339(text)


Timestamp = Annotated[
    int,
    BeforeValidator(_parse),
    WithJsonSchema(
        {
            "type": "string",
            "format": "date-time",
            "description": "RFC 3339; the offset is required.",
            "example": "2026-01-31T09:30:00Z",
        }
    ),
]

_UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}  # seconds


def _parse_duration(text: object) -> int:
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        allowed = "must be a whole number of minutes, hours, days or weeks, at most 99999: 90m, 7d"
        raise PydanticCustomError("duration", allowed)
    return int(match[1]) * _UNITS[match[2]] * 1_000_000


_DURATION = re.compile("([1-9][0-9]{0,4})([mhdw])")
Duration = Annotated[
    int,
    BeforeValidator(_parse_duration),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{_DURATION.pattern}$",
            "description": "Minutes, hours, days or weeks: `90m`, `12h`, `7d`, `4w`.",
            "example": "7d",
        }
    ),
]

# ------------------------------------------------------------------------------ numbers


def _integral(number: object) -> object:
    # To JSON Schema 5.0 is an integer, and some languages write it so.
    return int(number) if isinstance(number, float) and number.is_integer() else number


INTEGRAL = BeforeValidator(_integral)  # after the bounds of an int, which else are undocumented

# Products of two such numbers over thousands of dimensions, divided by the lowest temperature,
# stay within float32, so that every answer is finite.
MAX_SIZE = 1e12
# Only the first wrong number of an array is reported: a megabyte could hold 500,000.
_Row = Annotated[list[float], Field(fail_fast=True)]
_BLOCK = 1_000  # rows that are validated while other threads wait for Python's lock


def _in_blocks(rows: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate many rows in blocks, between which other threads run."""
    if not isinstance(rows, list) or len(rows) <= _BLOCK:
        return validate(rows)
    valid = list[list[float]]()
    try:
        for begin in range(0, len(rows), _BLOCK):
            valid += validate(rows[begin : begin + _BLOCK])
    except ValidationError:
        return validate(rows)  # whose error has the row's own place
    return valid


_Rows = Annotated[list[_Row], Field(fail_fast=True), WrapValidator(_in_blocks)]


def _array(lists: Any, *checks: Callable[[Any], None], least: int = 0) -> GetPydanticSchema:
    """Annotate a field: nested lists of numbers in JSON, a float32 array in Python.

    `least` is the number of numbers in the innermost list, for the documentation.
    """

    def convert(numbers: Any) -> NDArray[np.float32]:
        for check in checks:
            check(numbers)
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
            begins = range(0, max(1, len(numbers)), _BLOCK)
            blocks = [np.array(numbers[at : at + _BLOCK], np.float32) for at in begins]
            array = np.concatenate(blocks)
        if array.size and max(array.max(), -array.min()) > MAX_SIZE:
            raise PydanticCustomError("size", f"must hold numbers of at most {MAX_SIZE:g} in size")
        return array

    def described(schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        document = handler(schema)
        innermost = document["items"] if "items" in document["items"] else document
        innermost["items"] |= {"minimum": -MAX_SIZE, "maximum": MAX_SIZE}
        if least:
            innermost["minItems"] = least
        return document

    # pydantic's own loop over the numbers, in Rust, is faster than numpy's conversion.
    converted = Annotated[lists, AfterValidator(convert)]
    return GetPydanticSchema(lambda _source, handler: handler.generate_schema(converted), described)


def _check_rectangular(rows: list[list[float]]) -> None:
    width = len(rows[0]) if rows else None
    if width and set(map(len, rows)) == {width}:
        return
    for number, row in enumerate(rows):
        if not row:
            raise Invalid(f"/{number}", "must hold at least one number")
        if len(row) != width:
            raise Invalid(
                f"/{number}",
                f"has {len(row)} numbers where the first row has {width}; all rows "
                "must be equally long",
            )


def _check_some(numbers: list[float]) -> None:
    if not numbers:
        raise PydanticCustomError("empty", "must hold at least one number")


Numbers = Annotated[NDArray[np.float32], _array(_Row)]  # [n], n >= 0
Vector = Annotated[NDArray[np.float32], _array(_Row, _check_some, least=1)]  # [d], d >= 1
Matrix = Annotated[
    NDArray[np.float32], _array(_Rows, _check_rectangular, least=1)
]  # [n, d], or [0]


def check_dims(vector: NDArray[np.float32] | None, dims: int, pointer: str) -> None:
    """Raise `Invalid` at `pointer` unless the vector is None or has `dims` dimensions."""
    if vector is not None and vector.shape[-1] != dims:
        raise Invalid(
            pointer,
            f"has {vector.shape[-1]} dimensions; this service is set to {dims} "
            "(HEED_EMBEDDING_DIM)",
        )
