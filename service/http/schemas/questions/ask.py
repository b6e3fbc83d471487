"""Bodies of score, recommend and search."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.domain.errors import Invalid
from service.domain.queries import (
    InlineEvent,
    RecommendQuery,
    Requester,
    ScoreQuery,
    SearchQuery,
)
from service.domain.steering import Steering
from service.http.schemas.base import Body, Ids, Limit, Weight, example
from service.http.schemas.questions.filters import FilterField, FilterIn
from service.http.schemas.questions.selection import (
    AnswerFields,
    Facets,
    RequestTime,
    RetrievalIn,
    SortIn,
    Temperature,
    VisibleIn,
)
from service.http.schemas.questions.steering import (
    AtMosts,
    Explore,
    Pins,
    Rules,
    Seed,
    to_at_most,
    to_pins,
    to_rules,
)
from service.http.schemas.scalars import INTEGRAL, EventType, Id, Timestamp

MAX_EXPLAIN = 50
MAX_EXACT = 100  # events per request whose leaving out may be computed exactly
MAX_EFFECTS = 100  # items per request whose effects may be estimated
EFFECTS_UP_TO = 20  # items of /v1/score whose effects are estimated unless a request says otherwise
MAX_HISTORY = 10_000
MAX_QUERY = 20_000  # characters, some thousand words
MAX_SORT = 5
MAX_OFFSET = 100_000  # items before a page; cursors reach further
MAX_CURSOR = 20_000


class InlineEventIn(Body):
    """One event of a session, sent with the request and not stored."""

    item_id: Id
    type: EventType = "view"
    weight: Weight = 1.0
    timestamp: Timestamp | None = None


class Question(Body):
    """Fields that all questions share: the requester, and the softmax over their memory."""

    user_id: Id | None = Field(None, description="The user whose stored history is attended.")
    history: Annotated[list[InlineEventIn], Field(max_length=MAX_HISTORY)] | None = Field(
        None, description="Events of this session; with `user_id`, laid over the stored ones."
    )
    visible: VisibleIn = VisibleIn()
    retrieval: RetrievalIn = RetrievalIn()
    temperature: Temperature = 1.0
    hard: bool = Field(False, description="Attend the one best row only: a lookup.")
    exclude_self: bool = Field(False, description="Hide a target's own events from it.")
    at: RequestTime = None
    explain: Annotated[int, Field(ge=0, le=MAX_EXPLAIN), INTEGRAL] = Field(
        0,
        description="Number of reasons to name for each item: those that raise its score most, "
        "then those that lower it most. The events on one item, of one type, are one reason.",
    )
    explain_effects: bool | None = Field(
        None,
        description="Also estimate the `effect` of each event that `explain` names, which takes "
        f"some 5 ms an item: of at most {MAX_EFFECTS} items. By default in /v1/score of up to "
        f"{EFFECTS_UP_TO} items, and nowhere else.",
    )
    explain_exact: bool = Field(
        False,
        description="Compute these effects by scoring the history without each event, instead of "
        "estimating them. Each different reason costs about as much as one more /v1/score; "
        f"`explain` times the number of items must be at most {MAX_EXACT}. Effects of the older "
        "events of a long history are estimated all the same.",
    )

    def to_requester(self, items: int, *, effects: bool = False) -> Requester:
        """Return the domain's value; `effects` is the default of `explain_effects`.

        Raises `Invalid` for too many items to estimate effects, or too many events to leave out.
        """
        if self.explain and self.explain_effects and items > MAX_EFFECTS:
            raise Invalid(
                "/explain_effects",
                f"effects would be estimated for {items} items; {MAX_EFFECTS} are allowed",
            )
        if self.explain_exact and self.explain * items > MAX_EXACT:
            raise Invalid(
                "/explain_exact",
                f"{self.explain} events for each of {items} items are {self.explain * items}; "
                f"{MAX_EXACT} are allowed",
            )
        history = None
        if self.history is not None:
            history = tuple(InlineEvent(**vars(event)) for event in self.history)
        values = {name: getattr(self, name) for name in Requester.__slots__}
        values["history"] = history
        if self.explain_effects is None:
            values["explain_effects"] = effects
        values["visible"] = self.visible.to_visible()
        values["retrieval"] = self.retrieval.to_retrieval()
        return Requester(**values)


class ScoreIn(Question):
    """Targets to score."""

    model_config = example(user_id="ada", item_ids=["talk-7", "talk-8"], explain=3)

    item_ids: Ids = Field(description="The targets, at most HEED_MAX_TARGETS.")
    fields: AnswerFields = Field([])
    rules: Rules = Field([])

    def to_query(self, max_targets: int) -> ScoreQuery:
        """Return the domain's value.

        Raises `Invalid` for more targets than `max_targets`, or too many to compute effects.
        """
        if len(self.item_ids) > max_targets:
            raise Invalid(
                "/item_ids", f"has {len(self.item_ids)} targets; {max_targets} are allowed"
            )
        few = len(self.item_ids) <= EFFECTS_UP_TO
        requester = self.to_requester(len(self.item_ids), effects=few)
        return ScoreQuery(requester, tuple(self.item_ids), tuple(self.fields), to_rules(self.rules))


class RecommendIn(Question):
    """A request for recommendations from the whole catalogue."""

    model_config = example(
        user_id="ada",
        limit=10,
        filter={
            "all": [
                {"field": "categories", "in": ["talk", "tutorial"]},
                {"field": "attributes.price", "gte": 10, "lt": 20},
                {"none": [{"field": "attributes.language", "eq": "de"}]},
            ]
        },
        facets=[{"field": "categories", "limit": 5}],
        fields=["categories", "attributes.price"],
        rules=[
            {"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5},
            {
                "name": "sold out",
                "when": {"field": "attributes.stock", "lte": 0},
                "bury": True,
            },
        ],
        pin=[{"item_id": "talk-7", "position": 1}],
        at_most=[{"field": "categories", "count": 2}],
        diversity=0.2,
    )

    limit: Limit = 20
    filter: FilterField = FilterIn()
    exclude_seen: bool = Field(True, description="Leave out items of the history.")
    exclude: Ids = Field([], description="Items to leave out.")
    diversity: float = Field(
        0.0,
        ge=0,
        le=1,
        description="0: by score alone; 1: most varied. Boosts are a part of the score, and "
        "`at_most` holds for what is chosen.",
    )
    rules: Rules = Field([])
    pin: Pins = Field([])
    at_most: AtMosts = Field([])
    explore: Explore = 0.0
    seed: Seed = None
    facets: Facets = Field([])
    fields: AnswerFields = Field([])

    def to_query(self) -> RecommendQuery:
        """Return the domain's value.

        Raises `Invalid` for too many items to compute effects, and for rules, pins and quotas that
        repeat one another.
        """
        return RecommendQuery(
            self.to_requester(self.limit),
            self.limit,
            self.filter.to_filter(),
            self.exclude_seen,
            frozenset(self.exclude),
            self.diversity,
            tuple(facet.to_facet() for facet in self.facets),
            tuple(self.fields),
            Steering(
                to_rules(self.rules),
                to_pins(self.pin),
                to_at_most(self.at_most),
                self.explore,
                self.seed,
            ),
        )


class SearchIn(Question):
    """Search the catalogue by text, or list it; with a user, a search is re-ranked for them.

    Without a `query` items are listed in the order of `sort`, by default the newest first; with
    both, the items that match are.

    `retrieval`, `temperature` and `hard` hold for both memories that are attended: the fields of
    the catalogue's items, and the user's history, whose events `explain` names.
    """

    model_config = example(
        query="gentle introduction to asyncio",
        limit=10,
        rules=[{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
        at_most=[{"field": "categories", "count": 2}],
    )

    query: str = Field("", max_length=MAX_QUERY, examples=["gentle introduction to asyncio"])
    limit: Limit = 20
    filter: FilterField = FilterIn()
    personal_weight: float = Field(
        2.0,
        ge=0,
        le=100,
        description="How much the user's memory counts: logits that one standard deviation of its "
        "scores is worth. 0 leaves the order of search without a user.",
    )
    highlight: bool = Field(
        False,
        description="Also give the title and a snippet of the description of each item, with the "
        "words of the query marked.",
    )
    sort: Annotated[list[SortIn], Field(max_length=MAX_SORT)] = Field(
        [], description="The order of a list; items that tie are in the order of their ids."
    )
    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET), INTEGRAL] = Field(
        0, description="Items of a list to leave out."
    )
    cursor: Annotated[str, Field(max_length=MAX_CURSOR)] | None = Field(
        None, description="The `cursor` of the page before; the rest of the question is the same."
    )
    rules: Rules = Field(
        [],
        description="Boosts, which are a part of the score (`parts.rules`), and items to put "
        "behind all others. Scores of a search are logarithms of weights: a boost of 1 counts as "
        "much as 2.7 times the weight, and of an item that matches in words the score is often 10 "
        "to 30 above that of one that does not. Of a large catalogue, the items that the search "
        "compared are moved. Not for a list, which is in the order of its fields.",
    )
    pin: Pins = Field(
        [],
        description="Items at fixed places, as in /v1/recommend. One that the search did not "
        "compare with the query has no score. Not for a list.",
    )
    at_most: AtMosts = Field(
        [],
        description="How many items may share a value of a field, filled from further down. In a "
        "list it holds for all pages together.",
    )
    facets: Facets = Field([])
    fields: AnswerFields = Field([])

    def to_query(self) -> SearchQuery:
        """Return the domain's value.

        Raises `Invalid` for too many items to compute effects, a page of what is not a list, one by
        offset and cursor, a condition on events where none are attended, and rules or pins of a
        list.
        """
        if self.cursor is not None and self.offset:
            raise Invalid("/offset", "must be 0 beside a `cursor`")
        query = SearchQuery(
            self.to_requester(self.limit),
            self.query,
            self.limit,
            self.filter.to_filter(),
            self.personal_weight,
            self.highlight,
            tuple(key.to_sort() for key in self.sort),
            self.offset,
            self.cursor,
            tuple(facet.to_facet() for facet in self.facets),
            tuple(self.fields),
            Steering(to_rules(self.rules), to_pins(self.pin), to_at_most(self.at_most)),
        )
        if query.is_listing:
            for name in ("rules", "pin"):
                if getattr(self, name):
                    raise Invalid(
                        f"/{name}",
                        "needs a `query` and no `sort`: a list is in the order of its fields",
                    )
            self._refuse_conditions("must be left out of a list, which attends no events")
            return query
        if self.user_id is None and self.history is None:
            self._refuse_conditions("needs a `user_id` or a `history`, whose events it is about")
        for name in ("offset", "cursor"):
            if name in self.model_fields_set:
                raise Invalid(f"/{name}", "needs a `sort`, or an empty `query`")
        return query

    def _refuse_conditions(self, why: str) -> None:
        """Raise `Invalid` for a condition on events, where none are attended."""
        for name in ("visible", "at"):
            if name in self.model_fields_set:
                raise Invalid(f"/{name}", why)
