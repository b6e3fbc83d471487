"""Profiles and histories of users, and their deletion."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.domain.errors import Invalid, NotFound
from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.base import Page, UsersPage
from service.http.schemas.rendering import Json, fields_out
from service.http.schemas.scalars import PathId
from service.http.schemas.stored import (
    EventsOut,
    Forgotten,
    Merged,
    UserOut,
    UsersOut,
    events_out,
)
from service.http.schemas.write import MergeIn, UserIn

router = APIRouter(route_class=JsonRoute, tags=["users"])


@router.put("/v1/users/{user_id}", responses={200: {"model": UserOut}, **documented(507)})
async def put_user(user_id: PathId, body: UserIn, context: Context) -> Response:
    """Set a user's profile. Interests become rows of memory beside the history."""
    user = body.to_user(user_id)
    with context.stages("store"):
        await context.engine.store.put_user(user)
    return Json(user)


@router.get("/v1/users", responses={200: {"model": UsersOut}})
async def page_users(page: Annotated[UsersPage, Query()], context: Context) -> Response:
    """List the users with events or a profile, page by page."""
    store = context.engine.store
    with context.stages("store"):
        users, cursor = await store.page_users(
            cursor=page.cursor, limit=page.limit, prefix=page.prefix
        )
        if not page.counts:
            return Json({"users": users, "cursor": cursor})
        counts = await store.event_counts([user.user_id for user in users])
    counted = [fields_out(user, events=n) for user, n in zip(users, counts, strict=True)]
    return Json({"users": counted, "cursor": cursor})


@router.get("/v1/users/{user_id}", responses={200: {"model": UserOut}, **documented(404)})
async def get_user(user_id: PathId, context: Context) -> Response:
    """Read a user's profile."""
    with context.stages("store"):
        user = await context.engine.store.get_user(user_id)
    if user is None:
        raise NotFound(f"no user {user_id!r}")
    return Json(user)


@router.delete("/v1/users/{user_id}", responses={200: {"model": Forgotten}, **documented(507)})
async def forget_user(user_id: PathId, context: Context) -> Response:
    """Delete a user's history and profile; effective in the next request."""
    with context.stages("store"):
        forgotten = await context.engine.store.forget(user_id)
    return Json({"forgotten": forgotten})


@router.get("/v1/users/{user_id}/history", responses={200: {"model": EventsOut}})
async def page_history(
    user_id: PathId, page: Annotated[Page, Query()], context: Context
) -> Response:
    """List a user's events, newest first, page by page."""
    with context.stages("store"):
        events, cursor = await context.engine.store.page(
            user_id, cursor=page.cursor, limit=page.limit
        )
    return await context.render(partial(events_out, cursor=cursor), events, len(events))


@router.delete(
    "/v1/users/{user_id}/history/{event_id}", status_code=204, responses=documented(404, 507)
)
async def forget_event(user_id: PathId, event_id: PathId, context: Context) -> Response:
    """Delete one event; effective in the next request."""
    with context.stages("store"):
        if not await context.engine.store.delete_event(user_id, event_id):
            raise NotFound(f"user {user_id!r} has no event {event_id!r}")
    return Response(status_code=204)


@router.post("/v1/users/{user_id}/merge", responses={200: {"model": Merged}, **documented(507)})
async def merge_users(user_id: PathId, body: MergeIn, context: Context) -> Response:
    """Move the history and profile of another id to this user, as at sign-in."""
    if body.source == user_id:
        raise Invalid("/from", "must be another user than the one in the path")
    with context.stages("store"):
        moved = await context.engine.store.merge(user_id, body.source)
    return Json({"moved": moved})
