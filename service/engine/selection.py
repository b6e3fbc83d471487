"""Selection and steering of items: filters, facets, rules, pins, quotas, and their warnings."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.catalogue.columns import FieldColumns, ItemFields
from models.catalogue.facets import CountedItems, FacetCounts, count_values
from models.catalogue.item_filter import EVERYTHING, Condition, ItemFilter, conditions, matching
from models.catalogue.item_values import is_number, keyword_of
from models.catalogue.snapshot import Snapshot
from models.ranking.lineup import SteeredRows
from models.ranking.recommend import Ranked
from models.ranking.steering import NO_STEERING, ItemSteering, Pin, Quota
from service.domain.records import ATTRIBUTES
from service.domain.timestamps import to_rfc3339
from service.questions.answers import (
    AnsweredItemOut,
    AnswerOut,
    AppliedRuleOut,
    FacetOut,
    WarningOut,
)
from service.questions.asked import RecommendIn, SearchIn, SimilarIn
from service.questions.parts import FacetIn, PinIn, RuleIn, SortIn
from service.questions.ready import PopularIn, RowsIn, TogetherIn

SteeredQuestion = RecommendIn | SearchIn | SimilarIn | PopularIn | TogetherIn | RowsIn

MAX_WARNINGS = 10
_COMPARED = 5_000  # values at most that a misspelt one is compared with
_ALIKE = 0.75  # share of equal letters from which a value is suggested (difflib's ratio)
_SINGULAR = {"categories": "category", "tags": "tag"}
_SEEDS = 2**53  # exact in JSON numbers


@dataclass(frozen=True, slots=True, eq=False)
class ItemSelection:
    """Items that may be answered, and what an answer says about them."""

    allowed: NDArray[np.bool_]  # [N]
    warnings: tuple[WarningOut, ...] = ()

    def with_warnings(self, more: tuple[WarningOut, ...]) -> ItemSelection:
        """Return this selection with more warnings."""
        return replace(self, warnings=self.warnings + more) if more else self

    def describe(self, answer: AnswerOut, counted: Counted | None = None) -> None:
        """Add the warnings to an answer, and counts if there are any."""
        warn(answer, self.warnings)
        if counted is not None:
            answer["facets"] = counted.facets
            if counted.total is not None:
                answer["total"] = counted.total


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of items that match, and of those with each value of some fields."""

    total: int | None  # None = not all were counted
    facets: list[FacetOut]


def warn(answer: AnswerOut, warnings: Sequence[WarningOut], *, first: bool = False) -> None:
    """Add warnings to an answer, behind or before its others."""
    if warnings:
        others = answer.get("warnings", [])
        answer["warnings"] = [*warnings, *others] if first else [*others, *warnings]


def select_items(
    snapshot: Snapshot,
    wanted: ItemFilter,
    facets: Sequence[FacetIn] = (),
    sort: Sequence[SortIn] = (),
    pointer: str = "/filter",
) -> ItemSelection:
    """Apply a filter, which stands at a JSON pointer, and look for fields that no item has."""
    catalogue = snapshot.catalogue
    named = {f"/facets/{place}/field": facet.field for place, facet in enumerate(facets)}
    named |= {f"/sort/{place}/field": key.field for place, key in enumerate(sort)}
    warnings = attribute_warnings(catalogue.fields, named) if named else ()
    if wanted == EVERYTHING:
        return ItemSelection(catalogue.servable, warnings)
    warnings = filter_warnings(catalogue.fields, wanted, pointer) + warnings
    return ItemSelection(catalogue.allowed(wanted), warnings)


def count_items(
    snapshot: Snapshot, mask: NDArray[np.bool_], facets: Sequence[FacetIn]
) -> Counted | None:
    """Count the values of fields over items [N]; None where no facet is asked for."""
    if not facets:
        return None
    items, fields = CountedItems(mask), snapshot.catalogue.fields
    counted = [
        _facet(facet, count_values(fields, facet.field, items, facet.limit)) for facet in facets
    ]
    return Counted(items.count, counted)


