"""Questions about items for somebody, or about one item: score, recommend, search, similar.

`check` refuses members that would do nothing or that contradict each other. It is apart from
validation because a scenario is checked once more when a request narrows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from models.attention.attend import AttentionOptions
from models.catalogue.item_filter import EVERYTHING, Group
from service.domain.errors import Invalid
from service.domain.settings import Settings
from service.questions.parts import (
    ALL_EVENTS,
    AUTO,
    MAX_CONDITIONS,
    MAX_VALUES,
    AnswerFields,
    AtMostIn,
    AtMosts,
    Explore,
    Facets,
    FilterField,
    PinIn,
    Pins,
    RequestTime,
    RetrievalIn,
    RetrievalParams,
    RuleIn,
    Rules,
    Seed,
    SortIn,
    Temperature,
    VisibleIn,
    in_categories,
)
from service.questions.scalars import (
    INTEGRAL,
    Body,
    EventType,
    Id,
    Ids,
    Label,
    Limit,
    Timestamp,
    Weight,
    example,
)

Effects = Literal["none", "estimate", "exact"]

MAX_RANKED = 10_000  # items at most, with those of the pages before, that a search ranks
MAX_EXPLAIN = 50
MAX_EXACT = 100  # events per request whose leaving out may be computed exactly
MAX_EFFECTS = 100  # items per request whose effects may be estimated
EFFECTS_UP_TO = 20  # items of /v1/score whose effects are estimated unless a request says otherwise
MAX_HISTORY = 10_000
MAX_QUERY = 20_000  # characters, some thousand words
MAX_SORT = 5
MAX_OFFSET = 100_000  # items before a page; cursors reach further
MAX_CURSOR = 20_000
# Fields of a search that do nothing where no events are attended.
_OF_EVENTS = (
    *("visible", "at", "exclude_self", "personal_weight"),
    *("explain", "explain_effects", "explain_exact"),
)
_STEERED = "must be left out: only items are moved; use `filter` to leave out events on some items"
_PAGED = "must be left out: raise `limit`, or narrow the search by `visible` or `filter`"
_EXPLAINED = "must be left out: `parts` and `matched` say why an event is found"
# Fields of a search that a history is not searched by, and the advice for each.
_NOT_OF_EVENTS: Mapping[str, str] = {
    "sort": "must be left out: events that match best come first. GET /v1/users/{user_id}/history "
    "lists them by time",
    "offset": _PAGED,
    "cursor": _PAGED,
    "facets": "must be left out: values are counted over items; use the memory `catalogue`",
    "rules": _STEERED,
    "pin": _STEERED,
    "at_most": _STEERED,
    "personal_weight": "must be left out: every event found is the user's own",
    "explain": _EXPLAINED,
    "explain_effects": _EXPLAINED,
    "explain_exact": _EXPLAINED,
    "exclude_self": "must be left out: there are no targets whose events are hidden from them",
}


class InlineEventIn(Body):
    """One event of a session, sent with the request and not stored."""

    item_id: Id
    type: EventType = "view"
    weight: Weight = 1.0
    timestamp: Timestamp | None = None


Session = Annotated[list[InlineEventIn], Field(max_length=MAX_HISTORY)]


class PersonalQuestion(Body):
    """Members that score, recommend and search share: whose memory is attended, and how."""

    user_id: Id | None = Field(None, description="The user whose stored history is attended.")
    history: Session | None = Field(
        None, description="Events of this session; with `user_id`, laid over the stored ones."
    )
    visible: VisibleIn = ALL_EVENTS
    retrieval: RetrievalIn = AUTO
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

    @property
    def effects(self) -> Effects:
        """How the effects of the events that `explain` names are found."""
        if self.explain_exact:
            return "exact"
        return "estimate" if self.explain_effects else "none"

    def options(self, settings: Settings) -> AttentionOptions:
        """Return the options by which the memory is attended."""
        return attention_options(
            self.retrieval,
            settings,
            temperature=self.temperature,
            hard=self.hard,
            exclude_self=self.exclude_self,
        )

    def check_effects(self, items: int) -> None:
        """Raise `Invalid` for more items or events than effects may be computed of."""
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


class ScoreIn(PersonalQuestion):
    """Targets to score."""

    model_config = example(user_id="ada", item_ids=["talk-7", "talk-8"], explain=3)

    item_ids: Ids = Field(description="The targets, at most HEED_MAX_TARGETS.")
    fields: AnswerFields = Field([])
    rules: Rules = Field([])

    @property
    def effects(self) -> Effects:
        """How effects are found: by default they are estimated for a few targets."""
        if self.explain_effects is None and len(self.item_ids) <= EFFECTS_UP_TO:
            return "exact" if self.explain_exact else "estimate"
        return super().effects

    def check(self, settings: Settings) -> None:
        targets = len(self.item_ids)
        if targets > settings.max_targets:
            allowed = f"has {targets} targets; {settings.max_targets} are allowed"
            raise Invalid("/item_ids", allowed)
        self.check_effects(targets)
        check_steering(self.rules)


class RecommendIn(PersonalQuestion):
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
    filter: FilterField = EVERYTHING
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

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        self.check_effects(self.limit)
        check_steering(self.rules, self.pin, self.at_most)


class SearchIn(PersonalQuestion):
    """Search the catalogue by text, or list it; with a user, a search is re-ranked for them.

    Without a `query` items are listed in the order of `sort`, by default the newest first; with
    both, the items that match are.

    `retrieval`, `temperature` and `hard` hold for both memories that are attended: the fields of
    the catalogue's items, and the user's history, whose events `explain` names. Without a user,
    fields about events are refused. A list refuses all fields that its order does not depend on.

    With `"memory": "history"` the answer has the events of the user, or of `history`, on the items
    that match `query`.
    """

    model_config = example(
        query="gentle introduction to asyncio",
        limit=10,
        rules=[{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
        at_most=[{"field": "categories", "count": 2}],
    )

    memory: Literal["catalogue", "history"] = Field(
        "catalogue",
        description="`history` searches the events of the user, or of `history`, instead of the "
        "catalogue. It needs a `query`, and takes `limit`, `filter` (of the items), `visible`, "
        "`at`, `highlight`, `fields`, `temperature`, `hard` and the `mode` and `k` of `retrieval`.",
    )
    query: str = Field("", max_length=MAX_QUERY, examples=["gentle introduction to asyncio"])
    limit: Limit = 20
    filter: FilterField = EVERYTHING
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
        0, description="Items to leave out, of a list or of a search, which has 10,000."
    )
    fill: bool = Field(
        False,
        description="Fill the answer up to `limit` with items that do not match, the nearest by "
        "meaning. Items match if they have a word or a keyword of the query, or weigh at least a "
        "thousandth of what the best one does. Not for a list.",
    )
    min_score: float | None = Field(
        None,
        description="The least `parts.match` of items that are answered and counted, in place of "
        "the default. Not for a list.",
    )
    cursor: Annotated[str, Field(max_length=MAX_CURSOR)] | None = Field(
        None, description="The `cursor` of the page before; the rest of the question is the same."
    )
    rules: Rules = Field(
        [],
        description="Boosts, which are a part of the score (`parts.rules`), and items to put "
        "behind all others. If the catalogue is large, the items that the search compared are "
        "moved. Not for a list, which is in the order of its fields.",
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

    @property
    def is_listing(self) -> bool:
        """Report whether items are listed in the order of their fields."""
        return self.memory == "catalogue" and (bool(self.sort) or not self.query.strip())

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        """Raise `Invalid` for what the question cannot honour.

        That is too many items to compute effects, a page by offset and cursor, fields that would do
        nothing (of pages without a list, of a softmax or rules in one, of events where none are
        attended), and for a history: no history, no query, and what only items have.
        """
        if self.memory == "history":
            self._check_history()
        if self.cursor is not None and self.offset:
            raise Invalid("/offset", "must be 0 beside a `cursor`")
        self.check_effects(self.limit)
        check_steering(self.rules, self.pin, self.at_most)
        why = ""
        if self.is_listing:
            ordered = "needs a `query` and no `sort`: a list is in the order of its fields"
            self._refuse(ordered, "rules", "pin", "temperature", "hard", "fill", "min_score")
            why = "must be left out of a list, which attends no events"
            if not self.query.strip():
                self._refuse("needs a `query`", "retrieval", "highlight")
        else:
            if self.offset + self.limit > MAX_RANKED:
                why = f"must be at most {MAX_RANKED - self.limit} in a search: `sort` lists further"
                raise Invalid("/offset", why)
            if self.fill and self.min_score is not None:
                raise Invalid("/min_score", "must be left out beside `fill`, which has no floor")
            if self.user_id is None and self.history is None:
                why = "needs a `user_id` or a `history`, whose events it is about"
        if why:
            self._refuse(why, *_OF_EVENTS, "user_id", "history")
            if "retrieval" in self.model_fields_set:
                self.retrieval.check_no_history(why)

    def _check_history(self) -> None:
        if self.user_id is None and self.history is None:
            raise Invalid("/user_id", "is required to search a history, or a `history`")
        if not self.query.strip():
            why = "must not be empty: GET /v1/users/{user_id}/history lists a whole history"
            raise Invalid("/query", why)
        for name, why in _NOT_OF_EVENTS.items():
            self._refuse(f"{why} (with the memory `history`)", name)
        for name in ("max_error", "probes"):
            if getattr(self.retrieval, name) is not None:
                why = "must be left out: `k` says how many keys of a history are attended"
                raise Invalid(f"/retrieval/{name}", why)

    def _refuse(self, why: str, *names: str) -> None:
        """Raise `Invalid` for the first of these fields that the request sets."""
        for name in names:
            default = type(self).model_fields[name].default
            if name in self.model_fields_set and getattr(self, name) != default:
                raise Invalid(f"/{name}", why)


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

    @property
    def as_body(self) -> SimilarIn:
        """The same question as a body. Raises `Invalid` for `max_error`."""
        if self.max_error is not None:
            raise Invalid("/max_error", _NO_HISTORY)
        categories = in_categories(
            self.categories_any, self.categories_all, self.categories_none, "/categories_"
        )
        return _SimilarOfParams.model_construct(
            set(),
            limit=self.limit,
            space=self.space,
            filter=Group("all", tuple(categories)),
            retrieval=self.as_retrieval,
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

    filter_pointer: ClassVar[str] = "/filter"

    limit: Limit = 20
    space: SpaceIn = "both"
    filter: FilterField = EVERYTHING
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
    retrieval: RetrievalIn = AUTO

    def check(self, settings: Settings) -> None:  # noqa: ARG002
        if "retrieval" in self.model_fields_set:
            self.retrieval.check_no_history(_NO_HISTORY)
        check_steering(self.rules, self.pin, self.at_most)


class _SimilarOfParams(SimilarIn):
    filter_pointer = ""  # its conditions are query parameters


def attention_options(
    retrieval: RetrievalIn,
    settings: Settings,
    *,
    temperature: float = 1.0,
    hard: bool = False,
    exclude_self: bool = False,
) -> AttentionOptions:
    """Return the options by which a memory is attended; what is left open is a setting."""
    return AttentionOptions(
        temperature,
        hard,
        exclude_self,
        retrieval.mode,
        retrieval.k,
        probes=retrieval.probes,
        exact_up_to=settings.max_exact_rows,
        max_error=retrieval.max_error or settings.max_attention_error,
    )


def check_steering(
    rules: Sequence[RuleIn], pins: Sequence[PinIn] = (), at_most: Sequence[AtMostIn] = ()
) -> None:
    """Raise `Invalid` for a rule, a pin or a quota that repeats another."""
    _check_distinct([rule.name for rule in rules], "rules", "name")
    _check_distinct([pin.item_id for pin in pins], "pin", "item_id")
    _check_distinct([pin.position for pin in pins], "pin", "position")
    _check_distinct([quota.field for quota in at_most], "at_most", "field")


def _check_distinct(values: Sequence[object], name: str, key: str) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise Invalid(
                f"/{name}/{place}/{key}",
                f"must not repeat /{name}/{values.index(value)}/{key}",
            )
