"""Parameters and body of items that are taken together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.domain.ready_queries import TogetherQuery, TogetherRelation
from service.http.schemas.base import Body, Limit, Params, example
from service.http.schemas.questions.filters import FilterField, FilterIn
from service.http.schemas.questions.popular import CountedTypes, types_of
from service.http.schemas.questions.selection import AnswerFields, RequestTime

RelationIn = Annotated[
    TogetherRelation,
    Field(
        description="`after`: what users take in their next 20 baskets; `basket`: what they take "
        "at the same time. A basket is all that a user takes at one time."
    ),
]


class TogetherParams(Params):
    """Query parameters of items taken together."""

    relation: RelationIn = "after"
    limit: Limit = 20
    at: RequestTime = None

    def to_query(self, item_id: str) -> TogetherQuery:
        """Return the domain's value."""
        return TogetherQuery(item_id, self.relation, self.limit, at=self.at)


class TogetherIn(Body):
    """A request for items taken together, with a filter."""

    model_config = example(
        relation="basket", limit=5, filter={"field": "categories", "in": ["talk"]}
    )

    relation: RelationIn = "after"
    limit: Limit = 20
    type: CountedTypes = None
    filter: FilterField = FilterIn()
    at: RequestTime = None
    fields: AnswerFields = Field([])

    def to_query(self, item_id: str) -> TogetherQuery:
        """Return the domain's value."""
        return TogetherQuery(
            item_id,
            self.relation,
            self.limit,
            types_of(self.type),
            self.filter.to_filter(),
            self.at,
            tuple(self.fields),
        )
