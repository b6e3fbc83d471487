"""Rendering of answers as JSON.

The models of answers are documentation, for OpenAPI. Answers are written by the functions below
them, straight from the domain's values, because validating what the engine itself computed would
cost more than computing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

import orjson
from starlette.responses import Response

from service.domain.timestamps import to_rfc3339


class Json(Response):
    """A JSON response written by orjson; numpy arrays and scalars are numbers to it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def fields_out(value: Any, **replaced: object) -> dict[str, Any]:
    """Return the fields of a dataclass with slots, some replaced; `asdict` would copy arrays."""
    return {name: getattr(value, name) for name in value.__slots__} | replaced


def present_fields(value: Any, **replaced: object) -> dict[str, Any]:
    """Return `fields_out` without the fields that are None."""
    out = fields_out(value, **replaced)
    return {name: each for name, each in out.items() if each is not None}


def check_finite(what: str, numbers: Iterable[float]) -> None:
    """Raise `ArithmeticError` unless all are finite: orjson writes NaN as null."""
    if not all(map(isfinite, numbers)):
        raise ArithmeticError(f"{what} came out as NaN or infinity")


def written_time(micros: int | None) -> str | None:
    """Return a time in RFC 3339, None for None."""
    return None if micros is None else to_rfc3339(micros)
