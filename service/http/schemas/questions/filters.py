"""The filter language: conditions on the fields of items, nested by `all`, `any` and `none`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from service.domain.errors import Invalid
from service.domain.item_selection import (
    ATTRIBUTES,
    NO_FILTER,
    FieldCondition,
    Filter,
    FilterGroup,
    Operator,
)
from service.domain.timestamps import from_rfc3339
from service.http.schemas.base import Body, Labels
from service.http.schemas.questions.item_fields import Bound, FieldName, Scalar
from service.http.schemas.scalars import Conditions, Timestamp

MAX_DEPTH = 8  # filters within filters
MAX_CONDITIONS = 200  # of a filter, and of all rules of a question together
MAX_VALUES = 1_000  # of one `in`
MAX_KM = 20_038  # half of the equator: no place is further away

_GROUPS: tuple[Literal["all", "any", "none"], ...] = ("all", "any", "none")
_BOUNDS: tuple[Operator, ...] = ("gt", "gte", "lt", "lte")
_OF_TIMES: tuple[Operator, ...] = ("eq", "in", *_BOUNDS, "exists")
_OF_TEXTS: tuple[Operator, ...] = (*_OF_TIMES, "contains")
_OPERATORS: tuple[Operator, ...] = (*_OF_TEXTS, "within_km")


class CategoriesIn(Body):
    """Conditions on an item's categories."""

    any: Labels = Field([], max_length=MAX_VALUES, description="At least one of these.")
    all: Labels = Field([], description="Every one of these.")
    none: Labels = Field([], max_length=MAX_VALUES, description="Not one of these.")


class PublishedIn(Body):
    """Conditions on an item's publication."""

    since: Timestamp | None = None
    until: Timestamp | None = None


class WithinIn(Body):
    """A circle on the Earth."""

    lat: float = Field(ge=-90, le=90, description="Degrees north.")
    lon: float = Field(ge=-180, le=180, description="Degrees east.")
    km: float = Field(ge=0, le=MAX_KM, description="Radius.")


def _without_null(schema: dict[str, Any]) -> None:
    """Document a field that may be left out, and is then None, but may not be null."""
    (other,) = (kind for kind in schema.pop("anyOf") if kind != {"type": "null"})
    schema |= other


def _check_lists(conditions: dict[str, Any]) -> dict[str, Any]:
    for name, value in conditions.items():
        if isinstance(value, list) and len(value) > MAX_VALUES:
            why = f"has {len(value)} values; {MAX_VALUES} are allowed"
            raise Invalid(f"/{name.replace('~', '~0').replace('/', '~1')}", why)
    return conditions


class FilterIn(Body):
    """Conditions on the items of the answer: all that are given must hold.

    A condition is a `field` with comparisons, as in `{"field": "attributes.price", "gte": 10}`: one
    of the item's values must meet them all. `all`, `any` and `none` hold lists of filters.
    `categories`, `attributes` and `published` are a short form.
    """

    all: list[FilterIn] = Field([], description="Every one of these holds.")
    any: list[FilterIn] = Field([], description="At least one of these holds.")
    none: list[FilterIn] = Field([], description="Not one of these holds.")
    field: FieldName | None = Field(
        None,
        description="item_id, title, categories, tags, published_at or attributes.NAME.",
        json_schema_extra=_without_null,
    )
    eq: Scalar = Field(None, description="The value itself: 1 is 1.0, and is not true or '1'.")
    in_: Annotated[list[Scalar], Field(max_length=MAX_VALUES, fail_fast=True)] = Field(
        [], alias="in", description="One of these values."
    )
    gt: Bound = Field(None, description="Larger; strings compare by code point.")
    gte: Bound = Field(None, description="Larger or equal.")
    lt: Bound = Field(None, description="Smaller.")
    lte: Bound = Field(None, description="Smaller or equal.")
    exists: bool = Field(True, description="Whether the item has a value; null is one.")
    contains: str = Field("", max_length=1_000, description="A part of a string, in any case.")
    within_km: WithinIn | None = Field(
        None,
        description='Of attributes that are objects {"lat": …, "lon": …}: the distance.',
        json_schema_extra=_without_null,
    )
    categories: CategoriesIn = CategoriesIn()
    attributes: Annotated[Conditions, AfterValidator(_check_lists)] = Field(
        {}, description="Each equal to the value, or to one of a list of values."
    )
    published: PublishedIn = PublishedIn()

    @model_validator(mode="after")
    def _check_condition(self) -> FilterIn:
        given = self._comparisons()
        if self.field is None:
            if given:
                raise Invalid("/field", f"is required beside {_quoted(given)}")
            return self
        if not given:
            raise Invalid("", f"needs a comparison beside `field`: one of {', '.join(_OPERATORS)}")
        for name in (*_GROUPS, "categories", "attributes", "published"):
            if name in self.model_fields_set:
                raise Invalid(f"/{name}", "must stand in an object of its own, without a `field`")
        _check_operands(self.field, given)
        return self

    def to_filter(self, pointer: str = "/filter") -> Filter:
        """Return the domain's value of the filter that stands at a JSON pointer."""
        if self.field is not None:
            given = self._comparisons()
            if self.field == "published_at":
                given = {name: _parsed(operand) for name, operand in given.items()}
            pointers = {name: f"{pointer}/{name}" for name in ("field", *given)}
            return FieldCondition(self.field, given, pointers)
        members = [*self._groups(pointer), *self._short(pointer)]
        if not members:
            return NO_FILTER
        return members[0] if len(members) == 1 else FilterGroup("all", tuple(members))

    def _comparisons(self) -> dict[Operator, Any]:
        """Return the operands that were given, by operator."""
        given: dict[Operator, Any] = {}
        for name in _OPERATORS:
            attribute = "in_" if name == "in" else name
            if attribute in self.model_fields_set:
                operand = getattr(self, attribute)
                if operand is None and name != "eq":
                    continue
                if isinstance(operand, WithinIn):
                    operand = (operand.lat, operand.lon, operand.km)
                given[name] = operand
        return given

    def _groups(self, pointer: str) -> Iterator[Filter]:
        for kind in _GROUPS:
            if kind in self.model_fields_set:
                members: list[FilterIn] = getattr(self, kind)
                yield FilterGroup(
                    kind,
                    tuple(
                        member.to_filter(f"{pointer}/{kind}/{place}")
                        for place, member in enumerate(members)
                    ),
                )

    def _short(self, pointer: str) -> Iterator[Filter]:
        """Translate the short form."""
        own, at = self.categories, f"{pointer}/categories"
        if own.any:
            yield FieldCondition("categories", {"in": own.any}, {"in": f"{at}/any"})
        for place, label in enumerate(own.all):
            yield FieldCondition("categories", {"eq": label}, {"eq": f"{at}/all/{place}"})
        if own.none:
            unwanted = FieldCondition("categories", {"in": own.none}, {"in": f"{at}/none"})
            yield FilterGroup("none", (unwanted,))
        for name, value in self.attributes.items():
            operator: Operator = "in" if isinstance(value, list) else "eq"
            place_of = f"{pointer}/attributes/{name.replace('~', '~0').replace('/', '~1')}"
            pointers = {"field": place_of, operator: place_of}
            yield FieldCondition(ATTRIBUTES + name, {operator: value}, pointers)
        since, until = self.published.since, self.published.until
        bounds: dict[Operator, int | None] = {"gte": since, "lt": until}
        if given := {name: bound for name, bound in bounds.items() if bound is not None}:
            yield FieldCondition("published_at", given)


