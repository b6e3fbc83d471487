"""Steering of a ranking: rules, pinned items, at most so many items of a value, exploration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from service.domain.errors import Invalid
from service.domain.steering import AtMost, PinnedItem, Rule
from service.http.schemas.base import MAX_LIMIT, Body
from service.http.schemas.questions.filters import (
    MAX_CONDITIONS,
    FilterField,
    count_conditions,
)
from service.http.schemas.questions.item_fields import FacetField
from service.http.schemas.scalars import INTEGRAL, Id

MAX_RULES = 50
MAX_BOOST = 1_000.0
MAX_PINS = 100
MAX_AT_MOST = 10
MAX_SEED = 2**53 - 1  # exact in JSON numbers


class RuleIn(Body):
    """A boost of the items that pass a filter, or their place behind all others."""

    name: str = Field(
        min_length=1, max_length=200, description="Names the rule in answers.", examples=["new in"]
    )
    when: FilterField = Field(description="The items that the rule moves, as in `filter`.")
    boost: float | None = Field(
        None,
        ge=-MAX_BOOST,
        le=MAX_BOOST,
        description="A boost of 1 raises these items by the standard deviation of the 100 best "
        "scores, without rules, of the items that pass the filter: 0.5 helps a little, 3 lifts "
        "nearly to the top, whatever the question ranks by. Boosts of several rules add up.",
    )
    bury: bool = Field(False, description="Put these items behind all others, instead of a boost.")

    @model_validator(mode="after")
    def _check_effect(self) -> RuleIn:
        if self.boost is None and not self.bury:
            raise Invalid("", "needs a `boost`, or `bury` to be true")
        if self.boost is not None and self.bury:
            raise Invalid("/bury", "must be false beside a `boost`")
        return self


class PinIn(Body):
    """An item that stands at a place whatever its score."""

    item_id: Id
    position: Annotated[int, Field(ge=1, le=MAX_LIMIT), INTEGRAL] = Field(
        description="Its place in the answer; 1 is the first."
    )


class AtMostIn(Body):
    """The most items of an answer that may share a value of a field."""

    field: FacetField
    count: Annotated[int, Field(ge=1, le=MAX_LIMIT), INTEGRAL] = Field(
        description="The most items of one value. An item with several values counts for each of "
        "them, one without a value for none."
    )


def _check_conditions(rules: Any) -> Any:
    """Raise `Invalid` for too many conditions in all rules, before any of them is parsed."""
    count = 0
    for rule in rules if isinstance(rules, list) else ():
        if isinstance(rule, dict):
            count += count_conditions(rule.get("when"))
        if count > MAX_CONDITIONS:
            raise Invalid(
                "", f"have too many conditions: {MAX_CONDITIONS} are allowed in all rules"
            )
    return rules


Rules = Annotated[
    list[RuleIn],
    BeforeValidator(_check_conditions),
    Field(
        max_length=MAX_RULES,
        description="Boosts, which are a part of the score (`parts.rules`), and items to put "
        "behind all others. Names must differ.",
        examples=[
            [
                {"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5},
                {"name": "sold out", "when": {"field": "tags", "eq": "sold"}, "bury": True},
            ]
        ],
    ),
]
Pins = Annotated[
    list[PinIn],
    Field(
        max_length=MAX_PINS,
        description="Items at fixed places, whatever their score and also if the user has seen "
        "them. Those that are hidden, deleted or excluded, or do not pass `filter`, are left out "
        "with a warning; they count for `at_most`. Where the answer has fewer items than a "
        "position says, the item is its last one.",
        examples=[[{"item_id": "talk-7", "position": 1}]],
    ),
]
AtMosts = Annotated[
    list[AtMostIn],
    Field(
        max_length=MAX_AT_MOST,
        description="How many items may share a value of a field. All hold at once; the answer is "
        "filled from further down the ranking.",
        examples=[[{"field": "categories", "count": 2}]],
    ),
]
Explore = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Share of `limit`, rounded and at least one place, for items of fewer than 20 "
        "events that the ranking alone would not show. They are drawn by Thompson sampling, and "
        "stand at random places; `propensity` is the probability of each item of the answer to be "
        "in it.",
    ),
]
Seed = Annotated[
    Annotated[int, Field(ge=0, le=MAX_SEED), INTEGRAL] | None,
    Field(
        description="Seed of the draws of `explore`: the same question with the same seed has the "
        "same answer. Without it there is a new one each time, which the answer names."
    ),
]


def to_rules(rules: Sequence[RuleIn]) -> tuple[Rule, ...]:
    """Return the domain's values. Raises `Invalid` for a name that occurs twice."""
    _check_distinct([rule.name for rule in rules], "rules", "name")
    return tuple(
        Rule(rule.name, rule.when.to_filter(f"/rules/{place}/when"), rule.boost)
        for place, rule in enumerate(rules)
    )


def to_pins(pins: Sequence[PinIn]) -> tuple[PinnedItem, ...]:
    """Return the domain's values. Raises `Invalid` for an item or a position named twice."""
    _check_distinct([pin.item_id for pin in pins], "pin", "item_id")
    _check_distinct([pin.position for pin in pins], "pin", "position")
    return tuple(PinnedItem(pin.item_id, pin.position) for pin in pins)


def to_at_most(constraints: Sequence[AtMostIn]) -> tuple[AtMost, ...]:
    """Return the domain's values. Raises `Invalid` for a field named twice."""
    _check_distinct([each.field for each in constraints], "at_most", "field")
    return tuple(AtMost(each.field, each.count) for each in constraints)


def _check_distinct(values: Sequence[object], name: str, key: str) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            raise Invalid(
                f"/{name}/{place}/{key}",
                f"must not repeat /{name}/{values.index(value)}/{key}",
            )
