"""Queries that the engine takes and answers that it gives: frozen values, free of HTTP.

Routes translate wire types into queries and answers into wire types; the engine knows no wire type.
Timestamps are integer microseconds UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

from service.domain.item_selection import (
    NO_FILTER,
    FacetRequest,
    FacetResult,
    Filter,
    FilterWarning,
    SortField,
)
from service.domain.steering import NO_STEERING, Rule, Steering

MAX_RANKED = 10_000  # items at most, with those of the pages before, that a search ranks

RetrievalMode = Literal["auto", "exact", "coarse"]
Retrieved = Literal["exact", "coarse", "lists"]  # how a memory was attended
ScorerName = Literal["scaled_dot", "cosine", "additive"]
SearchedMemory = Literal["catalogue", "history"]  # that a search is answered from
Space = Literal["content", "trained"]  # item vectors: of their text, or of the trained model


@dataclass(frozen=True, slots=True)
class InlineEvent:
    """One event of a session that the client sends with the request; it is not stored."""

    item_id: str
    type: str = "view"
    weight: float = 1.0
    timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Conditions on the events that may be attended. `None` means no restriction."""

    since: int | None = None
    until: int | None = None
    types: frozenset[str] | None = None
    categories: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Parameters of key retrieval: exact, or a coarse top-`k` (`probes` for IVF) before softmax."""

    mode: RetrievalMode = "auto"
    k: int | None = None
    probes: int | None = None
    max_error: float | None = None  # `auto`: relative error of a context; None = the setting's


DEFAULT_RETRIEVAL = Retrieval()


@dataclass(frozen=True, slots=True)
class Requester:
    """User and attention options of a request: the fields that score, recommend and search share.

    With both `user_id` and `history`, the inline events are appended to the stored ones.
    """

    user_id: str | None = None
    history: tuple[InlineEvent, ...] | None = None
    visible: EventFilter = EventFilter()
    retrieval: Retrieval = DEFAULT_RETRIEVAL
    temperature: float = 1.0
    hard: bool = False
    exclude_self: bool = False
    at: int | None = None  # request time, no later event counts; None = now, all count
    explain: int = 0  # events in each item's explanation
    explain_effects: bool = False  # also what the score loses without each of these events
    explain_exact: bool = False  # the same exactly, by scoring the history without each


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """Score target items for a requester."""

    requester: Requester
    item_ids: tuple[str, ...]
    fields: tuple[str, ...] = ()  # of each item, beside its score
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class RecommendQuery:
    """Recommend from the whole catalogue."""

    requester: Requester
    limit: int = 20
    filter: Filter = NO_FILTER
    exclude_seen: bool = True
    exclude: frozenset[str] = frozenset()
    diversity: float = 0.0
    facets: tuple[FacetRequest, ...] = ()  # over all items that may be recommended
    fields: tuple[str, ...] = ()
    steering: Steering = NO_STEERING


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """Search the catalogue by text; a named user re-ranks. Or search the requester's history.

    With `sort`, or without a query, items are listed in the order of their fields instead. A
    history is searched by a query, and takes the fields that `SearchIn` lets pass.
    """

    requester: Requester
    query: str = ""
    limit: int = 20
    filter: Filter = NO_FILTER
    personal_weight: float = 2.0  # logits added per standard deviation of the memory's scores
    highlight: bool = False  # answer texts with the query's words marked
    sort: tuple[SortField, ...] = ()
    offset: int = 0  # items of the list to leave out
    cursor: str | None = None  # of the page before, instead
    facets: tuple[FacetRequest, ...] = ()  # over all matches
    fields: tuple[str, ...] = ()
    steering: Steering = NO_STEERING  # without exploration; of a list, quotas alone
    memory: SearchedMemory = "catalogue"
    fill: bool = False  # with items that do not match, after the others
    min_score: float | None = None  # of items that are answered, in place of the default floor

    @property
    def is_listing(self) -> bool:
        """Report whether items are listed in the order of their fields."""
        return bool(self.sort) or not self.query.strip()


@dataclass(frozen=True, slots=True)
class SimilarQuery:
    """Find the items that are most similar to one item."""

    item_id: str
    limit: int = 20
    filter: Filter = NO_FILTER
    space: Space | None = None  # None: every space in which the item has a key
    facets: tuple[FacetRequest, ...] = ()  # over all items that are compared
    fields: tuple[str, ...] = ()
    steering: Steering = NO_STEERING  # without exploration
    retrieval: Retrieval = DEFAULT_RETRIEVAL  # of other items' keys in each space


@dataclass(frozen=True, slots=True)
class VectorMemory:
    """A memory sent by the client: keys [n, d], values [n, v], bias [n], visible [n]."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    visible: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class StoredUserMemory:
    """The memory of a stored user, projected by the served model."""

    user_id: str


@dataclass(frozen=True, slots=True)
class CatalogueMemory:
    """The catalogue as a memory: one row for each text field of each item."""


