"""Base classes of requests, fields that many requests share, and limits that are no settings.

Strict by the base class: no unknown fields, no strings or booleans for numbers, no NaN. Limits
that are settings are checked by the routes.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from service.domain.records import MAX_WEIGHT, MIN_WEIGHT, are_plain_ids, check_weight
from service.http.schemas.scalars import INTEGRAL, Id, Label

MAX_LIMIT = 1000


def example(**body: Any) -> ConfigDict:
    """Return a `model_config` whose documentation shows this body."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class Body(BaseModel):
    """Base of every request body and of the objects in it.

    Null stands for a member that is left out, if it is no value of the member.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _optional: ClassVar[frozenset[str]] = frozenset()  # members of which null is no value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Note the members that may be left out."""
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


class ItemParams(Params):
    """Query parameters of one item."""

    plain: bool = Field(False, description="Answer titles and descriptions without their markup.")


class ItemsPage(ItemParams, Page):
    """Query parameters of a page of items."""

    hidden: bool = Field(False, description="Only items that are hidden.")


class ItemEventsParams(Params):
    """Query parameters of an item's events."""

    limit: Limit = 20


class UsersPage(Page):
    """Query parameters of a page of users."""

    prefix: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] = Field(
        "", description="Only users whose id begins with this, upper and lower case as it is."
    )
    counts: bool = Field(False, description="Count the stored events of each user.")
