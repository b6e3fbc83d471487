"""Body of the rows of a home page."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from service.domain.queries import InlineEvent, Requester
from service.domain.ready_queries import RowsQuery
from service.http.schemas.base import Body, Ids, example
from service.http.schemas.questions.ask import Session
from service.http.schemas.questions.filters import FilterField, FilterIn
from service.http.schemas.questions.selection import (
    AnswerFields,
    Facets,
    RequestTime,
    RetrievalIn,
    VisibleIn,
)
from service.http.schemas.questions.steering import AtMosts, Rules, to_at_most, to_rules
from service.http.schemas.scalars import INTEGRAL, Id

MAX_ROWS = 20
MAX_ROW_ITEMS = 50


class RowsIn(Body):
    """A request for the rows of a home page."""

    model_config = example(
        user_id="ada",
        rows=3,
        limit=5,
        filter={"none": [{"field": "attributes.language", "eq": "de"}]},
        fields=["categories"],
        rules=[{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
        at_most=[{"field": "categories", "count": 2}],
        facets=[{"field": "categories", "limit": 5}],
    )

    user_id: Id | None = Field(None, description="The user whose page it is; a stranger without.")
    history: Session | None = Field(
        None, description="Events of this session; with `user_id`, laid over the stored ones."
    )
    visible: VisibleIn = VisibleIn()
    retrieval: RetrievalIn = RetrievalIn()
    rows: Annotated[int, Field(ge=1, le=MAX_ROWS), INTEGRAL] = Field(
        6, description="The most rows."
    )
    limit: Annotated[int, Field(ge=1, le=MAX_ROW_ITEMS), INTEGRAL] = Field(
        10, description="The most items of a row. A row has at least three, or as many as this."
    )
    filter: FilterField = FilterIn()
    exclude: Ids = Field([], description="Items to leave out.")
    rules: Rules = Field(
        [],
        description="Boosts, which are a part of the score (`parts.rules`) by the scores that each "
        "row is ranked by; rows that come from the user's history share these. Buried items are "
        "left out: a page has few places.",
    )
    at_most: AtMosts = Field(
        [], description="How many items of one row may share a value of a field."
    )
    at: RequestTime = None
    facets: Facets = Field(
        [],
        description="Fields whose values are counted over all items that may stand in a row: those "
        "that pass the filter, are neither excluded nor buried, and were not seen, or taken at "
        "several times.",
    )
    fields: AnswerFields = Field([])

    def to_query(self) -> RowsQuery:
        """Return the domain's value."""
        history = cast("tuple[InlineEvent, ...] | None", self.history)  # as `Session` makes it
        return RowsQuery(
            Requester(
                self.user_id,
                history,
                self.visible.to_visible(),
                self.retrieval.to_retrieval(),
                at=self.at,
            ),
            self.rows,
            self.limit,
            self.filter.to_filter(),
            frozenset(self.exclude),
            tuple(self.fields),
            to_rules(self.rules),
            to_at_most(self.at_most),
            tuple(facet.to_facet() for facet in self.facets),
        )
