"""Score, recommend and search."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http.routes.context import Context, JsonRoute
from service.http.schemas.answers import AnswerOut, answer_out
from service.http.schemas.event_answers import FoundEventsOut, found_events_out
from service.http.schemas.questions.ask import RecommendIn, ScoreIn, SearchIn

router = APIRouter(route_class=JsonRoute, tags=["ask"])


@router.post("/v1/score", responses={200: {"model": AnswerOut}})
async def score(body: ScoreIn, context: Context) -> Response:
    """Score the given items for a user or a session, in the order given.

    `parts` add up to the score; with `explain`, the events behind it are named.
    """
    answer = await context.engine.answers.score(
        body.to_query(context.settings.max_targets), context.stages
    )
    return await context.render(answer_out, answer)


@router.post("/v1/recommend", responses={200: {"model": AnswerOut}})
async def recommend(body: RecommendIn, context: Context) -> Response:
    """Recommend items of the catalogue that pass a filter, best first, each with its reason."""
    answer = await context.engine.answers.recommend(body.to_query(), context.stages)
    return await context.render(answer_out, answer)


@router.post("/v1/search", responses={200: {"model": AnswerOut | FoundEventsOut}})
async def search(body: SearchIn, context: Context) -> Response:
    """Search the catalogue by words and by meaning, best first, with the fields that matched.

    A quoted part is a phrase that every result has; a word that ends with a star is a prefix. A
    word that no item has stands for one of a title, which `corrections` reports; other spellings
    are offered in `did_you_mean`. Item ids and the attributes in HEED_KEYWORD_FIELDS match as
    wholes and by their beginnings, before anything else. Where nothing matches, `warnings` says so.
    With a user, results are re-ranked by their scores; `explain` names the events behind these.

    Without a query, or with a `sort`, items are listed in the order of their fields instead, page
    by page: all that pass the filter, or those of them that match.

    With `"memory": "history"` the user's own events are searched by the texts of their items. The
    answer has `events` in place of `items`: several on one item are several answers, of which newer
    ones come first.
    """
    answer = await context.engine.answers.search(body.to_query(), context.stages)
    return await context.render(
        found_events_out if body.memory == "history" else answer_out, answer
    )
