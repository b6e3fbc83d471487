"""Admission of requests: their queues, their deadline and their number, as pure ASGI middleware."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.errors import DeadlineExceeded, Overloaded
from service.domain.settings import Settings
from service.engine.compose import compute_threads
from service.http.access import Kind
from service.http.bodies import Places, is_stream, sender_of
from service.http.scope_keys import BODY, BULK_TURN, OPENING, ROW
from service.http.telemetry import Metrics
from service.runtime.work_queue import Turn, WorkQueue

MAX_SMALL_WRITE = 50  # events or items of a request that is no bulk import

_EXEMPT = frozenset({"/health/live", "/health/ready", "/metrics"})
_SMALL = {Kind.BULK: Kind.LIGHT, Kind.IMPORT: Kind.CATALOGUE}  # with few rows in the body


class Admission:
    """Computes a few requests at once, lets the others wait their turn, ends all at the deadline.

    A request that would miss its deadline is refused at once (429 with `Retry-After`), as is one
    beyond `max_in_flight`; one key may have three quarters of these. One key may have all places
    but one, so that another key always finds a place. Bulk imports wait for questions.

    Streams have no deadline: they last as long as there is input, in places of `Arrivals`, and each
    of their batches is bulk work. What `is_exempt` picks (health, metrics) always gets in.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        threads = compute_threads(settings)
        # More places than threads, so that no thread waits for a request to be read.
        questions = WorkQueue(threads + 2, threads + 1)
        bulk = WorkQueue(3, 2, after=questions)
        imports = WorkQueue(3, 2, after=questions)
        self._queues = {Kind.QUESTION: questions, Kind.BULK: bulk, Kind.IMPORT: imports}
        most = settings.max_in_flight
        self._in_flight = Places(
            most,
            most - most // 4,
            partial(metrics.count_refusal, "requests"),
            kind="requests in flight",
            setting="HEED_MAX_IN_FLIGHT",
        )
        metrics.deadline.set(settings.deadline)
        metrics.watch_places("requests", most, lambda: self._in_flight.taken)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_exempt(scope):
            await self._app(scope, receive, send)
        elif is_stream(scope):
            scope[BULK_TURN] = partial(self._queues[Kind.IMPORT].turn, sender_of(scope))
            await self._app(scope, receive, send)
        else:
            await self._serve(kind_of(scope), scope, receive, send)

    async def _serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        seconds, sender = self._settings.deadline, sender_of(scope)
        self._in_flight.take(sender)
        timer = asyncio.timeout(seconds if kind.is_urgent else None)
        turn: Turn | None = None
        try:
            async with timer:
                if kind not in self._queues:
                    await self._app(scope, receive, send)
                    return
                ends = time.monotonic() + seconds if kind.is_urgent else math.inf
                async with self._queues[kind].turn(sender, ends) as turn:
                    await self._app(scope, receive, send)
        except Overloaded:
            if turn is None and kind in self._queues:  # refused by the queue
                self._metrics.count_refusal("requests")
            raise
        except (TimeoutError, DeadlineExceeded) as error:  # the latter from a computing thread
            if isinstance(error, TimeoutError) and not timer.expired():  # inside the app
                raise
            self._metrics.count_refusal("deadline")
            detail = f"Not done within {seconds:g} s (HEED_DEADLINE)."
            if (name := scope.get(OPENING)) is not None:
                detail = f"The namespace {name!r} is being opened; send the request again. {detail}"
            raise DeadlineExceeded(detail) from error
        finally:
            self._in_flight.give_back(sender)


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT


def kind_of(scope: Scope) -> Kind:
    """Return the kind of a request, from the row of its route and the rows in its body."""
    kind = Kind.LIGHT if scope[ROW] is None else scope[ROW].kind
    return _SMALL[kind] if kind in _SMALL and not _is_bulk(scope.get(BODY, b"")) else kind


def _is_bulk(body: bytes) -> bool:
    rows = body.count(b'"item_id"')
    if b"\\u" in body:  # names may be written with escapes: every object may be a row
        rows = max(rows, body.count(b"{") - 1)
    return rows > MAX_SMALL_WRITE
