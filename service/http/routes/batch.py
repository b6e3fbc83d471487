"""Several questions in one request, each answered as if it had come alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import orjson
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.responses import Response

from service.domain.errors import NotFound
from service.domain.records import check_id
from service.http import problems
from service.http.routes import ask, attend, items, ready, scenarios
from service.http.routes.context import Context, JsonRoute, body_errors
from service.http.schemas.base import Body, ItemParams, Params
from service.http.schemas.questions.ask import RecommendIn, ScoreIn, SearchIn
from service.http.schemas.questions.attend import AttendIn
from service.http.schemas.questions.audience import AffinitiesParams, AudienceParams
from service.http.schemas.questions.batch import BatchedIn, BatchIn, BatchOut
from service.http.schemas.questions.popular import PopularIn
from service.http.schemas.questions.rows import RowsIn
from service.http.schemas.questions.similar import SimilarIn, SimilarParams
from service.http.schemas.questions.together import TogetherIn
from service.http.schemas.rendering import Json
from service.http.schemas.scenarios.bodies import ScenarioQuestion

router = APIRouter(route_class=JsonRoute, tags=["ask"])

_ITEM = re.compile(r"/v1/items/([^/]+)")
_SIMILAR = re.compile(r"/v1/items/([^/]+)/similar")
_SIMILAR_PARAMS = SimilarParams.model_fields.keys() - SimilarIn.model_fields.keys()
_SCENARIO = re.compile(r"/v1/scenarios/([^/]+)")
_ABOUT = re.compile(r"/v1/(items|users)/([^/]+)/([a-z]+)")
# By what the question is about, and the last part of its path.
_ABOUT_HANDLERS: Mapping[
    tuple[str, str], tuple[type[Body | Params], Callable[[str, Any, Context], Awaitable[Response]]]
] = {
    ("items", "together"): (TogetherIn, ready.filtered_items_together),
    ("items", "audience"): (AudienceParams, ready.item_audience),
    ("users", "affinities"): (AffinitiesParams, ready.user_affinities),
}
_HANDLERS: Mapping[str, tuple[type[Body], Callable[[Any, Context], Awaitable[Response]]]] = {
    "/v1/score": (ScoreIn, ask.score),
    "/v1/recommend": (RecommendIn, ask.recommend),
    "/v1/search": (SearchIn, ask.search),
    "/v1/attend": (AttendIn, attend.attend),
    "/v1/popular": (PopularIn, ready.popular),
    "/v1/rows": (RowsIn, ready.rows),
}


@router.post("/v1/batch", responses={200: {"model": BatchOut}})
async def batch(body: BatchIn, context: Context) -> Response:
    """Answer up to 100 questions in their order, each with its own status.

    `path` is the path of a question or of an item. An error in one
    question leaves the answers to the others as they are; all share the deadline of one request.
    """
    responses = []
    for each in body.requests:
        responses.append(await _respond(each, context))
        await asyncio.sleep(0)  # let other tasks run
    with context.stages("render"):
        return Json({"responses": responses})


async def _respond(question: BatchedIn, context: Context) -> dict[str, Any]:
    try:
        response = await _handle(question, context)
    except ValidationError as error:
        response = problems.answer(context.scope, body_errors(error))
    except Exception as error:  # noqa: BLE001 - translated as for a question that came alone
        response = problems.answer(context.scope, error)
    # The body is JSON already, and is copied as it is.
    return {"status": response.status_code, "body": orjson.Fragment(bytes(response.body))}


async def _handle(question: BatchedIn, context: Context) -> Response:
    """Call the handler of the question's path. Raises what that raises, and `NotFound`."""
    if similar := _SIMILAR.fullmatch(question.path):
        item_id = check_id(unquote(similar[1]))
        is_flat = isinstance(question.body.get("retrieval"), str)
        if is_flat or question.body.keys() & _SIMILAR_PARAMS:
            params = SimilarParams.model_validate(question.body)
            return await items.similar_items(item_id, params, context)
        body = SimilarIn.model_validate(question.body)
        return await items.filtered_similar_items(item_id, body, context)
    if (about := _ABOUT.fullmatch(question.path)) and (about[1], about[3]) in _ABOUT_HANDLERS:
        of_one, answer = _ABOUT_HANDLERS[about[1], about[3]]
        id_ = check_id(unquote(about[2]))
        return await answer(id_, of_one.model_validate(question.body), context)
    if scenario := _SCENARIO.fullmatch(question.path):
        asked = ScenarioQuestion.model_validate(question.body)
        return await scenarios.ask_scenario(unquote(scenario[1]), asked, context)
    if item := _ITEM.fullmatch(question.path):
        read = ItemParams.model_validate(question.body)
        return await items.get_item(check_id(unquote(item[1])), read, context)
    if question.path not in _HANDLERS:
        about_one = [f"/v1/{kind}/ID/{name}" for kind, name in _ABOUT_HANDLERS]
        paths = ", ".join([*_HANDLERS, "/v1/items/ID", "/v1/items/ID/similar", *about_one])
        raise NotFound(f"a batch takes no {question.path!r}; allowed are {paths}")
    model, handler = _HANDLERS[question.path]
    return await handler(model.model_validate(question.body), context)
