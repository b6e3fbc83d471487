"""Parameters and body of similar items."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from service.domain.errors import Invalid
from service.domain.item_selection import FieldCondition, Filter, FilterGroup
from service.domain.queries import SimilarQuery, Space
from service.domain.steering import Steering
from service.http.schemas.base import Body, Limit, example
from service.http.schemas.questions.filters import MAX_CONDITIONS, MAX_VALUES, FilterField, FilterIn
from service.http.schemas.questions.selection import (
    AnswerFields,
    Facets,
    RetrievalIn,
    RetrievalParams,
)
from service.http.schemas.questions.steering import (
    AtMosts,
    Pins,
    Rules,
    to_at_most,
    to_pins,
    to_rules,
)
from service.http.schemas.scalars import Label

_NO_HISTORY = "is for a person's memory: similar items are compared with all keys, or `k` of them"
SpaceIn = Annotated[
    Literal["both", "content", "trained"],
    Field(
        description="`content`: by their texts or embeddings; `trained`: by what training made of "
        "them; `both`: by both, and an item that is only in one of them by that one.",
    ),
]


class SimilarParams(RetrievalParams):
    """Query parameters of similar items."""

    limit: Limit = 20
    space: SpaceIn = "both"
    categories_any: list[Label] = Field(
        [], max_length=MAX_VALUES, description="Items in at least one of these."
    )
    categories_all: list[Label] = Field(
        [], max_length=MAX_CONDITIONS, description="Items in every one of these."
    )
    categories_none: list[Label] = Field(
        [], max_length=MAX_VALUES, description="Items in none of these."
    )

    def to_query(self, item_id: str) -> SimilarQuery:
        """Return the domain's value."""
        categories = list[Filter]()
        if self.categories_any:
            pointers = {"in": "/categories_any"}
            categories.append(FieldCondition("categories", {"in": self.categories_any}, pointers))
        for place, label in enumerate(self.categories_all):
            pointers = {"eq": f"/categories_all/{place}"}
            categories.append(FieldCondition("categories", {"eq": label}, pointers))
        if self.categories_none:
            pointers = {"in": "/categories_none"}
            unwanted = FieldCondition("categories", {"in": self.categories_none}, pointers)
            categories.append(FilterGroup("none", (unwanted,)))
        wanted = FilterGroup("all", tuple(categories))
        if self.max_error is not None:
            raise Invalid("/max_error", _NO_HISTORY)
        return SimilarQuery(
            item_id,
            self.limit,
            wanted,
            _space(self.space),
            retrieval=self.to_retrieval(),
        )


class SimilarIn(Body):
    """A request for similar items, with a filter, rules, facets and fields."""

    model_config = example(
        limit=5,
        filter={"field": "published_at", "gte": "2026-01-01T00:00:00Z"},
        rules=[{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
        at_most=[{"field": "categories", "count": 2}],
        facets=[{"field": "categories"}],
        fields=["tags"],
    )

    limit: Limit = 20
    space: SpaceIn = "both"
    filter: FilterField = FilterIn()
    rules: Rules = Field(
        [],
        description="Boosts, which are a part of the score (`parts.rules`), and items to put "
        "behind all others. A score is in standard deviations of the similarities of all items: 1 "
        "is one of them.",
    )
    pin: Pins = Field(
        [],
        description="Items at fixed places, as in /v1/recommend. One that has no key in the spaces "
        "that are compared is left out with a warning.",
    )
    at_most: AtMosts = Field([])
    facets: Facets = Field([])
    fields: AnswerFields = Field([])
    retrieval: RetrievalIn = RetrievalIn()

    def to_query(self, item_id: str) -> SimilarQuery:
        """Return the domain's value.

        Raises `Invalid` for rules, pins and quotas that repeat one another, and for `max_error`.
        """
        if "retrieval" in self.model_fields_set:
            self.retrieval.check_no_history(_NO_HISTORY)
        return SimilarQuery(
            item_id,
            self.limit,
            self.filter.to_filter(),
            _space(self.space),
            tuple(facet.to_facet() for facet in self.facets),
            tuple(self.fields),
            Steering(to_rules(self.rules), to_pins(self.pin), to_at_most(self.at_most)),
            self.retrieval.to_retrieval(),
        )


def _space(space: Literal["both", "content", "trained"]) -> Space | None:
    return None if space == "both" else space
