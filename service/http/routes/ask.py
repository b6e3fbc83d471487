"""The three questions: score these, recommend some, search for this."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http.routes.context import Context, JsonRoute
from service.http.schemas.answers import AnswerOut, answer_out
from service.http.schemas.ask import RecommendIn, ScoreIn, SearchIn
from service.http.schemas.rendering import Json

router = APIRouter(route_class=JsonRoute, tags=["ask"])


@router.post("/v1/score", responses={200: {"model": AnswerOut}})
async def score(body: ScoreIn, context: Context) -> Response:
    """Score the given items for a user or a session, in the order given.

    `parts` add up to the score; with `explain`, the events that moved it are named.
    """
    answer = await context.engine.answers.score(
        body.to_query(context.settings.max_targets), context.stages
    )
    with context.stages("render"):
        return Json(answer_out(answer))


@router.post("/v1/recommend", responses={200: {"model": AnswerOut}})
async def recommend(body: RecommendIn, context: Context) -> Response:
    """Recommend items of the catalogue, best first, each with the reason it is there."""
    answer = await context.engine.answers.recommend(body.to_query(), context.stages)
    with context.stages("render"):
        return Json(answer_out(answer))


@router.post("/v1/search", responses={200: {"model": AnswerOut}})
async def search(body: SearchIn, context: Context) -> Response:
    """Search the catalogue by words and by meaning, best first, with the fields that matched.

    What is quoted is a phrase that every answer has; a word that ends with a star may go on. A word
    that no item has is taken for one that titles have, as `corrections` then says.
    With a user, items are re-ranked by the score of each; `explain` names the events behind it.
    """
    answer = await context.engine.answers.search(body.to_query(), context.stages)
    with context.stages("render"):
        return Json(answer_out(answer))
