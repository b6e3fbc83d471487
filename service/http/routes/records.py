"""Routes of records: items, one by one or as a stream, events and users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.domain.errors import Crowded, HeedError, Invalid, NotFound
from service.domain.records import Item, parse_json
from service.domain.settings import Settings
from service.engine.highlight import without_markup
from service.http.limits import ITEMS_PATH, is_stream
from service.http.problems import answer, documented, located, sentence
from service.http.routes.context import Context, Json, JsonRoute, PathId
from service.http.routes.record_bodies import (
    AppendedOut,
    EventsIn,
    EventsOut,
    Forgotten,
    ItemIn,
    ItemOut,
    ItemParams,
    ItemPatchIn,
    ItemsIn,
    ItemsOut,
    ItemsPage,
    Merged,
    MergeIn,
    Page,
    Stored,
    StoredLines,
    StoredUpdates,
    UserIn,
    UserOut,
    UsersOut,
    UsersPage,
    convert_rows,
    events_out,
    fields_of,
    item_out,
)
from service.snapshots.live_snapshot import CatalogueRefresh

BATCH = 500
MAX_ERRORS = 100


async def split_lines(
    chunks: AsyncIterator[bytes], longest: int
) -> AsyncIterator[tuple[int, bytes | None]]:
    """Each line with its number from 1, without its newline; None for one that is too long.

    A line beyond `longest` bytes is not kept while the rest of it goes by. The last line needs no
    newline; blank ones are counted and left out.
    """
    number, held, too_long = 1, bytearray(), False
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            held += end
            if too_long or len(held) > longest:
                yield number, None
            elif held.strip():
                yield number, bytes(held)
            number, held, too_long = number + 1, bytearray(), False
        held += rest
        if len(held) > longest:
            too_long = True
            held.clear()
    if too_long:
        yield number, None
    elif held.strip():
        yield number, bytes(held)


@dataclass
class _Import:
    """One stream on its way into the catalogue."""

    catalogue: CatalogueRefresh
    settings: Settings
    stored: int = 0
    failed: int = 0
    errors: list[dict[str, object]] = field(default_factory=list)
    batch: list[tuple[int, Item]] = field(default_factory=list)

    def read(self, number: int, line: bytes | None) -> None:
        """Add a line to the batch, or its error to the errors."""
        if line is None:
            self.fail(number, f"is longer than {self.settings.max_ndjson_line_bytes} bytes")
            return
        try:
            item = ItemIn.model_validate(parse_json(line))
            self.batch.append((number, item.to_item(self.settings.embedding_dim)))
        except orjson.JSONDecodeError as error:
            self.fail(number, f"is not JSON: {error}")
        except ValidationError as error:
            found = error.errors(include_url=False)
            self.fail(number, sentence(located(found, "body"), len(found)))
        except Invalid as error:
            self.fail(number, str(error))

    async def flush(self) -> None:
        """Store the batch. Raises what the store raises, but for `Invalid`."""
        batch, self.batch = self.batch, []
        if not batch:
            return
        try:
            items = [item for _, item in batch]
            self.stored += await self.catalogue.put_items(items)
        except Invalid:
            # A batch is all or nothing; a stream is line by line, so find the one to blame.
            for number, item in batch:
                try:
                    self.stored += await self.catalogue.put_items([item])
                except Invalid as error:
                    self.fail(number, str(error))

    def fail(self, number: int, detail: str) -> None:
        """Count a line out, and say why for the first of them."""
        self.failed += 1
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"line": number, "detail": detail})

    def report(self) -> dict[str, object]:
        """A `StoredLines`."""
        return {"stored": self.stored, "failed": self.failed, "errors": self.errors}


async def store_stream(context: Context) -> Response:
    """Store each line that is an item; answer how many were, and what was wrong with the others.

    Where the store fails the stream ends with that problem, and `stored` says how many items had
    been stored by then; where its client is too slow, all lines that were complete are stored.
    Sending a stream again is harmless: items replace themselves.
    """
    work = _Import(context.engine.live.catalogue, context.settings)
    cut: Exception | None = None
    try:
        try:
            await _read(context, work)
        except (HTTPException, Crowded) as error:  # of the client
            cut = error
        async with context.bulk_turn():
            with context.stages("store"):
                await work.flush()
    except HeedError as error:
        cut = error
    report = work.report()
    return Json(report) if cut is None else answer(context.scope, cut, **report)


async def _read(context: Context, work: _Import) -> None:
    """Read all lines; store every batch except the last."""
    stages = context.stages
    longest = context.settings.max_ndjson_line_bytes
    async for number, line in split_lines(context.stream(), longest):
        with stages("parse"):
            work.read(number, line)
        if len(work.batch) >= BATCH:
            async with context.bulk_turn():  # questions that wait come first
                with stages("store"):
                    await work.flush()
        elif number % BATCH == 0:
            await asyncio.sleep(0)  # wrong lines wait for nothing: let other tasks run


EXAMPLES = 5  # of unknown items

events_router = APIRouter(route_class=JsonRoute, tags=["events"])
users_router = APIRouter(route_class=JsonRoute, tags=["users"])

# -------------------------------------------------------------------------------- events


@events_router.post("/v1/events", responses={200: {"model": AppendedOut}, **documented(409, 507)})
async def append_events(body: EventsIn, context: Context) -> Response:
    """Append events, all of them or none; durable when answered, and seen by the next question.

    An event that was stored before under the same `event_id` is counted as a duplicate; if its body
    differs, the answer is 409 and nothing is stored. Events without an `event_id` are always new.
    Items that the catalogue does not have are counted in `unknown_items`: their events are stored
    too, and count once the catalogue has them.
    """
    dims = context.settings.embedding_dim
    events = await convert_rows(body.events, lambda i, row: row.to_event(dims, f"/events/{i}"))
    with context.stages("store"):
        stored, duplicates = await context.engine.store.append(events)
        answer: dict[str, object] = {"stored": stored, "duplicates": duplicates}
        with suppress(HeedError):  # the events are stored
            unknown = await context.engine.unknown_items(event.item_id for event in events)
            if unknown:
                answer |= {"unknown_items": len(unknown), "unknown_examples": unknown[:EXAMPLES]}
    return Json(answer)


# --------------------------------------------------------------------------------- items


class _StreamRoute(JsonRoute):
    """Reads NDJSON as a stream before FastAPI would read it whole."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if is_stream(request.scope):
                return await store_stream(Context(request.scope, request.receive))
            return await handler(request)

        return handle


