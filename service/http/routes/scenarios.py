"""Scenarios: saved questions, in versions, that a request narrows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from service.domain.errors import Invalid, NotFound, StoreUnreachable
from service.domain.records import check_id
from service.domain.scenarios import Scenario
from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.routes.questions import QUESTIONS, SavableQuestion
from service.http.schemas.answers import ScenarioAnswerOut
from service.http.schemas.base import Body, Page
from service.http.schemas.event_answers import FoundEventsOut
from service.http.schemas.rendering import Json
from service.http.schemas.row_answers import RowsOut
from service.http.schemas.scalars import PathName
from service.http.schemas.scenarios.bodies import (
    ScenarioIn,
    ScenarioOut,
    ScenarioQuestion,
    ScenariosOut,
    VersionsOut,
    scenario_out,
)
from service.http.schemas.scenarios.narrowing import COMBINED, narrowed

router = APIRouter(route_class=JsonRoute, tags=["scenarios"])


@router.put("/v1/scenarios/{name}", responses={200: {"model": ScenarioOut}, **documented(507)})
async def put_scenario(name: PathName, body: ScenarioIn, context: Context) -> Response:
    """Save a question: the next request on any worker is answered by it.

    Its fields are checked as in the question itself. Versions before are kept; the same scenario
    once more is no new version.
    """
    question = QUESTIONS.get(body.question)
    if question is None:
        raise Invalid("/question", f"must be one of {', '.join(QUESTIONS)}")
    fields = body.model_extra or {}
    saved, _ = _parsed(question, fields, question.brought)
    question.check(saved, fields.keys())
    document = {"question": body.question, **fields}
    if body.fallback is not None:
        if not question.fills_up(fields):
            kind = "events" if question.lists_items else body.question
            raise Invalid("/fallback", f"must be left out: {kind} are no list to fill up")
        filler = await context.engine.store.scenario(body.fallback)
        if filler is not None and not QUESTIONS[filler.question].fills_up(filler.fields):
            kind = "events" if QUESTIONS[filler.question].lists_items else filler.question
            raise Invalid("/fallback", f"answers {kind}, which fill no list up")
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
    `scenario_version`. Where it has fewer items than `limit`, those of the fallback follow.
    """
    return Json(await _answer(name, body.model_extra or {}, context))


async def _answer(
    name: str,
    given: Mapping[str, Any],
    context: Context,
    *,
    fills_up: tuple[str, ...] = (),
    at_most: int = 0,
) -> dict[str, Any]:
    """Answer a scenario, filled up by its fallback. Raises what its question raises.

    Args:
        name: of the scenario.
        given: fields of the request.
        context: of the request.
        fills_up: the scenarios whose fallback it is, directly or not.
        at_most: the limit of the last of these.
    """
    if name in fills_up:  # the store refuses it, but versions of different times may be remembered
        raise NotFound(f"the scenario {name!r} falls back to itself")
    with context.stages("store"):
        scenario, is_stale = await context.engine.scenarios.current(name)
    if fills_up:
        given = _of_fallback(scenario, given, at_most)
    question = QUESTIONS[scenario.question]
    body, about = _narrowed(question, scenario.fields, given)
    if fills_up:  # a field of the request that does nothing in a fallback is passed over
        body.model_fields_set.clear()
    missing: NotFound | None = None
    answer: dict[str, Any] = {}
    try:
        response = await question.answer(body, about, context)
        answer = orjson.loads(bytes(response.body))
    except NotFound as error:
        if scenario.fallback is None:
            raise
        missing = error
    limit = getattr(body, "limit", 0)
    items = answer.get("items", [])
    if scenario.fallback is not None and len(items) < limit:
        chain = (*fills_up, name)
        try:
            more = await _answer(scenario.fallback, given, context, fills_up=chain, at_most=limit)
        except (NotFound, StoreUnreachable) as error:
            # A scenario that is remembered may have a fallback that is not, or that is deleted.
            is_away = is_stale or isinstance(error, StoreUnreachable)
            if missing is not None or not is_away:
                raise
            answer["degraded"] = True
        else:
            named = {item["item_id"] for item in items}
            added = [
                {"scenario": scenario.fallback, **item}
                for item in more["items"]
                if item["item_id"] not in named
            ]
            if missing is not None:
                answer = {name: more[name] for name in more if not name.startswith("scenario")}
            answer["items"] = [*items, *added[: limit - len(items)]]
            answer["degraded"] = answer["degraded"] or more["degraded"]
    answer["degraded"] = answer["degraded"] or is_stale
    return {**answer, "scenario": scenario.name, "scenario_version": scenario.version}


def _of_fallback(filler: Scenario, given: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the fields of a request that a fallback leaves open, or that combine with its own."""
    question = QUESTIONS[filler.question]
    known = {*question.schema.model_fields, question.about}
    open_ = (known - filler.fields.keys()) | (known & COMBINED)
    passed = {name: value for name, value in given.items() if name in open_}
    return passed | {"limit": min(limit, filler.fields.get("limit", limit))}


def _narrowed(
    question: SavableQuestion, saved_fields: Mapping[str, Any], given_fields: Mapping[str, Any]
) -> tuple[Body, str | None]:
    """Return a question as a request narrows it, and the id that it is about.

    Raises `Invalid` and `RequestValidationError`, which point into the request.
    """
    given, own = _parsed(question, given_fields)
    saved, about = _parsed(question, saved_fields, question.brought)
    if about is not None and own not in (None, about):
        raise Invalid(f"/{question.about}", "is fixed by the scenario: leave it out")
    about = own if about is None else about
    if question.about is not None and about is None:
        raise Invalid(f"/{question.about}", "is required")
    return narrowed(saved, saved_fields.keys(), given, given_fields.keys()), about


def _parsed(
    question: SavableQuestion, fields: Mapping[str, Any], brought: Mapping[str, Any] | None = None
) -> tuple[Body, str | None]:
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
