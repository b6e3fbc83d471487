"""Narrowing of a saved question by a request: field by field, and never wider.

A field that only one of both gives is taken from there. Where both do,

- `filter`: both hold; `exclude`: what either names; `visible`: what both let pass;
- `limit`, `explain`: the request's, up to the saved one; `exclude_seen`: true if saved as true;
- `rules`: the saved ones, then the request's, whose names are others;
- `at_most`: both hold, and of one field the request's count is at most the saved one;
- `facets`, `fields`: the request's, since they choose no items;
- any other field is fixed: a request may only repeat it. So is `memory`, saved or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from service.domain.errors import Invalid
from service.http.schemas.base import Body
from service.http.schemas.questions.filters import FilterIn
from service.http.schemas.questions.selection import VisibleIn
from service.http.schemas.questions.steering import AtMostIn, RuleIn


def narrowed(saved: Body, saved_names: Set[str], given: Body, given_names: Set[str]) -> Any:
    """Return a saved question as a request narrows it.

    Args:
        saved: the question of the scenario, valid by itself.
        saved_names: the fields that are saved in it.
        given: a question of the same type with the request's fields, valid by itself.
        given_names: the fields that are the request's.

    Raises:
        Invalid: at the first field that would widen the question.
    """
    values: dict[str, Any] = {}
    for name, field in type(saved).model_fields.items():
        own = getattr(given, name)
        if name not in saved_names and name != "memory":
            default = field.get_default(call_default_factory=True)
            values[name] = own if name in given_names else default
        elif name not in given_names:
            values[name] = getattr(saved, name)
        else:
            values[name] = _NARROW.get(name, _fixed)(name, getattr(saved, name), own)
    # Saved fields that do nothing for this request are no fault of it.
    return type(saved).model_construct(_fields_set={*given_names}, **values)


def _fixed(name: str, saved: Any, given: Any) -> Any:
    if given != saved:
        raise Invalid(f"/{name}", "is fixed by the scenario: leave it out")
    return saved


def _replaced(_name: str, _saved: Any, given: Any) -> Any:
    return given


def _at_most(name: str, saved: int, given: int) -> int:
    if given > saved:
        raise Invalid(f"/{name}", f"must be at most {saved}, which the scenario allows")
    return given


def _kept_true(name: str, saved: bool, given: bool) -> bool:
    if saved and not given:
        raise Invalid(f"/{name}", "must be true, as the scenario has it")
    return given


def _both(_name: str, saved: FilterIn, given: FilterIn) -> FilterIn:
    return FilterIn(all=[saved, given])


def _union(_name: str, saved: list[str], given: list[str]) -> list[str]:
    return [*dict.fromkeys([*saved, *given])]


def _intersection(_name: str, saved: VisibleIn, given: VisibleIn) -> VisibleIn:
    since = [each for each in (saved.since, given.since) if each is not None]
    until = [each for each in (saved.until, given.until) if each is not None]
    return saved.model_copy(
        update={
            "since": max(since, default=None),
            "until": min(until, default=None),
            "types": _common(saved.types, given.types),
            "categories": _common(saved.categories, given.categories),
        }
    )


def _common(saved: list[str] | None, given: list[str] | None) -> list[str] | None:
    if saved is None or given is None:
        return given if saved is None else saved
    return [each for each in given if each in saved]


def _rules(name: str, saved: list[RuleIn], given: list[RuleIn]) -> list[RuleIn]:
    names = {rule.name for rule in saved}
    for place, rule in enumerate(given):
        if rule.name in names:
            raise Invalid(f"/{name}/{place}/name", "is the name of a rule of the scenario")
    return [*saved, *given]


def _quotas(name: str, saved: list[AtMostIn], given: list[AtMostIn]) -> list[AtMostIn]:
    counts = {each.field: each.count for each in saved}
    for place, each in enumerate(given):
        most = counts.get(each.field, each.count)
        if each.count > most:
            pointer = f"/{name}/{place}/count"
            raise Invalid(pointer, f"must be at most {most}, which the scenario allows")
    named = {each.field for each in given}
    return [*(each for each in saved if each.field not in named), *given]


# Fields that a request may give beside any saved ones without being refused.
COMBINED = frozenset({"filter", "exclude", "visible", "facets", "fields"})

_NARROW: Mapping[str, Callable[[str, Any, Any], Any]] = {
    "filter": _both,
    "limit": _at_most,
    "explain": _at_most,
    "exclude": _union,
    "exclude_seen": _kept_true,
    "visible": _intersection,
    "rules": _rules,
    "at_most": _quotas,
    "facets": _replaced,
    "fields": _replaced,
}