def _facet(facet: FacetIn, counts: FacetCounts) -> FacetOut:
    def written(value: Any) -> Any:
        is_time = facet.field == "published_at" and value is not None
        return to_rfc3339(value) if is_time else value

    out: FacetOut = {
        "field": facet.field,
        "values": [{"value": written(value), "count": count} for value, count in counts.values],
        "other": counts.other,
    }
    if counts.minimum is not None:
        out |= {"min": written(counts.minimum), "max": written(counts.maximum)}
    return out


# ----------------------------------------------------------------------------- steering


@dataclass(frozen=True, slots=True, eq=False)
class AppliedRules:
    """Rules with the items that each moves."""

    rules: tuple[tuple[AppliedRuleOut, NDArray[np.bool_]], ...] = ()  # each with a mask [N]
    boost: NDArray[np.float32] | None = None  # [N] sum of the relative boosts; None without any
    buried: NDArray[np.bool_] | None = None  # [N]; None without any
    warnings: tuple[WarningOut, ...] = ()

    def describe(self, items: Sequence[AnsweredItemOut], rows: NDArray[np.integer]) -> None:
        """Add to each item of an answer, at `rows` [L], the rules that moved it."""
        for rule, mask in self.rules:
            for place in np.flatnonzero(mask[rows]).tolist():
                items[place].setdefault("rules", []).append(rule)


@dataclass(frozen=True, slots=True, eq=False)
class SteeredItems:
    """Steering over the rows of one catalogue, and what an answer says about it."""

    applied: AppliedRules = field(default_factory=AppliedRules)
    steering: ItemSteering = NO_STEERING
    warnings: tuple[WarningOut, ...] = ()

    def describe(self, answer: AnswerOut, ranked: Ranked | SteeredRows) -> None:
        """Add to each item of an answer what moved it, and how likely it was to be shown."""
        items = answer["items"]
        self.applied.describe(items, ranked.rows)
        for item, moved in zip(items, ranked.moved, strict=True):
            if moved is not None:
                item["moved"] = moved
        if isinstance(ranked, SteeredRows) or ranked.propensities is None:
            return
        for item, propensity in zip(items, ranked.propensities.tolist(), strict=True):
            item["propensity"] = propensity
        answer["seed"] = self.steering.seed


UNSTEERED = SteeredItems()


def apply_rules(snapshot: Snapshot, rules: Sequence[RuleIn]) -> AppliedRules:
    """Find the items that rules move, and warn of values in their filters that no item has."""
    fields = snapshot.catalogue.fields
    applied = []
    boost: NDArray[np.float32] | None = None
    buried: NDArray[np.bool_] | None = None
    for rule in rules:
        mask = matching(fields, rule.when)
        if rule.boost is None:
            buried = mask if buried is None else buried | mask
            applied.append((AppliedRuleOut(name=rule.name, bury=True), mask))
        else:
            if boost is None:
                boost = np.zeros(fields.size, np.float32)
            boost += mask * np.float32(rule.boost)
            applied.append((AppliedRuleOut(name=rule.name, boost=rule.boost), mask))
    warnings = tuple(
        warning
        for place, rule in enumerate(rules)
        for warning in filter_warnings(fields, rule.when, f"/rules/{place}/when")
    )
    return AppliedRules(tuple(applied), boost, buried, warnings)


def pins_of(question: SteeredQuestion) -> Sequence[PinIn]:
    """Return the pins of a question; rows of a home page take none."""
    return () if isinstance(question, RowsIn) else question.pin