@dataclass(frozen=True, slots=True)
class AttendQuery:
    """Apply the attention operator. Exactly one of `vector`, `item_id`, `text` is the query."""

    memory: VectorMemory | StoredUserMemory | CatalogueMemory
    vector: NDArray[np.float32] | None = None
    item_id: str | None = None
    text: str | None = None
    scorer: ScorerName = "scaled_dot"
    heads: int | None = None  # None: 1, or the model's own for a user's memory
    temperature: float = 1.0
    hard: bool = False
    retrieval: Retrieval = DEFAULT_RETRIEVAL
    visible: EventFilter = EventFilter()
    exclude_self: bool = False
    at: int | None = None
    limit: int = 100
    state: bool = True  # of a user's memory: the user's part of the query, and recency


# ---------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The event or profile entry that a row of a memory stands for."""

    event_id: str | None  # None for inline events and profile entries
    item_id: str | None
    title: str
    type: str
    timestamp: int | None


class Contribution(NamedTuple):
    """Contribution to one target's score: of one memory row, or of all on one item and type."""

    row: MemoryRow  # the newest; one object for all contributions of a row
    weight: float  # mean over heads of the softmax weight
    contribution: float  # signed; all rows' contributions and the prior sum to the score
    effect: float | None = None  # what the score loses without this row; None: not requested
    effect_is_exact: bool = False  # False: estimated
    events: int = 1  # that are summed up


class Remainder(TypedDict):
    """Rows of a memory that an explanation does not name, counted together."""

    events: int
    contribution: float


@dataclass(frozen=True, slots=True)
class HighlightSpan:
    """A span of a text; `match` is true where it is a word of the query."""

    text: str
    match: bool


class AppliedRule(TypedDict, total=False):
    """A rule that moved an item: its boost, or `bury`."""

    name: Required[str]
    boost: float
    bury: bool


class AnswerItem(TypedDict, total=False):
    """One item of an answer; fields that a query does not produce are left out.

    A plain dict, because each answer holds up to hundreds: fields that are the same on the wire are
    serialised without conversion.
    """

    item_id: Required[str]
    title: Required[str]
    score: float  # left out in a list in the order of fields, and of a pin that no query matches
    parts: dict[str, float]  # terms of the score, which is their sum
    reason: str  # personal | popular | content, or what a ready question ranks by
    explanation: tuple[Contribution, ...]
    remainder: Remainder  # beside an explanation: all sum to the score without prior and rules
    events: int  # ready questions: number of events that count
    support: int  # together: users, or baskets, with both items
    lift: float  # together: how many times as often as by chance
    significance: float  # together: log-likelihood ratio G²
    weight: float  # search, similar: softmax weight summed over the item's keys
    matched: dict[str, float]  # search: field -> its share of that weight
    highlights: Mapping[str, tuple[HighlightSpan, ...]]  # search: field -> spans of its text
    mass: float  # share of the softmax over a memory that the attended rows hold
    relative_error: float  # bound on the contexts' relative error at 99 % confidence, if not exact
    # similar: `cosine` and `share` of the item's weight, in each space in which it has a key
    spaces: Mapping[Space, Mapping[str, float]]
    fields: Mapping[str, Any]  # as far as the item has them
    rules: list[AppliedRule]  # that hold for the item
    moved: str  # pinned | explored | buried: why it does not stand where its score puts it
    propensity: float  # with `explore`: probability of being in the answer


class AnswerEvent(AnswerItem):
    """One event of an answer to a search of a history, with what is answered of its item."""

    event_id: str | None  # None for inline events, and where the store cannot be reached
    type: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A list of items from one model version."""

    items: Sequence[AnswerItem]
    model_version: str
    retrieval: Retrieved = "exact"
    # An older model answers because the current one cannot be loaded, or the store does not answer.
    degraded: bool = False
    keys_attended: int | None = None  # search, similar: number of keys attended
    mass: float | None = None  # search, similar: share of the softmax over all keys that they hold
    rows_scanned: int | None = None  # mean rows attended one by one, for each head and target
    memory_rows: int | None = None  # rows of the person's memory
    candidates: int | None = None  # recommend: items whose scores were computed
    # search: word of the query that no item has -> words that are searched for in its place
    corrections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    did_you_mean: str | None = None  # search: the query with spellings that were not applied
    spaces: tuple[Space, ...] | None = None  # similar: in which the item was compared
    total: int | None = None  # items that match, with facets or in a list, if all were counted
    cursor: str | None = None  # of the next page of a list or a search
    facets: tuple[FacetResult, ...] | None = None
    warnings: tuple[FilterWarning, ...] | None = None
    seed: int | None = None  # of the draws of `explore`


@dataclass(frozen=True, slots=True)
class AttendResult:
    """Answer to an `AttendQuery`: at most `limit` rows in descending mean weight."""

    rows: tuple[int, ...]
    ids: tuple[str, ...] | None  # event ids (a user's memory) or item ids (the catalogue)
    weights: tuple[tuple[float, ...], ...]  # [heads][rows]
    context: tuple[float, ...]  # over all attended rows, regardless of `limit`
    mass: tuple[float, ...]  # [heads]
    retrieval: Retrieved
    model_version: str | None
    degraded: bool = False
    rows_scanned: int | None = None  # as in `Answer`
    memory_rows: int | None = None
    events: tuple[MemoryRow, ...] | None = None  # of a user's memory, in the order of `rows`