items_router = APIRouter(route_class=_StreamRoute, tags=["items"])


@items_router.post(
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


@items_router.get(ITEMS_PATH, responses={200: {"model": ItemsOut}})
async def page_items(page: Annotated[ItemsPage, Query()], context: Context) -> Response:
    """List the items of the catalogue, page by page."""
    with context.stages("store"):
        items, cursor = await context.engine.store.page_items(
            cursor=page.cursor, limit=page.limit, hidden=page.hidden
        )
    if page.plain:
        items = [without_markup(item) for item in items]
    return Json({"items": [item_out(item) for item in items], "cursor": cursor})


@items_router.get("/v1/items/{item_id}", responses={200: {"model": ItemOut}, **documented(404)})
async def get_item(
    item_id: PathId, params: Annotated[ItemParams, Query()], context: Context
) -> Response:
    """Read one item."""
    with context.stages("store"):
        (item,) = await context.engine.store.get_items([item_id])
    if item is None:
        raise NotFound(f"no item {item_id!r}")
    return Json(item_out(without_markup(item) if params.plain else item))


@items_router.patch(
    "/v1/items/{item_id}", responses={200: {"model": ItemOut}, **documented(404, 507)}
)
async def patch_item(item_id: PathId, body: ItemPatchIn, context: Context) -> Response:
    """Change some fields of an item by JSON Merge Patch (RFC 7396), and answer the item.

    Null sets a field to its default, and removes a member of `attributes`, whose objects are
    merged; lists are replaced. The body may also be `application/merge-patch+json`.
    """
    patch = body.to_patch(item_id, context.settings.embedding_dim)
    with context.stages("store"):
        await context.engine.live.catalogue.patch_items([patch], create=False)
    return await get_item(item_id, ItemParams(), context)


@items_router.delete("/v1/items/{item_id}", status_code=204, responses=documented(404, 507))
async def delete_item(item_id: PathId, context: Context) -> Response:
    """Delete one item."""
    with context.stages("store"):
        if not await context.engine.live.catalogue.delete_item(item_id):
            raise NotFound(f"no item {item_id!r}")
    return Response(status_code=204)


# --------------------------------------------------------------------------------- users


@users_router.put("/v1/users/{user_id}", responses={200: {"model": UserOut}, **documented(507)})
async def put_user(user_id: PathId, body: UserIn, context: Context) -> Response:
    """Set a user's profile. Interests become rows of memory beside the history."""
    user = body.to_user(user_id)
    with context.stages("store"):
        await context.engine.store.put_user(user)
    return Json(user)


@users_router.get("/v1/users", responses={200: {"model": UsersOut}})
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
    counted = [fields_of(user, events=n) for user, n in zip(users, counts, strict=True)]
    return Json({"users": counted, "cursor": cursor})


@users_router.get("/v1/users/{user_id}", responses={200: {"model": UserOut}, **documented(404)})
async def get_user(user_id: PathId, context: Context) -> Response:
    """Read a user's profile."""
    with context.stages("store"):
        user = await context.engine.store.get_user(user_id)
    if user is None:
        raise NotFound(f"no user {user_id!r}")
    return Json(user)


@users_router.delete(
    "/v1/users/{user_id}", responses={200: {"model": Forgotten}, **documented(507)}
)
async def forget_user(user_id: PathId, context: Context) -> Response:
    """Delete a user's history and profile; effective in the next request."""
    with context.stages("store"):
        forgotten = await context.engine.store.forget(user_id)
    return Json({"forgotten": forgotten})


@users_router.get("/v1/users/{user_id}/history", responses={200: {"model": EventsOut}})
async def page_history(
    user_id: PathId, page: Annotated[Page, Query()], context: Context
) -> Response:
    """List a user's events, newest first, page by page."""
    with context.stages("store"):
        events, cursor = await context.engine.store.page(
            user_id, cursor=page.cursor, limit=page.limit
        )
    return await context.render(lambda: events_out(events, cursor=cursor), len(events))


@users_router.delete(
    "/v1/users/{user_id}/history/{event_id}", status_code=204, responses=documented(404, 507)
)
async def forget_event(user_id: PathId, event_id: PathId, context: Context) -> Response:
    """Delete one event; effective in the next request."""
    with context.stages("store"):
        if not await context.engine.store.delete_event(user_id, event_id):
            raise NotFound(f"user {user_id!r} has no event {event_id!r}")
    return Response(status_code=204)


@users_router.post(
    "/v1/users/{user_id}/merge", responses={200: {"model": Merged}, **documented(507)}
)
async def merge_users(user_id: PathId, body: MergeIn, context: Context) -> Response:
    """Move the history and profile of another id to this user, as at sign-in."""
    if body.source == user_id:
        raise Invalid("/from", "must be another user than the one in the path")
    with context.stages("store"):
        moved = await context.engine.store.merge(user_id, body.source)
    return Json({"moved": moved})
