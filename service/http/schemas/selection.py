"""Selection of events, items and rows: what questions are about, and how rows are retrieved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from service.domain.queries import EventFilter, Filter, Retrieval, RetrievalMode
from service.http.schemas.base import Body, Labels
from service.http.schemas.scalars import Conditions, EventType, Integer, Timestamp

MAX_K = 100_000
MAX_PROBES = 65_536
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
    k: Annotated[Integer, Field(ge=1, le=MAX_K)] | None = Field(
        None,
        description="Rows that coarse retrieval keeps of a catalogue's or a client's vectors. "
        "A user's history is attended whole: a long one by `max_error`.",
    )
    probes: Annotated[Integer, Field(ge=1, le=MAX_PROBES)] | None = Field(
        None, description="Clusters that an inverted index opens."
    )
    max_error: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Of a long history: how far a head's context may be off, relative to its "
        "length, at 99 % confidence. Heed chooses the work. 0.01 by default.",
    )
    moment_order: Annotated[Integer, Field(ge=1, le=2)] | None = Field(
        None,
        description="What stands for the clusters of a long history: 2 their means and "
        "covariances (the default), 1 their means alone, for comparing.",
    )

    def to_retrieval(self) -> Retrieval:
        """Return the domain's value."""
        return Retrieval(self.mode, self.k, self.probes, self.max_error, self.moment_order)


class CategoriesIn(Body):
    """Conditions on an item's categories."""

    any: Labels = Field([], description="At least one of these.")
    all: Labels = Field([], description="Every one of these.")
    none: Labels = Field([], description="Not one of these.")


class PublishedIn(Body):
    """Conditions on an item's publication."""

    since: Timestamp | None = None
    until: Timestamp | None = None


class FilterIn(Body):
    """Conditions on the items of the answer."""

    categories: CategoriesIn = CategoriesIn()
    attributes: Conditions = Field(
        {}, description="Each equal to the value, or to one of a list of values."
    )
    published: PublishedIn = PublishedIn()

    def to_filter(self) -> Filter:
        """Return the domain's value."""
        return Filter(
            frozenset(self.categories.any),
            frozenset(self.categories.all),
            frozenset(self.categories.none),
            self.attributes,
            self.published.since,
            self.published.until,
        )


Temperature = Annotated[
    float,
    Field(
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Divides the scores before the softmax; for the limit at zero use `hard`.",
    ),
]


def _set(values: Sequence[str] | None) -> frozenset[str] | None:
    return None if values is None else frozenset(values)
