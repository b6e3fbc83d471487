"""Parameters and body of items that are taken together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.domain.ready_queries import TogetherQuery, TogetherRelation
from service.domain.steering import Steering
from service.http.schemas.base import Body, Limit, Params, example
from service.http.schemas.questions.filters import FilterField, FilterIn
from service.http.schemas.questions.popular import CountedTypes, types_of
from service.http.schemas.questions.selection import AnswerFields, Facets, RequestTime
from service.http.schemas.questions.steering import (
    AtMosts,
    Pins,
    Rules,
    to_at_most,
    to_pins,
    to_rules,
)

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
    """A request for items taken together, with a filter, rules, facets and fields."""

    model_config = example(
        relation="basket",
        limit=5,
        filter={"field": "categories", "in": ["talk"]},
        rules=[{"name": "sold out", "when": {"field": "attributes.stock", "lte": 0}, "bury": True}],
        at_most=[{"field": "tags", "count": 2}],
        facets=[{"field": "tags"}],
        fields=["categories"],
    )

    relation: RelationIn = "after"
    limit: Limit = 20
    type: CountedTypes = None
    filter: FilterField = FilterIn()
    at: RequestTime = None
    rules: Rules = Field(
        [],
        description="Boosts, which are a part of the score (`parts.rules`), and items to put "
        "behind all others, similar ones too. Items that are only similar come after those that "
        "are taken together, whatever their boosts.",
    )
    pin: Pins = Field(
        [],
        description="Items at fixed places, as in /v1/recommend. One that is neither taken with "
        "the item nor similar to it is left out with a warning.",
    )
    at_most: AtMosts = Field([])
    facets: Facets = Field(
        [],
        description="Fields whose values are counted over all items that are taken together with "
        "the item; similar ones, which fill the answer up, are not counted.",
    )
    fields: AnswerFields = Field([])

    def to_query(self, item_id: str) -> TogetherQuery:
        """Return the domain's value.

        Raises `Invalid` for rules, pins and quotas that repeat one another.
        """
        return TogetherQuery(
            item_id,
            self.relation,
            self.limit,
            types_of(self.type),
            self.filter.to_filter(),
            self.at,
            tuple(self.fields),
            tuple(facet.to_facet() for facet in self.facets),
            Steering(to_rules(self.rules), to_pins(self.pin), to_at_most(self.at_most)),
        )
