"""The bare attention operator over sent vectors, a user's memory or the catalogue."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.attend_answers import AttendedOut, attended_out
from service.http.schemas.questions.attend import AttendIn

router = APIRouter(route_class=JsonRoute, tags=["attend"])


@router.post("/v1/attend", responses={200: {"model": AttendedOut}, **documented(404)})
async def attend(body: AttendIn, context: Context) -> Response:
    """Score each key against the query, apply the softmax, and average the values by it."""
    attended = await context.engine.answers.attend(body.to_query(), context.stages)
    return await context.render(attended_out, attended)
