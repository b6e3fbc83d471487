"""Ready questions that the engine takes: popularity and what is taken together, by item and user.

Times and durations are integer microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Required, TypedDict

from service.domain.item_selection import (
    NO_FILTER,
    FacetRequest,
    FacetResult,
    Filter,
    FilterWarning,
)
from service.domain.queries import (
    DEFAULT_RETRIEVAL,
    AnswerItem,
    Contribution,
    Remainder,
    Requester,
    Retrieval,
    Retrieved,
)
from service.domain.steering import NO_STEERING, AtMost, Rule, Steering

_HOUR = 3_600_000_000
TREND_HALF_LIFE = 6 * _HOUR  # by default
TREND_WINDOW = 28 * 24 * _HOUR  # by default
TREND_FLOOR = 1.0  # standard deviations above its past, from which an item is trending

TogetherRelation = Literal["after", "basket"]
RowKind = Literal["because", "trending", "newest", "again", "recommended", "popular"]
PopularityKind = Literal["popular", "trending", "newest", "rated"]


@dataclass(frozen=True, slots=True)
class PopularQuery:
    """Rank items by the events of everybody."""

    requester: Requester  # whose items may be left out, and the request's time
    by: PopularityKind = "popular"
    window: int | None = None  # before the request's time; None = everything
    half_life: int | None = None  # None: no decay
    types: frozenset[str] | None = None  # of events; None = all but negative ones
    limit: int = 20
    filter: Filter = NO_FILTER
    exclude_seen: bool = False
    exclude: frozenset[str] = frozenset()
    facets: tuple[FacetRequest, ...] = ()  # over all items that are ranked
    fields: tuple[str, ...] = ()
    steering: Steering = NO_STEERING  # without exploration


@dataclass(frozen=True, slots=True)
class TogetherQuery:
    """Find the items that users take after one, or at the same time."""

    item_id: str
    relation: TogetherRelation = "after"
    limit: int = 20
    types: frozenset[str] | None = None  # of events; None = all but negative ones
    filter: Filter = NO_FILTER
    at: int | None = None
    fields: tuple[str, ...] = ()
    facets: tuple[FacetRequest, ...] = ()  # over all items that are taken with it
    steering: Steering = NO_STEERING  # without exploration


@dataclass(frozen=True, slots=True)
class RowsQuery:
    """Make the rows of a home page for a requester."""

    requester: Requester
    rows: int = 6
    limit: int = 10  # items of a row
    filter: Filter = NO_FILTER
    exclude: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()  # boosts in standard deviations of each row's scores
    at_most: tuple[AtMost, ...] = ()  # of each row
    facets: tuple[FacetRequest, ...] = ()  # over all items that may stand in a row


@dataclass(frozen=True, slots=True)
class RowReason:
    """Why a row is on the page: a sentence, and what it says as data."""

    kind: RowKind
    text: str
    item_id: str | None = None  # because: of this item of the history
    event_ids: tuple[str, ...] = ()  # because: of these events, those that are stored
    categories: tuple[str, ...] = ()  # newest: the user's


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One row of a page."""

    reason: RowReason
    items: Sequence[AnswerItem]


@dataclass(frozen=True, slots=True)
class RowsAnswer:
    """Rows of a page, from one model version; no item is in two of them."""

    rows: Sequence[AnswerRow]
    model_version: str
    degraded: bool = False
    warnings: tuple[FilterWarning, ...] | None = None
    total: int | None = None  # items that may stand in a row, with facets
    facets: tuple[FacetResult, ...] | None = None
    retrieval: Retrieved = "exact"
    rows_scanned: int | None = None  # as in `Answer`
    memory_rows: int | None = None


@dataclass(frozen=True, slots=True)
class AudienceQuery:
    """Find the users for an item."""

    item_id: str
    limit: int = 20
    exclude_seen: bool = True  # leave out users with events on the item
    explain: int = 3  # events that are named for each user, at most
    at: int | None = None
    retrieval: Retrieval = DEFAULT_RETRIEVAL  # of each user's memory


class AudienceUser(TypedDict, total=False):
    """One user of an audience."""

    user_id: Required[str]
    score: Required[float]
    parts: Required[dict[str, float]]  # which the score is the sum of
    reason: Required[str]  # personal | content
    explanation: tuple[Contribution, ...]
    remainder: Remainder


@dataclass(frozen=True, slots=True)
class AudienceAnswer:
    """Users for an item, best first."""

    users: Sequence[AudienceUser]
    model_version: str
    scored: int  # number of users whose scores were compared
    candidates: int  # number of users who may be in the audience
    degraded: bool = False
    retrieval: Retrieved = "exact"  # of the users' memories
    rows_scanned: int | None = None  # mean over these users, as in `Answer`
    memory_rows: int | None = None


class ItemEvent(TypedDict):
    """One event of an item, as the event log has it."""

    user_id: str
    type: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class ItemEventsAnswer:
    """The newest events of an item."""

    events: Sequence[ItemEvent]
    total: int  # number of all events of the item
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class AffinitiesQuery:
    """Find the values of a field that a user attends to."""

    user_id: str
    field: str = "categories"
    limit: int = 20
    at: int | None = None
    retrieval: Retrieval = DEFAULT_RETRIEVAL


@dataclass(frozen=True, slots=True)
class Affinity:
    """One value of a field, as a user attends to it."""

    value: str | float | bool | None
    mass: float  # share of the attention on items with the value
    score: float | None  # mean of items with the value, above the mean of all
    events: int  # on items with the value


@dataclass(frozen=True, slots=True)
class AffinitiesAnswer:
    """Values of a field, by falling attention."""

    field: str
    values: Sequence[Affinity]
    model_version: str
    degraded: bool = False
    retrieval: Retrieved = "exact"
    rows_scanned: int | None = None  # as in `Answer`
    memory_rows: int | None = None
