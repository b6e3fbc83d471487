"""Selection of events and rows, facets and order of items: parts that several questions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from service.domain.item_selection import FacetRequest, SortField
from service.domain.queries import EventFilter, Retrieval, RetrievalMode
from service.http.schemas.base import Body, Labels
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


class RetrievalIn(Body):
    """Retrieval of rows before the exact softmax over them."""

    mode: RetrievalMode = "auto"
    k: Annotated[int, Field(ge=1, le=MAX_K), INTEGRAL] | None = Field(
        None,
        description="Rows that coarse retrieval keeps of a catalogue's or a client's vectors. "
        "A user's history is attended whole: a long one by `max_error`.",
    )
    probes: Annotated[int, Field(ge=1, le=MAX_PROBES), INTEGRAL] | None = Field(
        None, description="Clusters that an inverted index opens."
    )
    max_error: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Of a long history: how far a head's context may be off, relative to its "
        "length, at 99 % confidence. Heed chooses the work. 0.01 by default.",
    )
    moment_order: Annotated[int, Field(ge=1, le=2), INTEGRAL] | None = Field(
        None,
        description="What stands for the clusters of a long history: 2 their means and "
        "covariances (the default), 1 their means alone, for comparing.",
    )

    def to_retrieval(self) -> Retrieval:
        """Return the domain's value."""
        return Retrieval(self.mode, self.k, self.probes, self.max_error, self.moment_order)


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
