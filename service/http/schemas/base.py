"""Base classes of requests, fields that many requests share, and limits that are no settings.

Strict by the base class: no unknown fields, no strings or booleans for numbers, no NaN. Limits
that are settings are checked by the routes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from service.domain.records import MAX_WEIGHT, MIN_WEIGHT, are_plain_ids, check_weight
from service.http.schemas.scalars import INTEGRAL, Id, Label

MAX_LIMIT = 1000


def example(**body: Any) -> ConfigDict:
    """Return a `model_config` whose documentation shows this body."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class Body(BaseModel):
    """Base of every request body and of the objects in it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Params(BaseModel):
    """Base of query parameters, which are text and so are converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class Page(Params):
    """Query parameters of a page of a list."""

    cursor: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="The `cursor` of the previous page; by default the first page."
    )
    limit: Limit = 100


class ItemsPage(Page):
    """Query parameters of a page of items."""

    hidden: bool = Field(False, description="Only items that are hidden.")


class UsersPage(Page):
    """Query parameters of a page of users."""

    prefix: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] = Field(
        "", description="Only users whose id begins with this, upper and lower case as it is."
    )
    counts: bool = Field(False, description="Count the stored events of each user.")
