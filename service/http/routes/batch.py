"""Many questions in one request, each answered as if it had come alone."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

import orjson
from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from service.domain.errors import NotFound
from service.domain.records import check_id
from service.http import problems
from service.http.routes.context import Context, JsonRoute
from service.http.routes.items import stored_item
from service.http.schemas.answers import answer_out, attended_out
from service.http.schemas.ask import RecommendIn, ScoreIn, SearchIn, SimilarParams
from service.http.schemas.attend import AttendIn
from service.http.schemas.batch import BatchedIn, BatchIn, BatchOut
from service.http.schemas.rendering import Json
from service.http.schemas.stored import item_out

router = APIRouter(route_class=JsonRoute, tags=["ask"])

_ITEM = re.compile(r"/v1/items/([^/]+)")
_SIMILAR = re.compile(r"/v1/items/([^/]+)/similar")

Ask = Callable[[Mapping[str, Any], Context], Awaitable[dict[str, Any]]]


@router.post("/v1/batch", responses={200: {"model": BatchOut}})
async def batch(body: BatchIn, context: Context) -> Response:
    """Answer up to 100 questions in their order, each with its own status.

    `path` is that of score, recommend, search, attend, similar or an item. What is wrong with one
    question does not keep the others from their answers; all have the time of one request.
    """
    responses = [await _answered(each, context) for each in body.requests]
    with context.stages("render"):
        return Json({"responses": responses})


async def _answered(asked: BatchedIn, context: Context) -> dict[str, Any]:
    try:
        return {"status": 200, "body": await _ask(asked, context)}
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        problem = problems.answer(context.scope, RequestValidationError(found))
    except Exception as error:  # noqa: BLE001 - translated as it is for a question that came alone
        problem = problems.answer(context.scope, error)
    return {"status": problem.status_code, "body": orjson.loads(problem.body)}


async def _ask(asked: BatchedIn, context: Context) -> dict[str, Any]:
    """The answer to one question. Raises what its route would."""
    similar = _SIMILAR.fullmatch(asked.path)
    if similar is not None:
        query = SimilarParams.model_validate(asked.body).to_query(check_id(unquote(similar[1])))
        return answer_out(await context.engine.answers.similar(query, context.stages))
    item = _ITEM.fullmatch(asked.path)
    if item is not None:
        return item_out(await stored_item(context.engine.store, check_id(unquote(item[1]))))
    ask = _ASKED.get(asked.path)
    if ask is None:
        paths = ", ".join([*_ASKED, "/v1/items/ID", "/v1/items/ID/similar"])
        raise NotFound(f"{asked.path!r} is nothing to ask in a batch; allowed are {paths}")
    return await ask(asked.body, context)


async def _score(body: Mapping[str, Any], context: Context) -> dict[str, Any]:
    query = ScoreIn.model_validate(body).to_query(context.settings.max_targets)
    return answer_out(await context.engine.answers.score(query, context.stages))


async def _recommend(body: Mapping[str, Any], context: Context) -> dict[str, Any]:
    query = RecommendIn.model_validate(body).to_query()
    return answer_out(await context.engine.answers.recommend(query, context.stages))


async def _search(body: Mapping[str, Any], context: Context) -> dict[str, Any]:
    query = SearchIn.model_validate(body).to_query()
    return answer_out(await context.engine.answers.search(query, context.stages))


async def _attend(body: Mapping[str, Any], context: Context) -> dict[str, Any]:
    query = AttendIn.model_validate(body).to_query()
    return attended_out(await context.engine.answers.attend(query, context.stages))


_ASKED: Mapping[str, Ask] = {
    "/v1/score": _score,
    "/v1/recommend": _recommend,
    "/v1/search": _search,
    "/v1/attend": _attend,
}
