"""How values become the bytes of an answer.

The models in the rooms beside this one are documentation, for OpenAPI; answers are written by the
functions below them, straight from the domain's values to bytes, because validating what the engine
itself computed would cost more than computing it.
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
        """The bytes of `content`."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def check_finite(what: str, numbers: Iterable[float]) -> None:
    """Raise `ArithmeticError` unless all are finite: JSON would say null where NaN was computed."""
    if not all(map(isfinite, numbers)):
        raise ArithmeticError(f"{what} came out as NaN or infinity")


def written_time(micros: int | None) -> str | None:
    """A time of RFC 3339, where there is one."""
    return None if micros is None else to_rfc3339(micros)
