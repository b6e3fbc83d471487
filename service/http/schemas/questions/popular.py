"""Body of popular items."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.domain.errors import Invalid
from service.domain.queries import Requester
from service.domain.ready_queries import (
    TREND_HALF_LIFE,
    TREND_WINDOW,
    PopularityKind,
    PopularQuery,
)
from service.domain.steering import Steering
from service.http.schemas.base import Body, Ids, Limit, example
from service.http.schemas.questions.filters import FilterField, FilterIn
from service.http.schemas.questions.selection import AnswerFields, Facets, RequestTime
from service.http.schemas.questions.steering import (
    AtMosts,
    Pins,
    Rules,
    to_at_most,
    to_pins,
    to_rules,
)
from service.http.schemas.scalars import Duration, EventType, Id

MAX_TYPES = 100

CountedTypes = Annotated[
    EventType | Annotated[list[EventType], Field(max_length=MAX_TYPES)] | None,
    Field(
        description="The type, or types, of the events that count: by default all but dislikes "
        "and returns."
    ),
]


def types_of(given: str | list[str] | None) -> frozenset[str] | None:
    """Return the event types of a `CountedTypes`; None = all but negative ones."""
    return None if given is None else frozenset([given] if isinstance(given, str) else given)


class PopularIn(Body):
    """A request for the items that everybody takes, by what the service counts."""

    model_config = example(
        by="trending",
        limit=5,
        filter={"field": "categories", "in": ["talk"]},
        fields=["categories"],
    )

    by: PopularityKind = Field(
        "popular",
        description="`popular`: by the sum of the weights of an item's events; `trending`: by how "
        "far its events of now, decayed, exceed what its own past predicts; `newest`: by "
        "`published_at`, or the first event; `rated`: by the mean weight of its events, shrunk "
        "to the mean of all, with a warning where the weights cannot be ratings.",
    )
    window: Duration | None = Field(
        None,
        description="Only events of this long before the request count; of `newest`, only items "
        "that came within it. By default everything; of `trending` it is the item's past, 28 days.",
    )
    half_life: Duration | None = Field(
        None,
        description="An event of this age counts half: of `popular` and `trending`. By default "
        "nothing decays in `popular`, and `trending` has 6 hours.",
    )
    type: CountedTypes = None
    filter: FilterField = FilterIn()
    limit: Limit = 20
    user_id: Id | None = Field(None, description="A user, for `exclude_seen`.")
    exclude_seen: bool = Field(False, description="Leave out items of the user's history.")
    exclude: Ids = Field([], description="Items to leave out.")
    at: RequestTime = None
    rules: Rules = Field([])
    pin: Pins = Field([])
    at_most: AtMosts = Field([])
    facets: Facets = Field([])
    fields: AnswerFields = Field([])

    def to_query(self) -> PopularQuery:
        """Return the domain's value. Raises `Invalid` for fields that do not go together."""
        if self.half_life is not None and self.by in ("newest", "rated"):
            raise Invalid("/half_life", "is for popular and trending items")
        if self.type is not None and self.by == "newest":
            raise Invalid("/type", "is not for the newest items, which any event makes known")
        if self.by == "trending":
            half_life = TREND_HALF_LIFE if self.half_life is None else self.half_life
            if half_life > (TREND_WINDOW if self.window is None else self.window):
                pointer = "/half_life" if self.window is None else "/window"
                raise Invalid(pointer, "the past must be at least as long as the half-life")
        if self.exclude_seen and self.user_id is None:
            raise Invalid("/exclude_seen", "needs a `user_id`")
        return PopularQuery(
            Requester(user_id=self.user_id, at=self.at),
            self.by,
            self.window,
            self.half_life,
            types_of(self.type),
            self.limit,
            self.filter.to_filter(),
            self.exclude_seen,
            frozenset(self.exclude),
            tuple(facet.to_facet() for facet in self.facets),
            tuple(self.fields),
            Steering(to_rules(self.rules), to_pins(self.pin), to_at_most(self.at_most)),
        )
