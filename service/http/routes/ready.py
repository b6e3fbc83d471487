"""Ready questions: what everybody takes, by item and by user."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http.routes.context import Context, JsonRoute
from service.http.schemas.answers import AnswerOut, answer_out
from service.http.schemas.questions.popular import PopularIn
from service.http.schemas.rendering import Json

router = APIRouter(route_class=JsonRoute, tags=["ask"])


@router.post("/v1/popular", responses={200: {"model": AnswerOut}})
async def popular(body: PopularIn, context: Context) -> Response:
    """Rank items by the events of everybody: popular, trending, newest or best rated ones.

    Every event that was acknowledged counts, also right after a restart; forgotten ones do not.
    """
    answer = await context.engine.ready_answers.popular(body.to_query(), context.stages)
    with context.stages("render"):
        return Json(answer_out(answer))
