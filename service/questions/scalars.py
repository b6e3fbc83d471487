"""Types of the members of bodies: ids, names, times, numbers, vectors, names of fields.

Bodies are strict: no unknown members, no strings or booleans for numbers, no NaN. The rules of
records are in `service.domain.records`; these types check them while a request is parsed, so that
an error names the member. Limits that are settings are checked when a question is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypeAliasType

from service.domain.errors import Invalid
from service.domain.names import NAME_PATTERN, NAME_RULE
from service.domain.records import (
    ATTRIBUTES,
    MAX_FIELD_NAME,
    MAX_WEIGHT,
    MIN_WEIGHT,
    are_plain_ids,
    check_attributes,
    check_id,
    check_weight,
)
from service.domain.settings import Settings
from service.domain.timestamps import from_rfc3339

MAX_LIMIT = 1000


def example(**body: Any) -> ConfigDict:
    """Return a `model_config` whose documentation shows this body."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class Checked(BaseModel):
    """A question: its members are validated one by one, and `check` looks at all of them."""

    def check(self, settings: Settings) -> None:
        """Raise `Invalid` where members do not go together, or exceed a setting."""


class Body(Checked):
    """Base of every request body and of the objects in it.

    Null stands for a member that is left out, if it is no value of the member.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _optional: ClassVar[frozenset[str]] = frozenset()  # members of which null is no value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._optional = frozenset(
            own.alias or name
            for name, own in cls.model_fields.items()
            if not own.is_required() and not _takes_null(own.annotation)
        )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, members: Any) -> Any:
        if not isinstance(members, dict) or None not in members.values():
            return members
        return {k: v for k, v in members.items() if v is not None or k not in cls._optional}


def _takes_null(annotation: Any) -> bool:
    """Report whether null is a value of a type, inside of `Annotated` and unions too."""
    return annotation in (None, type(None), Any) or any(
        _takes_null(part)
        for part in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
        if get_origin(annotation) in (Annotated, Union, UnionType)
    )


class Params(Checked):
    """Base of query parameters, which are text and so are converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ------------------------------------------------------------------------------ strings

ID_SCHEMA: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 256,
    "example": "item-1",
}

Id = Annotated[
    str,
    AfterValidator(check_id),
    WithJsonSchema(
        {**ID_SCHEMA, "description": "1 to 256 bytes of UTF-8 without NUL, stored as they are."}
    ),
]
Label = Annotated[
    str,
    AfterValidator(check_id),
    WithJsonSchema({**ID_SCHEMA, "example": "jazz", "description": "1 to 256 bytes of UTF-8."}),
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


NAME_SCHEMA: dict[str, Any] = {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"}


def check_name(value: str) -> str:
    """Return the name of a namespace, a version or a scenario. Raises PydanticCustomError."""
    if NAME_PATTERN.fullmatch(value) is None:
        raise PydanticCustomError("name", f"must be {NAME_RULE}")
    return value


Name = Annotated[
    str,
    AfterValidator(check_name),
    WithJsonSchema(NAME_SCHEMA),
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


_TIME = WithJsonSchema(
    {
        "type": "string",
        "format": "date-time",
        "description": "RFC 3339; the offset is required.",
        "example": "2026-01-31T09:30:00Z",
    }
)
Timestamp = Annotated[int, BeforeValidator(_parse), _TIME]
WrittenTime = Annotated[str, _TIME]  # of an answer

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


# ------------------------------------------------------- members of many questions

Limit = Annotated[
    int,
    Field(ge=1, le=MAX_LIMIT, description="The largest number of entries in the answer."),
    INTEGRAL,
]
Weight = Annotated[
    float,
    AfterValidator(check_weight),
    Field(
        description="Weight of the event in the attention, above 0.",
        json_schema_extra={"minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT},
    ),
]


def _accept_plain(ids: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return ids if isinstance(ids, list) and are_plain_ids(ids) else validate(ids)


# Only the first wrong id of a list is reported: a megabyte of them would be 500,000 errors.
Ids = Annotated[list[Id], Field(fail_fast=True), WrapValidator(_accept_plain)]
Labels = Annotated[list[Label], Field(fail_fast=True)]

# ---------------------------------------------------------------------- names of fields


def _named(*names: str, example: str) -> Any:
    """Return the type of a field's name: one of these, or `attributes.NAME`."""
    pattern = f"^({'|'.join(names)}|attributes\\.[\\s\\S]+)$"
    allowed = f"must be one of {', '.join(names)} and {ATTRIBUTES}NAME"

    def check(name: str) -> str:
        if re.fullmatch(pattern[1:-1], name) is None:
            raise PydanticCustomError("field", allowed)
        if len(name) > MAX_FIELD_NAME:
            raise PydanticCustomError("field", f"must have at most {MAX_FIELD_NAME} characters")
        return name

    schema = {"type": "string", "pattern": pattern, "maxLength": MAX_FIELD_NAME, "example": example}
    return Annotated[str, AfterValidator(check), WithJsonSchema(schema)]


_COUNTED = ("categories", "tags", "published_at")
FieldName = _named("item_id", "title", *_COUNTED, example="attributes.price")
FacetField = _named("title", *_COUNTED, example="categories")
# Fields that an answer may carry.
AnswerField = _named("description", *_COUNTED, "attributes", example="attributes.price")


def _checked(rule: Callable[[Any], bool], allowed: str, kinds: list[str]) -> Any:
    def check(value: Any) -> Any:
        if not rule(value):
            raise PydanticCustomError("operand", f"must be {allowed}")
        try:
            check_attributes({"": value})  # finite, of 64 bits, without surrogates
        except Invalid as error:
            raise Invalid("", error.detail) from None  # it is no member of the request
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"type": kinds})]


Scalar = _checked(
    lambda value: value is None or isinstance(value, str | int | float | bool),
    "a string, number, boolean or null",
    ["string", "number", "boolean", "null"],
)
Bound = _checked(
    lambda value: (
        value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    ),  # null stands for no bound
    "a number or a string",
    ["string", "number"],
)
