"""Parts that questions share: filters, retrieval, events, facets, orders, rules and pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from models.attention.attend import Mode
from models.catalogue.item_filter import EVERYTHING, Condition, Group, ItemFilter
from service.domain.errors import Invalid
from service.domain.records import ATTRIBUTES
from service.domain.timestamps import from_rfc3339
from service.questions.scalars import (
    INTEGRAL,
    MAX_LIMIT,
    AnswerField,
    Body,
    Bound,
    Conditions,
    EventType,
    FacetField,
    FieldName,
    Id,
    Labels,
    Params,
    Scalar,
    Timestamp,
)

# ------------------------------------------------------------------------------ filters


MAX_DEPTH = 8  # filters within filters
MAX_CONDITIONS = 200  # of a filter, and of all rules of a question together
MAX_VALUES = 1_000  # of one `in`
MAX_KM = 20_038  # half of the equator: no place is further away

_GROUPS: tuple[Literal["all", "any", "none"], ...] = ("all", "any", "none")
Operator = Literal["eq", "in", "gt", "gte", "lt", "lte", "exists", "contains", "within_km"]

_BOUNDS: tuple[Operator, ...] = ("gt", "gte", "lt", "lte")
_OF_TIMES: tuple[Operator, ...] = ("eq", "in", *_BOUNDS, "exists")
_OF_TEXTS: tuple[Operator, ...] = (*_OF_TIMES, "contains")
_OPERATORS: tuple[Operator, ...] = get_args(Operator)


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


def _conditions(wanted: FilterIn) -> ItemFilter:
    return wanted.conditions()


_Member = Annotated["FilterIn", AfterValidator(_conditions)]


class FilterIn(Body):
    """Conditions on the items of the answer: all that are given must hold.

    A condition is a `field` with comparisons, as in `{"field": "attributes.price", "gte": 10}`: one
    of the item's values must meet them all. `all`, `any` and `none` hold lists of filters.
    `categories`, `attributes` and `published` are a short form.
    """

    all: list[_Member] = Field([], description="Every one of these holds.")
    any: list[_Member] = Field([], description="At least one of these holds.")
    none: list[_Member] = Field([], description="Not one of these holds.")
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

    def conditions(self) -> ItemFilter:
        """Return the conditions that are evaluated, in place of which a question has them."""
        given = self._comparisons()
        if self.field is None:
            if given:
                raise Invalid("/field", f"is required beside {_quoted(given)}")
            return _all_of([*self._groups(), *self._short()])
        if not given:
            raise Invalid("", f"needs a comparison beside `field`: one of {', '.join(_OPERATORS)}")
        for name in (*_GROUPS, "categories", "attributes", "published"):
            if name in self.model_fields_set:
                raise Invalid(f"/{name}", "must stand in an object of its own, without a `field`")
        _check_operands(self.field, given)
        pointers = {name: f"/{name}" for name in ("field", *given)}
        if self.field == "published_at":
            given = {name: _parsed(operand) for name, operand in given.items()}
        return Condition(self.field, cast("dict[str, Any]", given), pointers)

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

    def _groups(self) -> Iterator[ItemFilter]:
        for kind in _GROUPS:
            if kind in self.model_fields_set:
                members: list[ItemFilter] = getattr(self, kind)
                pointers = tuple(f"/{kind}/{place}" for place in range(len(members)))
                yield Group(kind, tuple(members), pointers)

    def _short(self) -> Iterator[ItemFilter]:
        """Yield the conditions of the short form."""
        yield from in_categories(
            self.categories.any, self.categories.all, self.categories.none, "/categories/"
        )
        for name, value in self.attributes.items():
            operator = "in" if isinstance(value, list) else "eq"
            pointer = f"/attributes/{name.replace('~', '~0').replace('/', '~1')}"
            pointers = {"field": pointer, operator: pointer}
            yield Condition(ATTRIBUTES + name, {operator: value}, pointers)
        bounds = {"gte": self.published.since, "lt": self.published.until}
        if given := {name: bound for name, bound in bounds.items() if bound is not None}:
            yield Condition("published_at", given)


def in_categories(
    one: Sequence[str], every: Sequence[str], no: Sequence[str], pointer: str
) -> Iterator[ItemFilter]:
    """Yield the conditions of items in at least one, in every one and in none of some categories.

    `pointer` is the beginning of the JSON pointers to these lists, `any`, `all` and `none`.
    """
    if one:
        yield Condition("categories", {"in": one}, {"in": f"{pointer}any"})
    for place, label in enumerate(every):
        yield Condition("categories", {"eq": label}, {"eq": f"{pointer}all/{place}"})
    if no:
        unwanted = Condition("categories", {"in": no}, {"in": f"{pointer}none"})
        yield Group("none", (unwanted,))


def _all_of(members: Sequence[ItemFilter]) -> ItemFilter:
    if not members:
        return EVERYTHING
    return members[0] if len(members) == 1 else Group("all", tuple(members))


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


def _is_filter(wanted: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    return wanted if isinstance(wanted, Condition | Group) else validate(wanted)


_Filter = Annotated[
    FilterIn,
    AfterValidator(_conditions),
    BeforeValidator(_check_size),
    WrapValidator(_is_filter),
]
FilterField = Annotated[
    ItemFilter, GetPydanticSchema(lambda _source, handler: handler.generate_schema(_Filter))
]


# --------------------------------------------- retrieval, events, facets, orders, fields

MAX_K = 100_000
MAX_PROBES = 65_536
MAX_FACETS = 20
MAX_FACET_VALUES = 1_000
MAX_FIELDS = 50
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6


class VisibleIn(Body):
    """Events that may be attended; a field that is left out restricts nothing."""

    since: Timestamp | None = None
    until: Timestamp | None = None
    types: Annotated[list[EventType], Field(fail_fast=True)] | None = None
    categories: Labels | None = None


ALL_EVENTS = VisibleIn()


RetrievalMode = Annotated[
    Mode,
    Field(
        description="`exact` attends every row. `coarse` lets FAISS find `k` rows for each target "
        "and head, and attends these. `auto` is `exact` up to some length; beyond it, rows of a "
        "person's memory that count little are attended by their lists, within `max_error`, and "
        "a search of more field keys than HEED_MAX_EXACT_ROWS is `coarse`."
    ),
]
KeptRows = Annotated[
    Annotated[int, Field(ge=1, le=MAX_K), INTEGRAL] | None,
    Field(
        description="With `coarse`: the number of rows that are attended, 256 by default, and "
        "1,000 field keys of a search."
    ),
]
Probes = Annotated[
    Annotated[int, Field(ge=1, le=MAX_PROBES), INTEGRAL] | None,
    Field(
        description="With `coarse`: the lists that FAISS opens of an inverted index, which may "
        "hold fewer than `k` of the best rows. Few rows that pass a filter are all compared."
    ),
]
MaxError = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None,
    Field(
        description="With `auto`: how far a head's context over a person's long memory may be "
        "off, relative to its length, at 99 % confidence. Heed chooses the work. By default "
        "HEED_MAX_ATTENTION_ERROR.",
    ),
]


class _Retrieval(BaseModel):
    """Fields of a retrieval beside its mode, whose own field is named `mode_field`."""

    mode_field: ClassVar[str] = "mode"
    k: KeptRows = None
    probes: Probes = None
    max_error: MaxError = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        mode: Mode = getattr(self, self.mode_field)
        for name, value in (("k", self.k), ("probes", self.probes)):
            if value is not None and mode != "coarse":
                raise Invalid(f"/{name}", f"is for the mode 'coarse', not for {mode!r}")
        if self.max_error is not None and mode != "auto":
            raise Invalid("/max_error", f"is for the mode 'auto', not for {mode!r}")
        return self


class RetrievalIn(_Retrieval, Body):
    """Which rows of a memory are attended before the exact softmax over them."""

    mode: RetrievalMode = "auto"

    def check_no_history(self, why: str) -> None:
        """Raise `Invalid` for `max_error`, which is of histories only."""
        if self.max_error is not None:
            raise Invalid("/retrieval/max_error", why)


AUTO = RetrievalIn()


class RetrievalParams(_Retrieval, Params):
    """`RetrievalIn` as query parameters: `retrieval` is its mode."""

    mode_field = "retrieval"
    retrieval: RetrievalMode = "auto"

    @property
    def as_retrieval(self) -> RetrievalIn:
        return RetrievalIn.model_construct(
            mode=self.retrieval, k=self.k, probes=self.probes, max_error=self.max_error
        )


class FacetIn(Body):
    """A field whose values are counted."""

    field: FacetField
    limit: Annotated[int, Field(ge=1, le=MAX_FACET_VALUES), INTEGRAL] = Field(
        10, description="The most values, the most frequent first."
    )


class SortIn(Body):
    """A field that items are ordered by. Items without it come last either way."""

    field: FieldName
    order: Literal["asc", "desc"] = "asc"


Facets = Annotated[
    list[FacetIn],
    Field(
        max_length=MAX_FACETS,
        description="Fields whose values are counted over all items that match.",
        examples=[[{"field": "categories"}]],
    ),
]
AnswerFields = Annotated[
    list[AnswerField],
    Field(
        max_length=MAX_FIELDS,
        description="Fields of the items to answer in `fields`, beside the title.",
        examples=[["categories", "attributes.price"]],
    ),
]

Temperature = Annotated[
    float,
    Field(
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Divides the scores before the softmax; for the limit at zero use `hard`.",
    ),
]

RequestTime = Annotated[
    Timestamp | None,
    Field(
        description="The time of the request. Events after it do not exist for the question. If it "
        "is left out, the time is now, and every event of a history counts.",
    ),
]


# ------------------------------------------------------------ rules, pins, quotas, draws

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
