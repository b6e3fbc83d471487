"""Names of item fields, and the values that they are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from service.domain.errors import Invalid
from service.domain.item_selection import ATTRIBUTES, MAX_FIELD_NAME
from service.domain.records import check_attributes


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
# Those that an answer may carry.
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
