"""Steering of a ranking: rules, pinned items, quotas and exploration."""

from __future__ import annotations

from dataclasses import dataclass

from service.domain.item_selection import Filter


@dataclass(frozen=True, slots=True)
class Rule:
    """A boost of the items that pass a filter, or their place behind all others."""

    name: str
    when: Filter
    boost: float | None = None  # added to the score; None: the items are buried


@dataclass(frozen=True, slots=True)
class PinnedItem:
    """An item that stands at a place of the answer whatever its score."""

    item_id: str
    position: int  # from 1


@dataclass(frozen=True, slots=True)
class AtMost:
    """The most items of an answer that may share a value of a field."""

    field: str
    count: int


@dataclass(frozen=True, slots=True)
class Steering:
    """Instructions about the ranking of one answer. Names, items and positions are distinct."""

    rules: tuple[Rule, ...] = ()
    pins: tuple[PinnedItem, ...] = ()
    at_most: tuple[AtMost, ...] = ()
    explore: float = 0.0  # share of the places for items with few events
    seed: int | None = None  # of the draws of `explore`; None = drawn for each answer
    shown: tuple[str, ...] = ()  # items before this answer that count for `at_most`


NO_STEERING = Steering()