def steer_items(
    question: SteeredQuestion,
    snapshot: Snapshot,
    *,
    allowed: NDArray[np.bool_],
    limit: int | None = None,
    shown: Sequence[str] = (),
    comparable: NDArray[np.bool_] | None = None,
) -> SteeredItems:
    """Apply the rules, pins, quotas and exploration of a question to the catalogue.

    Pins among the items that the question excludes are left out.

    Args:
        allowed: bool [N], the items that pass the question's filter.
        limit: the most items that are ranked; None = those of the answer.
        shown: items before this answer, which count for quotas.
        comparable: bool [N], of a question about an item, the items that can be compared with it;
            None = all.
    """
    rules, pins, at_most = question.rules, pins_of(question), question.at_most
    explore, seed = 0.0, None
    if isinstance(question, RecommendIn):
        explore, seed = question.explore, question.seed
    if not (rules or pins or at_most or explore):
        return UNSTEERED
    exclude: Collection[str] = getattr(question, "exclude", ())
    limit = question.limit if limit is None else limit
    applied = apply_rules(snapshot, rules)
    placed, refused = [], []
    for place, pin in enumerate(pins):
        row = snapshot.catalogue.row(pin.item_id)
        if why := _unpinnable(snapshot, row, pin, allowed, exclude, limit, comparable):
            refused.append(WarningOut(pointer=f"/pin/{place}", detail=why))
        else:
            placed.append(Pin(row, pin.position))
    names = {f"/at_most/{place}/field": quota.field for place, quota in enumerate(at_most)}
    before = snapshot.catalogue.rows(shown)
    rows = tuple(before[before >= 0].tolist())
    if seed is None:
        seed = secrets.randbelow(_SEEDS) if explore else 0
    return SteeredItems(
        applied,
        ItemSteering(
            boost=applied.boost,
            buried=applied.buried,
            pins=tuple(placed),
            quotas=tuple(Quota(quota.field, quota.count, rows) for quota in at_most),
            explore=explore,
            seed=seed,
            is_relative=True,
        ),
        (*applied.warnings, *refused, *attribute_warnings(snapshot.catalogue.fields, names)),
    )


def _unpinnable(
    snapshot: Snapshot,
    row: int,
    pin: PinIn,
    allowed: NDArray[np.bool_],
    exclude: Collection[str],
    limit: int,
    comparable: NDArray[np.bool_] | None,
) -> str:
    """Return why an item is not shown at its place; empty where it is."""

    def reasons() -> Iterator[tuple[bool, str]]:
        catalogue = snapshot.catalogue
        known = 0 <= row < len(allowed) and not catalogue.deleted[row]
        known = known and bool(catalogue.present[row] or catalogue.servable[row])
        yield not known, "is not in the catalogue"
        yield not catalogue.servable[row], "is hidden"
        yield not allowed[row], "does not pass the filter"
        yield pin.item_id in exclude, "is excluded"
        cannot = comparable is not None and not comparable[row]
        yield cannot, "cannot be compared with the item of the question"
        yield pin.position > limit, f"stands behind the limit of {limit}"

    return next((f"item {pin.item_id!r} {why}" for holds, why in reasons() if holds), "")


# ----------------------------------------------------------------------------- warnings


def filter_warnings(fields: ItemFields, wanted: ItemFilter, pointer: str) -> tuple[WarningOut, ...]:
    """Return warnings about fields and values that no item has, the first few.

    These are values of `eq` and `in` that a user of an API misspells, of categories, tags and
    attributes, and comparisons with a number, a string or a place where no item has any. Conditions
    whose pointers are not known are not looked at.
    """
    found = (
        warning
        for condition, place in conditions(wanted, pointer)
        for warning in _warnings(fields, condition, place)
    )
    return tuple(islice(found, MAX_WARNINGS))


def attribute_warnings(fields: ItemFields, named: Mapping[str, str]) -> tuple[WarningOut, ...]:
    """Return warnings about attributes that no item has, among field names by JSON pointer."""
    found = (_unknown_attribute(fields, name, pointer) for pointer, name in named.items())
    return tuple(islice((warning for warning in found if warning is not None), MAX_WARNINGS))


def _unknown_attribute(fields: ItemFields, name: str, pointer: str) -> WarningOut | None:
    """Return a warning about an attribute that no item has, None for any other field."""
    if not name.startswith(ATTRIBUTES) or _has_values(fields.columns_of(name)):
        return None
    known = (
        other.removeprefix(ATTRIBUTES)
        for other, columns in fields.columns.items()
        if other.startswith(ATTRIBUTES) and _has_values(columns)
    )
    attribute = name.removeprefix(ATTRIBUTES)
    detail = f"no item has the attribute {attribute!r}{_closest(attribute, known)}"
    return WarningOut(pointer=pointer, detail=detail)


