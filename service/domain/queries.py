"""What the engine is asked and what it answers: frozen values, free of HTTP.

Routes translate wire types into these and these into wire types; the engine knows nothing else.
Timestamps are integer microseconds UTC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

Mode = Literal["auto", "exact", "coarse"]
ScorerName = Literal["scaled_dot", "cosine", "additive"]
Space = Literal["content", "trained"]  # where items are compared: by their text, or as trained


@dataclass(frozen=True, slots=True)
class InlineEvent:
    """One event of a session that the client brings with the request."""

    item_id: str
    type: str = "view"
    weight: float = 1.0
    timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class Visible:
    """Which events of the history may be attended. `None` means no restriction."""

    since: int | None = None
    until: int | None = None
    types: frozenset[str] | None = None
    categories: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How keys are found: exactly, or by a coarse top-`k` (`probes` for IVF) before the softmax.

    Of a long history the older events are attended by the moments of cells, to `max_error`, where
    neither a `k` nor `order` 0 asks for a top-k.
    """

    mode: Mode = "auto"
    k: int | None = None
    probes: int | None = None
    max_error: float | None = None  # of contexts, relative
    moment_order: int | None = None  # of the moments: 1 or 2; 0 = none but a top-k

    @property
    def top(self) -> bool:
        """Whether a top-k is what is asked for."""
        chosen = self.k is not None or self.probes is not None or self.moment_order == 0
        return self.mode == "coarse" and chosen


@dataclass(frozen=True, slots=True)
class Filter:
    """Which items may be answered."""

    any: frozenset[str] = frozenset()  # categories: at least one of these
    all: frozenset[str] = frozenset()  # categories: every one of these
    none: frozenset[str] = frozenset()  # categories: not one of these
    attributes: Mapping[str, Any] = field(default_factory=dict)  # equal, or in a list of values
    published_since: int | None = None
    published_until: int | None = None

    @property
    def empty(self) -> bool:
        """True when every item passes."""
        return not (
            self.any
            or self.all
            or self.none
            or self.attributes
            or self.published_since is not None
            or self.published_until is not None
        )


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose memory attends, and how: the fields that score, recommend and search share.

    With both `user_id` and `history`, the inline events are laid over the stored ones.
    """

    user_id: str | None = None
    history: tuple[InlineEvent, ...] | None = None
    visible: Visible = Visible()
    retrieval: Retrieval = Retrieval()
    temperature: float = 1.0
    hard: bool = False
    exclude_self: bool = False
    at: int | None = None  # request time; None = now
    explain: int = 0  # how many events to name for each item
    explain_exact: bool = False  # and what the score would be had each never happened


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """Score these targets for this asker."""

    asker: Asker
    item_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecommendQuery:
    """Recommend from the whole catalogue."""

    asker: Asker
    limit: int = 20
    filter: Filter = Filter()
    exclude_seen: bool = True
    exclude: frozenset[str] = frozenset()
    diversity: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """Search the catalogue by text; a named user re-ranks."""

    asker: Asker
    query: str
    limit: int = 20
    filter: Filter = Filter()
    personal_weight: float = 1.0  # logits per standard deviation of the memory's scores
    highlight: bool = False  # whether texts are wanted, with the words of the query marked


@dataclass(frozen=True, slots=True)
class SimilarQuery:
    """Items like this one."""

    item_id: str
    limit: int = 20
    filter: Filter = Filter()
    space: Space | None = None  # None: both, or the one in which the item has a key


@dataclass(frozen=True, slots=True)
class VectorMemory:
    """A memory the client brings: keys [n, d], values [n, v], bias [n], visible [n]."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None
    visible: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class UserMemory:
    """A stored user's memory, through the served model's projections."""

    user_id: str


@dataclass(frozen=True, slots=True)
class CatalogueMemory:
    """The catalogue: one row for each text field of each item."""


@dataclass(frozen=True, slots=True)
class AttendQuery:
    """The bare operator. Exactly one of `vector`, `item_id`, `text` is the query."""

    memory: VectorMemory | UserMemory | CatalogueMemory
    vector: NDArray[np.float32] | None = None
    item_id: str | None = None
    text: str | None = None
    scorer: ScorerName = "scaled_dot"
    heads: int | None = None  # None: 1, or the model's own for a user's memory
    temperature: float = 1.0
    hard: bool = False
    retrieval: Retrieval = Retrieval()
    visible: Visible = Visible()
    exclude_self: bool = False
    at: int | None = None
    limit: int = 100


# ---------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one row of the memory did to one target's score."""

    event_id: str | None  # None for inline events and profile entries
    item_id: str | None
    title: str
    type: str
    timestamp: int | None
    weight: float  # mean over heads of the softmax weight
    contribution: float  # signed; all rows' contributions sum to the attention part
    without: float  # the score had this row not been attended, the sequence part as it is
    without_exact: float | None = None  # had it never happened; None where that was not asked for


@dataclass(frozen=True, slots=True)
class Marked:
    """A part of a text."""

    text: str
    match: bool  # whether it is a word of the query


@dataclass(frozen=True, slots=True)
class Likeness:
    """How an item is like the one that was asked for, in one space."""

    cosine: float
    share: float  # of the item's weight


class AnsweredItem(TypedDict, total=False):
    """One item of an answer, without the fields that a job does not produce.

    A plain dict, because a hundred at a time are made and written: what needs no other form on its
    way out is written as it is.
    """

    item_id: Required[str]
    score: Required[float]
    title: Required[str]
    parts: dict[str, float]  # they sum to the score
    reason: str  # personal | popular | content
    explanation: tuple[Contribution, ...]
    weight: float  # search, similar: softmax weight gathered over the item's keys
    matched: dict[str, float]  # search: each field's share of that weight
    highlights: Mapping[str, tuple[Marked, ...]]  # search: field -> its text, marked
    mass: float  # share of the softmax over a memory that the attended rows hold
    relative_error: float  # bound at 99 % on the contexts behind the score; where not exact
    spaces: Mapping[Space, Likeness]  # similar: in each where the item has a key


@dataclass(frozen=True, slots=True)
class Answer:
    """A list of items from one model version."""

    items: Sequence[AnsweredItem]
    model_version: str
    retrieval: str = "exact"  # what was done: exact | coarse
    degraded: bool = False
    keys_attended: int | None = None  # search: field keys that were attended
    mass: float | None = None  # search: share of the softmax over all field keys that they hold
    rows_scanned: int | None = None  # long histories: mean rows attended one by one for a target
    corrections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # search: words that no item has -> those that they were taken for
    spaces: tuple[Space, ...] | None = None  # similar: in which the item was compared


@dataclass(frozen=True, slots=True)
class Attended:
    """The bare operator's answer: rows in descending mean weight, at most `limit` of them."""

    rows: tuple[int, ...]
    ids: tuple[str, ...] | None  # event ids of a user's memory, item ids of the catalogue's
    weights: tuple[tuple[float, ...], ...]  # [heads][rows]
    context: tuple[float, ...]  # over all attended rows, whatever the limit
    mass: tuple[float, ...]  # [heads]
    retrieval: str
    model_version: str | None
