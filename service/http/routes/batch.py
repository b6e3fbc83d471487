"""Several questions in one request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import unquote

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from service.domain.errors import NotFound
from service.domain.records import check_id
from service.http import problems
from service.http.routes import questions
from service.http.routes.context import Context, JsonRoute, Question, body_errors
from service.http.routes.record_bodies import ItemParams
from service.http.routes.records import get_item
from service.http.routes.scenarios import ScenarioQuestion, ask_scenario
from service.questions.scalars import Body, example

MAX_BATCH = 100

router = APIRouter(route_class=JsonRoute, tags=["ask"])

_ITEM = re.compile(r"/v1/items/([^/]+)")
_SCENARIO = re.compile(r"/v1/scenarios/([^/]+)")
_ID = re.compile(r"\{\w+\}")


class BatchedIn(Body):
    """One question: the path of its route, and the body for it."""

    path: str = Field(examples=["/v1/search"])
    body: dict[str, Any] = Field(
        {}, description="The body, or the query parameters, of that route."
    )


class BatchIn(Body):
    """Questions to answer in order."""

    model_config = example(
        requests=[
            {"path": "/v1/search", "body": {"query": "asyncio", "limit": 3}},
            {"path": "/v1/items/talk-7/similar", "body": {"limit": 3}},
        ]
    )

    requests: Annotated[list[BatchedIn], Field(min_length=1, max_length=MAX_BATCH)]


class BatchedOut(BaseModel):
    """Status of one question, and its answer or problem document."""

    status: int
    body: dict[str, Any]


class BatchOut(BaseModel):
    """One response for each question, in their order."""

    responses: list[BatchedOut]


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
    return await context.render(lambda: {"responses": responses})


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
    """Answer a question. Raises what the question raises, and `NotFound` for another path."""
    paths = _paths()
    for path, rows in paths.items():
        if match := re.fullmatch(_ID.sub("([^/]+)", path), question.path):
            about = "".join(check_id(unquote(part)) for part in match.groups())
            row = _row(rows, question.body)
            return await row.respond(row.schema.model_validate(question.body), about, context)
    if scenario := _SCENARIO.fullmatch(question.path):
        asked = ScenarioQuestion.model_validate(question.body)
        return await ask_scenario(unquote(scenario[1]), asked, context)
    if item := _ITEM.fullmatch(question.path):
        read = ItemParams.model_validate(question.body)
        return await get_item(check_id(unquote(item[1])), read, context)
    allowed = [_ID.sub("ID", path) for path in paths]
    allowed.insert(sum("ID" not in path for path in allowed), "/v1/items/ID")
    raise NotFound(f"a batch takes no {question.path!r}; allowed are {', '.join(allowed)}")


def _row(rows: Mapping[str, Question], body: Mapping[str, Any]) -> Question:
    """Choose the question of a path: its parameters if the body has what only these have."""
    if len(rows) == 1:
        return next(iter(rows.values()))
    flat = rows["GET"].schema.model_fields.keys()
    is_flat = "retrieval" in flat and isinstance(body.get("retrieval"), str)
    if is_flat or body.keys() & (flat - rows["POST"].schema.model_fields.keys()):
        return rows["GET"]
    return rows["POST"]


def _paths() -> dict[str, dict[str, Question]]:
    """Return the questions that a batch takes, by path and method."""
    paths: dict[str, dict[str, Question]] = {}
    for row in sorted(questions.QUESTIONS, key=lambda row: row.about is not None):
        if row.is_batched:
            paths.setdefault(row.path, {})[row.method] = row
    return paths
