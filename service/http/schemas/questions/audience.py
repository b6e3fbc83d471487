"""Parameters of an item's audience and of a user's affinities."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.domain.errors import Invalid
from service.domain.ready_queries import AffinitiesQuery, AudienceQuery
from service.http.schemas.base import Limit
from service.http.schemas.questions.ask import MAX_EXPLAIN
from service.http.schemas.questions.item_fields import FacetField
from service.http.schemas.questions.selection import RequestTime, RetrievalParams
from service.http.schemas.scalars import INTEGRAL


class AudienceParams(RetrievalParams):
    """Query parameters of an item's audience."""

    limit: Limit = 20
    exclude_seen: bool = Field(True, description="Leave out users with events on the item.")
    explain: Annotated[int, Field(ge=0, le=MAX_EXPLAIN), INTEGRAL] = Field(
        3, description="The most events to name for each user."
    )
    at: RequestTime = None

    def to_query(self, item_id: str) -> AudienceQuery:
        """Return the domain's value."""
        return AudienceQuery(
            item_id,
            self.limit,
            self.exclude_seen,
            self.explain,
            self.at,
            self.to_retrieval(),
        )


class AffinitiesParams(RetrievalParams):
    """Query parameters of a user's affinities."""

    field: FacetField = Field("categories", description="The field whose values are ranked.")
    limit: Limit = 20
    at: RequestTime = None

    def to_query(self, user_id: str) -> AffinitiesQuery:
        """Return the domain's value. Raises `Invalid` for `max_error`."""
        if self.max_error is not None:
            raise Invalid("/max_error", "must be left out: every event is attended, or `k` of them")
        return AffinitiesQuery(user_id, self.field, self.limit, self.at, self.to_retrieval())
