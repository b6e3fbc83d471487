"""Ready questions that the engine takes: popularity and what is taken together, by item and user.

Times and durations are integer microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.domain.item_selection import NO_FILTER, FacetRequest, Filter
from service.domain.queries import Requester

_HOUR = 3_600_000_000
TREND_HALF_LIFE = 6 * _HOUR  # by default
TREND_WINDOW = 28 * 24 * _HOUR  # by default

TogetherRelation = Literal["after", "basket"]
PopularityKind = Literal["popular", "trending", "newest", "rated"]


@dataclass(frozen=True, slots=True)
class PopularQuery:
    """Rank items by the events of everybody."""

    requester: Requester  # whose items may be left out, and the request's time
    by: PopularityKind = "popular"
    window: int | None = None  # before the request's time; None = everything
    half_life: int | None = None  # None: no decay
    types: frozenset[str] | None = None  # of events; None = all but dislikes
    limit: int = 20
    filter: Filter = NO_FILTER
    exclude_seen: bool = False
    exclude: frozenset[str] = frozenset()
    facets: tuple[FacetRequest, ...] = ()  # over all items that are ranked
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TogetherQuery:
    """Find the items that users take after one, or at the same time."""

    item_id: str
    relation: TogetherRelation = "after"
    limit: int = 20
    types: frozenset[str] | None = None  # of events; None = all but dislikes
    filter: Filter = NO_FILTER
    at: int | None = None
    fields: tuple[str, ...] = ()
