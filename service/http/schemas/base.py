"""The bases of what comes in, the fields that many share, and the limits that never vary.

Strict by the base class: no unknown fields, no strings or booleans for numbers, no NaN. Limits
that are settings are checked by the routes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from service.domain.records import MAX_WEIGHT, MIN_WEIGHT
from service.http.schemas.scalars import Id, Label, Whole

MAX_LIMIT = 1000


def example(**body: Any) -> ConfigDict:
    """The `model_config` of a model that the documentation shows with this body."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class Body(BaseModel):
    """Base of every request body and of the objects in it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Params(BaseModel):
    """Base of query parameters, which are text and so are converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Limit = Annotated[Whole, Field(ge=1, le=MAX_LIMIT, description="Most entries in the answer.")]
Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT, description="How much it counts.")]
# One wrong id in a list is enough to say so; a megabyte of them would be 500,000 errors.
Ids = Annotated[list[Id], Field(fail_fast=True)]
Labels = Annotated[list[Label], Field(fail_fast=True)]


class Page(Params):
    """Which page of a list."""

    cursor: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The `cursor` of the page before; without it, the first page."
    )
    limit: Limit = 100
