"""Bodies and parameters of questions that are answered from the log of all events."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from models.catalogue.item_filter import EVERYTHING
from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.questions.asked import MAX_EXPLAIN, Session, check_steering
from service.questions.parts import (
    ALL_EVENTS,
    AUTO,
    AnswerFields,
    AtMosts,
    Facets,
    FilterField,
    Pins,
    RequestTime,
    RetrievalIn,
    RetrievalParams,
    Rules,
    VisibleIn,
)
from service.questions.scalars import (
    INTEGRAL,
    Body,
    Duration,
    EventType,
    FacetField,
    Id,
    Ids,
    Limit,
    Params,
    example,
)

_HOUR = 3_600_000_000  # microseconds
TREND_HALF_LIFE = 6 * _HOUR  # by default
TREND_WINDOW = 28 * 24 * _HOUR  # by default
TREND_FLOOR = 1.0  # standard deviations above its past, from which an item is trending
PopularityKind = Literal["popular", "trending", "newest", "rated"]
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
    filter: FilterField = EVERYTHING
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

    def check(self, settings: Settings) -> None:  # noqa: ARG002
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
        check_steering(self.rules, self.pin, self.at_most)


RelationIn = Annotated[
    Literal["after", "basket"],
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

    @property
    def as_body(self) -> TogetherIn:
        return TogetherIn.model_construct(**vars(self))


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
    filter: FilterField = EVERYTHING
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

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        check_steering(self.rules, self.pin, self.at_most)


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
    visible: VisibleIn = ALL_EVENTS
    retrieval: RetrievalIn = AUTO
    rows: Annotated[int, Field(ge=1, le=MAX_ROWS), INTEGRAL] = Field(
        6, description="The most rows."
    )
    limit: Annotated[int, Field(ge=1, le=MAX_ROW_ITEMS), INTEGRAL] = Field(
        10, description="The most items of a row. A row has at least three, or as many as this."
    )
    filter: FilterField = EVERYTHING
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

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        check_steering(self.rules, at_most=self.at_most)


class ItemEventsParams(Params):
    """Query parameters of an item's events."""

    limit: Limit = 20


class AudienceParams(RetrievalParams):
    """Query parameters of an item's audience."""

    limit: Limit = 20
    exclude_seen: bool = Field(True, description="Leave out users with events on the item.")
    explain: Annotated[int, Field(ge=0, le=MAX_EXPLAIN), INTEGRAL] = Field(
        3, description="The most events to name for each user."
    )
    at: RequestTime = None


class AffinitiesParams(RetrievalParams):
    """Query parameters of a user's affinities."""

    field: FacetField = Field("categories", description="The field whose values are ranked.")
    limit: Limit = 20
    at: RequestTime = None

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        if self.max_error is not None:
            raise Invalid("/max_error", "must be left out: every event is attended, or `k` of them")
