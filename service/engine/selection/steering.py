"""Rules, pins and quotas of a question over the rows of the catalogue."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from models.catalogue.item_filter import matching
from models.catalogue.snapshot import Snapshot
from models.ranking.lineup import SteeredRows
from models.ranking.recommend import Ranked
from models.ranking.steering import NO_STEERING, ItemSteering, Pin, Quota
from service.domain import steering as domain
from service.domain.item_selection import FilterWarning
from service.domain.queries import Answer, AnswerItem, AppliedRule
from service.domain.steering import PinnedItem, Rule, Steering
from service.engine.selection.item_selection import item_filter
from service.engine.selection.warnings import attribute_warnings, filter_warnings

_SEEDS = 2**53  # exact in JSON numbers


@dataclass(frozen=True, slots=True, eq=False)
class AppliedRules:
    """Rules with the items that each moves."""

    rules: tuple[tuple[AppliedRule, NDArray[np.bool_]], ...] = ()  # each with a mask [N]
    boost: NDArray[np.float32] | None = None  # [N] sum of the relative boosts; None without any
    buried: NDArray[np.bool_] | None = None  # [N]; None without any
    warnings: tuple[FilterWarning, ...] = ()

    def describe(self, items: Sequence[AnswerItem], rows: NDArray[np.integer]) -> None:
        """Add to each item of an answer, at `rows` [L], the rules that moved it."""
        for rule, mask in self.rules:
            for place in np.flatnonzero(mask[rows]).tolist():
                items[place].setdefault("rules", []).append(rule)


@dataclass(frozen=True, slots=True, eq=False)
class SteeredItems:
    """Steering over the rows of one catalogue, and what an answer says about it."""

    applied: AppliedRules = field(default_factory=AppliedRules)
    steering: ItemSteering = NO_STEERING
    warnings: tuple[FilterWarning, ...] = ()

    def describe(self, answer: Answer, ranked: Ranked | SteeredRows) -> Answer:
        """Return an answer that says of each item what moved it, and how likely it was shown."""
        self.applied.describe(answer.items, ranked.rows)
        for item, moved in zip(answer.items, ranked.moved, strict=True):
            if moved is not None:
                item["moved"] = moved
        if isinstance(ranked, SteeredRows) or ranked.propensities is None:
            return answer
        for item, propensity in zip(answer.items, ranked.propensities.tolist(), strict=True):
            item["propensity"] = propensity
        return replace(answer, seed=self.steering.seed)


UNSTEERED = SteeredItems()


def apply_rules(snapshot: Snapshot, rules: Sequence[Rule]) -> AppliedRules:
    """Find the items that rules move, and warn of values in their filters that no item has."""
    fields = snapshot.catalogue.fields
    applied = []
    boost: NDArray[np.float32] | None = None
    buried: NDArray[np.bool_] | None = None
    for rule in rules:
        mask = matching(fields, item_filter(rule.when))
        if rule.boost is None:
            buried = mask if buried is None else buried | mask
            applied.append((AppliedRule(name=rule.name, bury=True), mask))
        else:
            if boost is None:
                boost = np.zeros(fields.size, np.float32)
            boost += mask * np.float32(rule.boost)
            applied.append((AppliedRule(name=rule.name, boost=rule.boost), mask))
    warnings = tuple(w for rule in rules for w in filter_warnings(fields, rule.when))
    return AppliedRules(tuple(applied), boost, buried, warnings)


def steer_items(
    snapshot: Snapshot,
    steering: Steering,
    *,
    allowed: NDArray[np.bool_],
    exclude: Collection[str] = (),
    limit: int,
    comparable: NDArray[np.bool_] | None = None,
) -> SteeredItems:
    """Apply the steering of a question to the catalogue.

    Args:
        snapshot: the catalogue.
        steering: of the question.
        allowed: bool [N], the items that pass the question's filter.
        exclude: items that are left out by name; pins among them are too.
        limit: the most items of the answer.
        comparable: bool [N], of a question about an item, the items that can be compared with it;
            None = all.
    """
    if steering == domain.NO_STEERING:
        return UNSTEERED
    applied = apply_rules(snapshot, steering.rules)
    pins, refused = [], []
    for place, pin in enumerate(steering.pins):
        row = snapshot.catalogue.row(pin.item_id)
        if why := _unpinnable(snapshot, row, pin, allowed, exclude, limit, comparable):
            refused.append(FilterWarning(f"/pin/{place}", why))
        else:
            pins.append(Pin(row, pin.position))
    names = {f"/at_most/{at}/field": each.field for at, each in enumerate(steering.at_most)}
    rows = snapshot.catalogue.rows(steering.shown)
    shown = tuple(rows[rows >= 0].tolist())
    seed = steering.seed
    if seed is None:
        seed = secrets.randbelow(_SEEDS) if steering.explore else 0
    return SteeredItems(
        applied,
        ItemSteering(
            applied.boost,
            applied.buried,
            tuple(pins),
            tuple(Quota(each.field, each.count, shown) for each in steering.at_most),
            steering.explore,
            seed,
            is_relative=True,
        ),
        (*applied.warnings, *refused, *attribute_warnings(snapshot.catalogue.fields, names)),
    )


def _unpinnable(
    snapshot: Snapshot,
    row: int,
    pin: PinnedItem,
    allowed: NDArray[np.bool_],
    exclude: Collection[str],
    limit: int,
    comparable: NDArray[np.bool_] | None,
) -> str:
    """Return why an item is not shown at its place; empty where it is."""

    def reasons() -> Iterator[tuple[bool, str]]:
        known = 0 <= row < len(allowed)
        yield not known or bool(snapshot.catalogue.deleted[row]), "is not in the catalogue"
        yield not snapshot.catalogue.servable[row], "is hidden"
        yield not allowed[row], "does not pass the filter"
        yield pin.item_id in exclude, "is excluded"
        cannot = comparable is not None and not comparable[row]
        yield cannot, "cannot be compared with the item of the question"
        yield pin.position > limit, f"stands behind the limit of {limit}"

    return next((f"item {pin.item_id!r} {why}" for holds, why in reasons() if holds), "")
