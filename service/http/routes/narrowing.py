"""Narrowing of a saved question by a request: field by field, and never wider.

A field that only one of both gives is taken from there. Where both do,

- `filter`: both hold; `exclude`: what either names; `visible`: what both let pass;
- `limit`, `explain`: the request's, up to the saved one; `exclude_seen`: true if saved as true;
- `rules`: the saved ones, then the request's, whose names are others;
- `at_most`: both hold, and of one field the request's count is at most the saved one;
- `facets`, `fields`: the request's, since they choose no items;
- any other field is fixed: a request may only repeat it. So is `memory`, saved or not.

A fallback is narrowed in the same way, but refuses nothing, since the request was made for another
question: the smaller of two numbers holds, `at` and pins are the request's, and other fixed fields
keep their saved values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from models.catalogue.item_filter import Group, ItemFilter
from service.domain.errors import Invalid
from service.questions.parts import AtMostIn, PinIn, RuleIn, VisibleIn
from service.questions.scalars import Body

_Refuse = Callable[[str, str], None]  # takes a pointer within a field, and what is wrong


def narrowed(
    saved: Body, saved_names: Set[str], given: Mapping[str, Any], *, is_fallback: bool = False
) -> Any:
    """Return a saved question as a request narrows it.

    Args:
        saved: the question of the scenario, valid by itself.
        saved_names: the fields that are saved in it.
        given: the fields of the request, each valid.
        is_fallback: the request was made for another question, and is not refused.

    Raises:
        Invalid: at the first field that would widen the question.
    """
    values: dict[str, Any] = {}
    for name, field in type(saved).model_fields.items():
        if name not in saved_names and name != "memory":
            default = field.get_default(call_default_factory=True)
            values[name] = given.get(name, default)
        elif name not in given:
            values[name] = getattr(saved, name)
        else:

            def refuse(pointer: str, why: str, name: str = name) -> None:
                if not is_fallback:
                    raise Invalid(f"/{name}{pointer}", why)

            values[name] = _NARROW.get(name, _fixed)(refuse, getattr(saved, name), given[name])
    # Saved fields that do nothing for this request are no fault of it.
    named = () if is_fallback else given.keys()
    return type(saved).model_construct(_fields_set={*named}, **values)


def _fixed(refuse: _Refuse, saved: Any, given: Any) -> Any:
    if given != saved:
        refuse("", "is fixed by the scenario: leave it out")
    return saved


def _given(refuse: _Refuse, saved: Any, given: Any) -> Any:
    _fixed(refuse, saved, given)
    return given


def _replaced(_refuse: _Refuse, _saved: Any, given: Any) -> Any:
    return given


def _least(refuse: _Refuse, saved: int, given: int) -> int:
    if given > saved:
        refuse("", f"must be at most {saved}, which the scenario allows")
    return min(saved, given)


def _kept_true(refuse: _Refuse, saved: bool, given: bool) -> bool:
    if saved and not given:
        refuse("", "must be true, as the scenario has it")
    return saved or given


def _both(_refuse: _Refuse, saved: ItemFilter, given: ItemFilter) -> ItemFilter:
    return Group("all", (saved, given), ("/all/0", "/all/1"))


def _union(_refuse: _Refuse, saved: list[str], given: list[str]) -> list[str]:
    return [*dict.fromkeys([*saved, *given])]


def _intersection(_refuse: _Refuse, saved: VisibleIn, given: VisibleIn) -> VisibleIn:
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


def _rules(refuse: _Refuse, saved: list[RuleIn], given: list[RuleIn]) -> list[RuleIn]:
    rules, names = [*saved], {rule.name for rule in saved}
    for place, rule in enumerate(given):
        name = rule.name
        if name in names:
            refuse(f"/{place}/name", "is the name of another rule, maybe of the scenario")
        while name in names:
            name += " (of the request)"
        names.add(name)
        rules.append(rule.model_copy(update={"name": name}))
    return rules


def _quotas(refuse: _Refuse, saved: list[AtMostIn], given: list[AtMostIn]) -> list[AtMostIn]:
    counts = {each.field: each.count for each in saved}
    fields = [each.field for each in given]
    for place, each in enumerate(given):
        if each.field in fields[:place]:
            refuse(f"/{place}/field", f"must not repeat /at_most/{fields.index(each.field)}/field")
        most = counts.get(each.field, each.count)
        if each.count > most:
            refuse(f"/{place}/count", f"must be at most {most}, which the scenario allows")
        counts[each.field] = min(most, each.count)
    return [AtMostIn(field=field, count=count) for field, count in counts.items()]


def _pins(refuse: _Refuse, saved: list[PinIn], given: list[PinIn]) -> list[PinIn]:
    _fixed(refuse, saved, given)
    taken = {pin.item_id for pin in given}, {pin.position for pin in given}
    free = (pin for pin in saved if pin.item_id not in taken[0] and pin.position not in taken[1])
    return [*given, *free]


_NARROW: Mapping[str, Callable[[_Refuse, Any, Any], Any]] = {
    "filter": _both,
    "limit": _least,
    "explain": _least,
    "exclude": _union,
    "exclude_seen": _kept_true,
    "visible": _intersection,
    "rules": _rules,
    "at_most": _quotas,
    "pin": _pins,
    "at": _given,
    "facets": _replaced,
    "fields": _replaced,
}
NARROWING = frozenset(_NARROW)
