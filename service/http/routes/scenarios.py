"""Scenarios: saved questions, how a request narrows one, and how fallbacks fill its answer up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from models.catalogue.item_filter import Condition, Group, ItemFilter
from service.domain.errors import Invalid, NotFound, StoreUnreachable
from service.domain.records import Scenario, check_id
from service.domain.settings import Settings
from service.domain.timestamps import to_rfc3339
from service.http.problems import documented
from service.http.routes.context import Context, Json, JsonRoute, Question
from service.http.routes.questions import saved_questions
from service.http.routes.record_bodies import Page, PathName
from service.questions.answers import FoundEventsOut, RowsOut, ScenarioAnswerOut
from service.questions.parts import AtMostIn, PinIn, RuleIn, VisibleIn
from service.questions.scalars import Body, Name, Timestamp

# narrowing of a saved question ----------------------------------------------------------

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


# routes ---------------------------------------------------------------------------------

router = APIRouter(route_class=JsonRoute, tags=["scenarios"])

_SAVED: dict[str, Any] = {
    "question": "recommend",
    "limit": 10,
    "filter": {"none": [{"field": "categories", "eq": "draft"}]},
    "rules": [{"name": "new in", "when": {"field": "tags", "eq": "new"}, "boost": 0.5}],
    "at_most": [{"field": "categories", "count": 2}],
}


class ScenarioIn(Body):
    """A question to save: its name, and any of its fields, which are checked as in the question."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [_SAVED]})

    question: str = Field(
        description="recommend, search, similar, popular, together or rows.", examples=["popular"]
    )
    fallback: Name | None = Field(
        None,
        description="A scenario that fills up an answer with fewer items than `limit`. It is asked "
        "with those of the request's fields that it has; what these narrow holds for all items.",
    )


