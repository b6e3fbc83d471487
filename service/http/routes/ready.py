"""Ready questions: what everybody takes, by item and by user."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.answers import AnswerOut, answer_out
from service.http.schemas.audience_answers import (
    AffinitiesOut,
    AudienceOut,
    affinities_out,
    audience_out,
)
from service.http.schemas.questions.audience import AffinitiesParams, AudienceParams
from service.http.schemas.questions.popular import PopularIn
from service.http.schemas.questions.rows import RowsIn
from service.http.schemas.questions.together import TogetherIn, TogetherParams
from service.http.schemas.row_answers import RowsOut, rows_out
from service.http.schemas.scalars import PathId

router = APIRouter(route_class=JsonRoute, tags=["ask"])


@router.post("/v1/popular", responses={200: {"model": AnswerOut}})
async def popular(body: PopularIn, context: Context) -> Response:
    """Rank items by the events of everybody: popular, trending, newest or best rated ones.

    Every event that was acknowledged counts, also right after a restart; forgotten ones do not.
    """
    answer = await context.engine.ready_answers.popular(body.to_query(), context.stages)
    return await context.render(answer_out, answer)


@router.post("/v1/rows", responses={200: {"model": RowsOut}})
async def rows(body: RowsIn, context: Context) -> Response:
    """Make the rows of a home page: no item comes twice, and each row says why it is there.

    Half of a user's rows are due to one item of their history each, chosen with the row's items by
    what the item contributes to their scores, which `explanation` shows. Among them come what is
    trending, what is new in the user's categories, and what they take again. Strangers get what is
    popular, trending and new. A row that would have too few items is left out.
    """
    answer = await context.engine.ready_answers.rows(body.to_query(), context.stages)
    return await context.render(rows_out, answer)


@router.get(
    "/v1/items/{item_id}/together", responses={200: {"model": AnswerOut}, **documented(404)}
)
async def items_together(
    item_id: PathId, params: Annotated[TogetherParams, Query()], context: Context
) -> Response:
    """Rank what users take after an item, or at the same time, more often than by chance.

    Items follow by the trained model's transition counts, or by those of the log where it has
    none; `support` and `lift` are counted in the log. Items of similar content fill the list up,
    with the reason `content`.
    """
    query = params.to_query(item_id)
    answer = await context.engine.ready_answers.together(query, context.stages)
    return await context.render(answer_out, answer)


@router.post(
    "/v1/items/{item_id}/together", responses={200: {"model": AnswerOut}, **documented(404)}
)
async def filtered_items_together(item_id: PathId, body: TogetherIn, context: Context) -> Response:
    """Rank what users take after an item, or at the same time, with a filter and fields."""
    query = body.to_query(item_id)
    answer = await context.engine.ready_answers.together(query, context.stages)
    return await context.render(answer_out, answer)


@router.get(
    "/v1/items/{item_id}/audience", responses={200: {"model": AudienceOut}, **documented(404)}
)
async def item_audience(
    item_id: PathId, params: Annotated[AudienceParams, Query()], context: Context
) -> Response:
    """Rank users for an item, best first, each with the events behind it.

    All users are scored where they are few. Of more, the hundred with most events on the item's
    neighbours are, and `retrieval` is `coarse`.
    """
    query = params.to_query(item_id)
    answer = await context.engine.ready_answers.audience(query, context.stages)
    return await context.render(audience_out, answer)


@router.get("/v1/users/{user_id}/affinities", responses={200: {"model": AffinitiesOut}})
async def user_affinities(
    user_id: PathId, params: Annotated[AffinitiesParams, Query()], context: Context
) -> Response:
    """List the values of a field by the attention that a user's events on them have."""
    query = params.to_query(user_id)
    answer = await context.engine.ready_answers.affinities(query, context.stages)
    return await context.render(affinities_out, answer)