def _warnings(fields: ItemFields, condition: Condition, at: str) -> Iterator[WarningOut]:
    name = condition.field
    columns = fields.columns_of(name)
    pointers = {part: at + pointer for part, pointer in condition.pointers.items()}
    if name == "published_at" and "field" in pointers and not _has_values(columns):
        yield WarningOut(pointer=pointers["field"], detail="no item has published_at")
    if not (name in _SINGULAR or name.startswith(ATTRIBUTES)):
        return
    if name.startswith(ATTRIBUTES) and not _has_values(columns):
        warning = _unknown_attribute(fields, name, pointers.get("field", ""))
        if warning is not None and warning["pointer"]:
            yield warning
        return
    for operator in ("eq", "in"):
        if operator not in condition.comparisons or operator not in pointers:
            continue
        operand, pointer = condition.comparisons[operator], pointers[operator]
        several = operator == "in"
        for place, value in enumerate(operand if several else [operand]):
            if is_number(value):
                continue
            if not _is_known(columns, value):
                of = _SINGULAR.get(name, f"value of {name}")
                detail = f"no item has the {of} {_shown(value)}{_suggestion(columns, value)}"
                where = f"{pointer}/{place}" if several else pointer
                yield WarningOut(pointer=where, detail=detail)
    for operator, operand in condition.comparisons.items():
        kind = _kind_of(operator, operand)
        if kind is None or kind in (kinds := _kinds(columns)) or operator not in pointers:
            continue
        detail = f"no item has {kind} in {name}; its values are {' and '.join(kinds) or 'others'}"
        yield WarningOut(pointer=pointers[operator], detail=detail)


def _kind_of(operator: str, operand: Any) -> str | None:
    """Return what an operator compares with; None for values that are looked up one by one."""
    if operator == "within_km":
        return "places"
    if operator == "contains":
        return "text"
    if operator in ("gt", "gte", "lt", "lte"):
        return "numbers" if is_number(operand) else "text"
    if operator == "in":
        return "numbers" if operand and all(map(is_number, operand)) else None
    return "numbers" if operator == "eq" and is_number(operand) else None


def _kinds(columns: FieldColumns) -> list[str]:
    """Return the kinds of values that some item has in a field."""
    found = []
    if columns.keywords is not None and columns.keywords.has_strings:
        found.append("text")
    if columns.numbers is not None and columns.numbers.has_values():
        found.append("numbers")
    if columns.points is not None and columns.points.has_values():
        found.append("places")
    return found


def _has_values(columns: FieldColumns) -> bool:
    keywords, numbers = columns.keywords, columns.numbers
    if keywords is not None and keywords.counts.array.any():
        return True
    return numbers is not None and numbers.has_values()


def _is_known(columns: FieldColumns, value: str | bool | None) -> bool:
    return columns.keywords is not None and columns.keywords.code(keyword_of(value)) > 0


def _suggestion(columns: FieldColumns, value: str | bool | None) -> str:
    if columns.keywords is None or not columns.keywords.counts.array.any():
        return "; its values are numbers"
    if not isinstance(value, str):
        text = _shown(value)
        for spelt in (text, text.title(), text.upper()):
            if columns.keywords.code(keyword_of(spelt)) > 0:
                return f"; did you mean the text {spelt!r}?"
        return ""
    flag = {"true": True, "false": False}.get(value.casefold())
    if flag is not None and columns.keywords.code(keyword_of(flag)) > 0:
        return f"; did you mean {_shown(flag)}, without quotation marks?"
    if columns.keywords.strings_known > _COMPARED:
        return ""
    return _closest(value, columns.keywords.strings())


def _closest(name: str, others: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the most similar of some names, if one is."""
    # Names whose lengths differ by more are too different to be compared.
    alike = [other for other in islice(others, _COMPARED) if abs(len(other) - len(name)) <= 3]
    folded = {other.casefold(): other for other in alike}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=_ALIKE)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _shown(value: str | bool | None) -> str:
    """Return a value as JSON has it, a string in the quotes of a sentence."""
    if isinstance(value, str):
        return repr(value)
    return {None: "null", True: "true", False: "false"}[value]