def _check_operands(field: str, given: dict[Operator, Any]) -> None:
    """Raise `Invalid` at the first operand that does not fit its field, or the others."""
    fits: Callable[[Any], bool]
    if field == "published_at":
        allowed, fits, what = _OF_TIMES, _is_time, "must be a time such as 2026-01-31T09:30:00Z"
    elif field.startswith(ATTRIBUTES):
        allowed, fits, what = _OPERATORS, _is_any, ""
    else:
        allowed, fits, what = _OF_TEXTS, _is_text, "must be a string"
    for name, operand in given.items():
        if name not in allowed:
            raise Invalid(f"/{name}", f"is none of {field}, which takes {', '.join(allowed)}")
        for place, one in enumerate(operand) if name == "in" else [("", operand)]:
            if name not in {"exists", "within_km"} and not fits(one):
                raise Invalid(f"/{name}/{place}".rstrip("/"), what)
    if given.get("exists") is False and len(given) > 1:
        raise Invalid("/exists", "must be true beside comparisons, which no missing value meets")
    bounds = [name for name in _BOUNDS if name in given]
    for name in bounds[1:]:
        if isinstance(given[name], str) != isinstance(given[bounds[0]], str):
            raise Invalid(f"/{name}", f"must be a number or a string as `{bounds[0]}` is")


def _is_any(_operand: Any) -> bool:
    return True


def _is_text(operand: Any) -> bool:
    return isinstance(operand, str)


def _is_time(operand: Any) -> bool:
    try:
        return isinstance(operand, str) and from_rfc3339(operand) is not None
    except ValueError:
        return False


def _parsed(operand: Any) -> Any:
    """Return times in microseconds, and whether there is one as it is."""
    if isinstance(operand, list):
        return [from_rfc3339(one) for one in operand]
    return operand if isinstance(operand, bool) else from_rfc3339(operand)


def _quoted(given: dict[Operator, Any]) -> str:
    return ", ".join(f"`{name}`" for name in given)


def count_conditions(raw: Any) -> int:
    """Count the conditions of an unparsed filter. Raises `Invalid` beyond a bound."""
    count, waiting = 0, [("", 1, raw)]
    while waiting:
        pointer, depth, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        categories = node.get("categories")
        whole = categories.get("all") if isinstance(categories, dict) else None
        count += 1 + sum(map(_size, (node.get("attributes"), categories, whole)))
        if depth > MAX_DEPTH:
            raise Invalid(pointer, f"is nested too deep: {MAX_DEPTH} filters deep are allowed")
        if count > MAX_CONDITIONS:
            raise Invalid("", f"has too many conditions: {MAX_CONDITIONS} are allowed")
        for kind in _GROUPS:
            members = node.get(kind)
            if isinstance(members, list):
                waiting += [
                    (f"{pointer}/{kind}/{place}", depth + 1, member)
                    for place, member in enumerate(members)
                ]
    return count


def _size(short: Any) -> int:
    """Count the conditions of a part of a short form."""
    return len(short) if isinstance(short, dict | list) else 0


def _check_size(raw: Any) -> Any:
    count_conditions(raw)
    return raw


FilterField = Annotated[FilterIn, BeforeValidator(_check_size)]
