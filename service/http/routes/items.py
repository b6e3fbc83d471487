"""Items of the catalogue: write, read, delete, and similar items."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from service.domain.errors import NotFound
from service.engine.highlight import without_markup
from service.http.limits import ITEMS_PATH, is_stream
from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.routes.streams import store_stream
from service.http.schemas.answers import AnswerOut, answer_out
from service.http.schemas.base import ItemEventsParams, ItemParams, ItemsPage
from service.http.schemas.conversion import convert_rows
from service.http.schemas.questions.similar import SimilarIn, SimilarParams
from service.http.schemas.rendering import Json
from service.http.schemas.scalars import PathId
from service.http.schemas.stored import (
    ItemEventsOut,
    ItemOut,
    ItemsOut,
    Stored,
    StoredLines,
    StoredUpdates,
    item_events_out,
    item_out,
)
from service.http.schemas.write import ItemPatchIn, ItemsIn


class _StreamRoute(JsonRoute):
    """Reads NDJSON as a stream before FastAPI would read it whole."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if is_stream(request.scope):
                return await store_stream(Context(request.scope, request.receive))
            return await handler(request)

        return handle


router = APIRouter(route_class=_StreamRoute, tags=["items"])


@router.post(
    ITEMS_PATH,
    # A client tries these in their order, and each of the first two has all members of the last.
    responses={200: {"model": StoredLines | StoredUpdates | Stored}, **documented(507)},
)
async def put_items(body: ItemsIn, context: Context) -> Response:
    """Insert or replace items: at most 1,000 as JSON, all of them or none.

    With `update`, only the fields that each has are changed: a change of stock sends the stock
    alone. An item that is not in the catalogue is created with these, and named in `created`. As
    `application/x-ndjson`, one item on each line, any number of lines: each is stored or named in
    `errors`, never a part of it.
    """
    dims, catalogue = context.settings.embedding_dim, context.engine.live.catalogue
    if body.update:
        patches = await convert_rows(
            body.items, lambda i, row: row.to_patch(row.item_id, dims, f"/items/{i}")
        )
        with context.stages("store"):
            updates = await catalogue.patch_items(patches)
        return Json({"stored": updates.stored, "created": updates.created})
    items = await convert_rows(body.items, lambda i, row: row.to_item(dims, f"/items/{i}"))
    with context.stages("store"):
        stored = await catalogue.put_items(items)
    return Json({"stored": stored})


@router.get(ITEMS_PATH, responses={200: {"model": ItemsOut}})
async def page_items(page: Annotated[ItemsPage, Query()], context: Context) -> Response:
    """List the items of the catalogue, page by page."""
    with context.stages("store"):
        items, cursor = await context.engine.store.page_items(
            cursor=page.cursor, limit=page.limit, hidden=page.hidden
        )
    if page.plain:
        items = [without_markup(item) for item in items]
    return Json({"items": [item_out(item) for item in items], "cursor": cursor})


@router.get("/v1/items/{item_id}", responses={200: {"model": ItemOut}, **documented(404)})
async def get_item(
    item_id: PathId, params: Annotated[ItemParams, Query()], context: Context
) -> Response:
    """Read one item."""
    with context.stages("store"):
        (item,) = await context.engine.store.get_items([item_id])
    if item is None:
        raise NotFound(f"no item {item_id!r}")
    return Json(item_out(without_markup(item) if params.plain else item))


@router.patch("/v1/items/{item_id}", responses={200: {"model": ItemOut}, **documented(404, 507)})
async def patch_item(item_id: PathId, body: ItemPatchIn, context: Context) -> Response:
    """Change some fields of an item by JSON Merge Patch (RFC 7396), and answer the item.

    Null sets a field to its default, and removes a member of `attributes`, whose objects are
    merged; lists are replaced. The body may also be `application/merge-patch+json`.
    """
    patch = body.to_patch(item_id, context.settings.embedding_dim)
    with context.stages("store"):
        await context.engine.live.catalogue.patch_items([patch], create=False)
    return await get_item(item_id, ItemParams(), context)


@router.delete("/v1/items/{item_id}", status_code=204, responses=documented(404, 507))
async def delete_item(item_id: PathId, context: Context) -> Response:
    """Delete one item."""
    with context.stages("store"):
        if not await context.engine.live.catalogue.delete_item(item_id):
            raise NotFound(f"no item {item_id!r}")
    return Response(status_code=204)


@router.get(
    "/v1/items/{item_id}/events", responses={200: {"model": ItemEventsOut}, **documented(404)}
)
async def item_events(
    item_id: PathId, params: Annotated[ItemEventsParams, Query()], context: Context
) -> Response:
    """List the newest events of an item, of all users."""
    answer = await context.engine.ready_answers.item_events(item_id, params.limit, context.stages)
    return await context.render(item_events_out, answer, len(answer.events))


@router.get("/v1/items/{item_id}/similar", responses={200: {"model": AnswerOut}, **documented(404)})
async def similar_items(
    item_id: PathId,
    params: Annotated[SimilarParams, Query()],
    context: Context,
) -> Response:
    """Rank items by their similarity to one, in their texts and in the trained space.

    Each item has a key in both spaces, and one softmax weighs all keys: `spaces` says how near each
    item is in either, and which share of its weight that holds.
    """
    answer = await context.engine.answers.similar(params.to_query(item_id), context.stages)
    return await context.render(answer_out, answer)


@router.post(
    "/v1/items/{item_id}/similar", responses={200: {"model": AnswerOut}, **documented(404)}
)
async def filtered_similar_items(item_id: PathId, body: SimilarIn, context: Context) -> Response:
    """Rank items by their similarity to one, with a filter, facets and fields in the body."""
    answer = await context.engine.answers.similar(body.to_query(item_id), context.stages)
    return await context.render(answer_out, answer)