class ScenarioQuestion(Body):
    """Fields that narrow a scenario, or that it leaves open."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"examples": [{"user_id": "ada", "limit": 5}]}
    )


class ScenarioOut(BaseModel):
    """One version of a scenario."""

    name: str
    version: int = Field(description="Versions of a name count from 1.")
    written_at: Timestamp
    scenario: dict[str, Any] | None = Field(
        description="As it was put; null where this version is a deletion."
    )


class ScenariosOut(BaseModel):
    """A page of scenarios."""

    scenarios: list[ScenarioOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


class VersionsOut(BaseModel):
    """A page of the versions of a scenario, the last first."""

    versions: list[ScenarioOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


def scenario_out(scenario: Scenario) -> dict[str, Any]:
    """Return the values of a `ScenarioOut`."""
    return {
        "name": scenario.name,
        "version": scenario.version,
        "written_at": to_rfc3339(scenario.written),
        "scenario": scenario.body,
    }


@router.put("/v1/scenarios/{name}", responses={200: {"model": ScenarioOut}, **documented(507)})
async def put_scenario(name: PathName, body: ScenarioIn, context: Context) -> Response:
    """Save a question: the next request on any worker is answered by it.

    Its fields are checked as in the question itself. Versions before are kept; the same scenario
    once more is no new version.
    """
    question = saved_questions().get(body.question)
    if question is None:
        raise Invalid("/question", f"must be one of {', '.join(saved_questions())}")
    fields = body.model_extra or {}
    saved, _ = _parsed(question, fields, question.brought)
    question.check(saved, fields.keys(), context.settings)
    document = {"question": body.question, **fields}
    if body.fallback is not None:
        if not question.fills_up(fields):
            kind = "events" if question.lists_items else body.question
            raise Invalid("/fallback", f"must be left out: {kind} are no list to fill up")
        filler = await context.engine.store.scenario(body.fallback)
        if filler is not None and not saved_questions()[filler.question].fills_up(filler.fields):
            kind = "events" if saved_questions()[filler.question].lists_items else filler.question
            raise Invalid("/fallback", f"answers {kind}, which fill no list up")
        about = None if filler is None else saved_questions()[filler.question].about
        if filler is not None and about not in {None, question.about, *filler.fields}:
            raise Invalid("/fallback", f"must save {about!r}, which this question does not know")
        document["fallback"] = body.fallback
    with context.stages("store"):
        stored = await context.engine.scenarios.put(name, document)
    return Json(scenario_out(stored))


@router.get("/v1/scenarios", responses={200: {"model": ScenariosOut}})
async def page_scenarios(page: Annotated[Page, Query()], context: Context) -> Response:
    """List the scenarios by name, page by page."""
    with context.stages("store"):
        found, cursor = await context.engine.store.page_scenarios(
            cursor=page.cursor, limit=page.limit
        )
    return Json({"scenarios": [scenario_out(each) for each in found], "cursor": cursor})


@router.get("/v1/scenarios/{name}", responses={200: {"model": ScenarioOut}, **documented(404)})
async def get_scenario(name: PathName, context: Context) -> Response:
    """Read the version of a scenario that is in use."""
    with context.stages("store"):
        found = await context.engine.scenarios.read(name)
    return Json(scenario_out(found))


@router.get(
    "/v1/scenarios/{name}/versions", responses={200: {"model": VersionsOut}, **documented(404)}
)
async def page_scenario_versions(
    name: PathName, page: Annotated[Page, Query()], context: Context
) -> Response:
    """List the versions of a scenario, the last first; a deletion is one. Put one to go back."""
    with context.stages("store"):
        found, cursor = await context.engine.store.page_scenario_versions(
            name, cursor=page.cursor, limit=page.limit
        )
    if not found and page.cursor is None:
        raise NotFound(f"no scenario {name!r}")
    return Json({"versions": [scenario_out(each) for each in found], "cursor": cursor})


@router.delete("/v1/scenarios/{name}", status_code=204, responses=documented(404, 409, 507))
async def delete_scenario(name: PathName, context: Context) -> Response:
    """Delete a scenario, whose versions remain; 409 while another one falls back to it."""
    with context.stages("store"):
        await context.engine.scenarios.delete(name)
    return Response(status_code=204)


@router.post(
    "/v1/scenarios/{name}",
    responses={200: {"model": ScenarioAnswerOut | RowsOut | FoundEventsOut}, **documented(404)},
)
async def ask_scenario(name: PathName, body: ScenarioQuestion, context: Context) -> Response:
    """Ask a saved question, with fields that narrow it or that it leaves open.

    A request never widens: its filter holds beside the saved one, its limit is at most the saved
    one, rules of the scenario stay. The answer is that of the question, with `scenario` and
    `scenario_version`. If it has fewer items than `limit`, those of the fallback follow.
    """
    given = {name: own for name, own in (body.model_extra or {}).items() if own is not None}
    answer = await _answer(name, given, context)
    return await context.render(lambda: answer)


async def _answer(name: str, fields: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Answer a scenario, filled up by its chain of fallbacks.

    The narrowed fields of the request hold for the whole answer, and the `at_most` of each question
    for whatever fills its answer up.
    """
    with context.stages("store"):
        scenario, is_stale = await context.engine.scenarios.current(name)
    question = saved_questions()[scenario.question]
    body, about, given = _narrowed(question, scenario.fields, fields)
    asked_first, seen = body, frozenset[str]()
    hides_seen = given.get("exclude_seen") is True  # by the request: pins are left out too
    saves_unseen = scenario.fields.get("exclude_seen") is True
    if hides_seen and body.pin:
        seen = await _seen(body, context)
    try:
        answer = await _ask(question, body, about, context, left_out=seen)
        missing: NotFound | None = None
    except NotFound as error:
        answer, missing = {}, error
    head, fillers, asked = answer.get("items", []), list[dict[str, Any]](), {name}
    pins, last, end = getattr(body, "pin", []), scenario, getattr(body, "limit", 0)
    degraded = is_stale or answer.get("degraded", False)
    # A later page of a list is not filled up.
    is_page = bool(getattr(body, "offset", 0) or getattr(body, "cursor", None))
    excluded = frozenset[str]()
    while last.fallback is not None and len(head) + len(fillers) < end and not is_page:
        if not missing:  # the answer has the pins by now, or a warning of them
            given.pop("pin", None)
        if getattr(body, "at", None) is not None:
            given["at"] = body.at
        excluded = excluded.union(getattr(body, "exclude", ()))
        shown = tuple(item["item_id"] for item in [*head, *fillers])
        given |= {"at_most": body.at_most, "limit": end - len(shown)}
        try:
            with context.stages("store"):
                last, was_stale = await context.engine.scenarios.current(last.fallback)
            degraded = degraded or was_stale
            # The store refuses it, but cached versions of different times may form a loop.
            if last.name in asked:
                raise NotFound(f"the scenario {last.name!r} falls back to itself")
            asked.add(last.name)
            question = saved_questions()[last.question]
            if not question.fills_up(last.fields):
                raise NotFound(f"the scenario {last.name!r} answers no list of items")
            body, about = _fitted(question, last.fields, given, about, context.settings)
        except (NotFound, StoreUnreachable) as error:
            if missing is not None:
                raise
            # A cached scenario may name a fallback that is not cached, or that is deleted.
            degraded = degraded or isinstance(error, StoreUnreachable)
            break
        end = min(end, len(shown) + body.limit)
        # A fallback that shows seen items by default, or has no user, still shows them.
        own = last.fields.get("exclude_seen", saves_unseen)
        hides = hides_seen or own or getattr(body, "exclude_seen", False)
        if hides and not seen and not _hides_as(body, asked_first):
            seen = await _seen(asked_first, context)
        left_out = excluded.union(shown, seen if hides else ())
        try:
            part = await _ask(question, body, about, context, left_out=left_out, shown=shown)
        except (NotFound, Invalid):  # the question cannot be asked about this item
            continue
        degraded = degraded or part["degraded"]
        fillers += [{"scenario": last.name, **item} for item in part["items"]]
        if missing is not None:
            head, fillers, pins, missing = fillers, [], body.pin, None
            answer = {field: part[field] for field in part if field != "cursor"}
    if missing is not None:
        raise missing
    if fillers:
        head = _lined_up(head, fillers, pins)
    answer |= {"items": head} if "items" in answer else {}
    named = {"scenario": scenario.name, "scenario_version": scenario.version}
    return {**answer, "degraded": degraded, **named}


