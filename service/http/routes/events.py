"""Ingestion of events."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter
from starlette.responses import Response

from service.domain.errors import HeedError
from service.http.problems import documented
from service.http.routes.context import Context, JsonRoute
from service.http.schemas.conversion import convert_rows
from service.http.schemas.rendering import Json
from service.http.schemas.stored import AppendedOut
from service.http.schemas.write import EventsIn

EXAMPLES = 5  # of unknown items

router = APIRouter(route_class=JsonRoute, tags=["events"])


@router.post("/v1/events", responses={200: {"model": AppendedOut}, **documented(409, 507)})
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
