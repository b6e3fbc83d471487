"""Selection of events and rows, facets and order of items: parts that several questions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from service.domain.errors import Invalid
from service.domain.item_selection import FacetRequest, SortField
from service.domain.queries import EventFilter, Retrieval, RetrievalMode
from service.http.schemas.base import Body, Labels, Params
from service.http.schemas.questions.item_fields import AnswerField, FacetField, FieldName
from service.http.schemas.scalars import INTEGRAL, EventType, Timestamp

MAX_K = 100_000
MAX_PROBES = 65_536
MAX_FACETS = 20
MAX_FACET_VALUES = 1_000
MAX_FIELDS = 50
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


class VisibleIn(Body):
    """Events that may be attended; a field that is left out restricts nothing."""

    since: Timestamp | None = None
    until: Timestamp | None = None
    types: Annotated[list[EventType], Field(fail_fast=True)] | None = None
    categories: Labels | None = None

    def to_visible(self) -> EventFilter:
        """Return the domain's value."""
        return EventFilter(self.since, self.until, _set(self.types), _set(self.categories))


Mode = Annotated[
    RetrievalMode,
    Field(
        description="`exact` attends every row. `coarse` lets FAISS find `k` rows for each target "
        "and head, and attends these. `auto` is `exact` up to some length; beyond it, rows of a "
        "person's memory that count little are attended by their lists, within `max_error`, and "
        "a search of more field keys than HEED_MAX_EXACT_ROWS is `coarse`."
    ),
]
KeptRows = Annotated[
    Annotated[int, Field(ge=1, le=MAX_K), INTEGRAL] | None,
    Field(
        description="With `coarse`: the number of rows that are attended, 256 by default, and "
        "1,000 field keys of a search."
    ),
]
Probes = Annotated[
    Annotated[int, Field(ge=1, le=MAX_PROBES), INTEGRAL] | None,
    Field(
        description="With `coarse`: the lists that FAISS opens of an inverted index, which may "
        "hold fewer than `k` of the best rows. Few rows that pass a filter are all compared."
    ),
]
MaxError = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="With `auto`: how far a head's context over a person's long memory may be "
        "off, relative to its length, at 99 % confidence. Heed chooses the work. By default "
        "HEED_MAX_ATTENTION_ERROR.",
    ),
]


class _Retrieval(BaseModel):
    """Fields of a retrieval beside its mode, whose own field is named `mode_field`."""

    mode_field: ClassVar[str] = "mode"
    k: KeptRows = None
    probes: Probes = None
    max_error: MaxError = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        self.to_retrieval()
        return self

    def to_retrieval(self) -> Retrieval:
        """Return the domain's value. Raises `Invalid` for a field that the mode does not use."""
        mode: RetrievalMode = getattr(self, self.mode_field)
        for name, value in (("k", self.k), ("probes", self.probes)):
            if value is not None and mode != "coarse":
                raise Invalid(f"/{name}", f"is for the mode 'coarse', not for {mode!r}")
        if self.max_error is not None and mode != "auto":
            raise Invalid("/max_error", f"is for the mode 'auto', not for {mode!r}")
        return Retrieval(mode, self.k, self.probes, self.max_error)


class RetrievalIn(_Retrieval, Body):
    """Which rows of a memory are attended before the exact softmax over them."""

    mode: Mode = "auto"

    def check_no_history(self, why: str) -> None:
        """Raise `Invalid` for `max_error`, which is of histories only."""
        if self.max_error is not None:
            raise Invalid("/retrieval/max_error", why)


class RetrievalParams(_Retrieval, Params):
    """`RetrievalIn` as query parameters: `retrieval` is its mode."""

    mode_field = "retrieval"
    retrieval: Mode = "auto"


class FacetIn(Body):
    """A field whose values are counted."""

    field: FacetField
    limit: Annotated[int, Field(ge=1, le=MAX_FACET_VALUES), INTEGRAL] = Field(
        10, description="The most values, the most frequent first."
    )

    def to_facet(self) -> FacetRequest:
        """Return the domain's value."""
        return FacetRequest(self.field, self.limit)


class SortIn(Body):
    """A field that items are ordered by. Items without it come last either way."""

    field: FieldName
    order: Literal["asc", "desc"] = "asc"

    def to_sort(self) -> SortField:
        """Return the domain's value."""
        return SortField(self.field, self.order == "desc")


Facets = Annotated[
    list[FacetIn],
    Field(
        max_length=MAX_FACETS,
        description="Fields whose values are counted over all items that match.",
        examples=[[{"field": "categories"}]],
    ),
]
AnswerFields = Annotated[
    list[AnswerField],
    Field(
        max_length=MAX_FIELDS,
        description="Fields of the items to answer in `fields`, beside the title.",
        examples=[["categories", "attributes.price"]],
    ),
]

Temperature = Annotated[
    float,
    Field(
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Divides the scores before the softmax; for the limit at zero use `hard`.",
    ),
]

RequestTime = Annotated[
    Timestamp | None,
    Field(
        description="The time of the request. Events after it do not exist for the question. If it "
        "is left out, the time is now, and every event of a history counts.",
    ),
]


def _set(values: Sequence[str] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values)