async def _ask(
    question: Question,
    body: Any,
    about: str | None,
    context: Context,
    *,
    left_out: frozenset[str] = frozenset(),
    shown: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Ask a question whose answer leaves out some items, and follows others."""
    if left_out:
        others = Group("none", (Condition("item_id", {"in": sorted(left_out)}),))
        body = body.model_copy(update={"filter": Group("all", (body.filter, others))})
    answer: dict[str, Any] = await context.engine.ask(
        question.ask, body, context.stages, about=about or "", shown=shown if left_out else ()
    )
    return answer


def _hides_as(body: Any, other: Any) -> bool:
    """Return whether a question leaves out all items that another's requester has seen."""
    same = ("user_id", "history", "at")
    return (
        getattr(body, "exclude_seen", False)
        and not body.pin
        and all(getattr(body, name, None) == getattr(other, name, None) for name in same)
    )


async def _seen(body: Any, context: Context) -> frozenset[str]:
    """Return the items of the requester's events if a question leaves them out, else none."""
    if not getattr(body, "exclude_seen", False):
        return frozenset()
    history = getattr(body, "history", None) or ()
    with context.stages("store"):
        memories = context.engine.parts.memories
        return frozenset(await memories.seen(body.user_id, body.at, history))


def _lined_up(
    head: list[dict[str, Any]], fillers: list[dict[str, Any]], pins: Sequence[PinIn]
) -> list[dict[str, Any]]:
    """Put fillers behind the items of an answer; pins keep their places, buried items go last."""
    places = {pin.item_id: pin.position for pin in pins}
    pinned = [item for item in head if item.get("moved") == "pinned"]
    others = [item for item in head if item.get("moved") != "pinned"] + fillers
    others.sort(key=lambda item: item.get("moved") == "buried")
    for item in sorted(pinned, key=lambda item: places[item["item_id"]]):
        others.insert(places[item["item_id"]] - 1, item)
    return others


def _fitted(
    question: Question,
    saved_fields: Mapping[str, Any],
    given: Mapping[str, Any],
    about: str | None,
    settings: Settings,
) -> tuple[Any, str | None]:
    """Return the question of a fallback as a request narrows it, and the id that it is about.

    Fields of the request that the question lacks, or that conflict with its own, are passed over.
    Raises `NotFound` without an id.
    """
    saved, own = _parsed(question, saved_fields, question.brought)
    if question.about is not None:
        about = about if own is None else own
        if about is None:
            raise NotFound(f"the fallback needs a field {question.about!r}")
    names = {*saved_fields} - {question.about}
    while True:
        body = narrowed(saved, names, given, is_fallback=True)
        try:
            body.check(settings)
        except Invalid as error:
            field = error.pointer.split("/")[1]
            wide = {name for name in given if name not in NARROWING}
            if field in given or wide:
                dropped = {field} if field in given else wide
                given = {name: value for name, value in given.items() if name not in dropped}
            elif field in names:
                names.remove(field)
            else:
                raise
        else:
            return body, about


def _narrowed(
    question: Question, saved_fields: Mapping[str, Any], given_fields: Mapping[str, Any]
) -> tuple[Any, str | None, dict[str, Any]]:
    """Return a question as a request narrows it, the id that it is about, and the request's fields.

    Raises `Invalid` and `RequestValidationError`, which point into the request.
    """
    given, own = _parsed(question, given_fields)
    saved, about = _parsed(question, saved_fields, question.brought)
    if about is not None and own not in (None, about):
        raise Invalid(f"/{question.about}", "is fixed by the scenario: leave it out")
    about = own if about is None else about
    if question.about is not None and about is None:
        raise Invalid(f"/{question.about}", "is required")
    fields = {name: getattr(given, name) for name in given_fields if name != question.about}
    return narrowed(saved, saved_fields.keys(), fields), about, fields


def _parsed(
    question: Question, fields: Mapping[str, Any], brought: Mapping[str, Any] | None = None
) -> tuple[Any, str | None]:
    """Return the body of a question, and the id that it is about, where it is among the fields.

    Raises `Invalid` for the id, and `RequestValidationError` for the body.
    """
    own, about = dict(fields), None
    if question.about in own:
        about = check_id(own.pop(question.about), f"/{question.about}")
    try:
        return question.schema.model_validate({**(brought or {}), **own}), about
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error
