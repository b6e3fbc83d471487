"""Admission of requests by cost and priority, and their deadline, as pure ASGI middleware.

A request beyond a bound is refused at once (429 with `Retry-After`), never left to hang.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.errors import DeadlineExceeded, Overloaded
from service.domain.settings import Settings
from service.engine.compose import compute_threads
from service.http.admission.request_costs import Priority, RequestCosts, Work, classify
from service.http.admission.work_queue import Lane, Turn, WorkQueue
from service.http.limits import is_stream
from service.http.telemetry import Metrics

BULK_TURN = "heed.bulk_turn"  # in the scope of a stream: a context that is entered for each batch

_EXEMPT = frozenset({"/", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"})
_PATIENCE = 0.5  # of the deadline: what is expected to take longer is refused
_BULK_SLOTS = 2
_BATCH = Work("stream", 1, Priority.IMPORT)


class Admission:
    """Computes the most urgent requests first, refuses the next at once, ends all at the deadline.

    Each request has an expected cost, which is a mean of measured ones. Few run at once, the others
    wait in a `WorkQueue`: questions before bulk imports. A request that would wait too long for its
    deadline is refused instead of computed in vain, and so is one beyond `max_in_flight`. A refusal
    costs next to nothing, so a service at three times its load still does what it can.

    Streams have places of their own and no deadline: they last as long as there is input, and each
    of their batches is bulk work. What `is_exempt` picks (health, metrics) always gets in.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._costs = RequestCosts()
        most = settings.max_in_flight
        self._queue = WorkQueue(
            [  # in the order of `Priority`
                # One more than can compute, so that none of them waits for a request to be read.
                Lane(min(most, 1 + compute_threads(settings))),
                Lane(most),
                Lane(most),
                Lane(min(most, _BULK_SLOTS), yields=True),
                Lane(min(most, _BULK_SLOTS), yields=True),
            ]
        )
        self._in_flight = {"requests": 0, "streams": 0}
        metrics.deadline.set(settings.deadline)
        for kind, limit in (("requests", most), ("streams", settings.max_streams)):
            metrics.watch_places(kind, limit, partial(self._in_flight.__getitem__, kind))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or is_exempt(scope):
            await self._app(scope, receive, send)
        elif is_stream(scope):
            most = self._settings.max_streams
            if self._in_flight["streams"] >= most:
                self._metrics.count_refusal("streams")
                raise Overloaded(f"{most} streams are being read (HEED_MAX_STREAMS).")
            scope[BULK_TURN] = partial(self._turn, _BATCH)
            self._in_flight["streams"] += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._in_flight["streams"] -= 1
        else:
            await self._serve(classify(scope), scope, receive, send)

    async def _serve(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        if self._in_flight["requests"] >= settings.max_in_flight:
            self._metrics.count_refusal("requests")
            raise Overloaded(
                f"{settings.max_in_flight} requests are in flight (HEED_MAX_IN_FLIGHT).",
                self._queue.expected_wait(work.priority),
            )
        timer = asyncio.timeout(settings.deadline if work.is_urgent else None)
        self._in_flight["requests"] += 1
        try:
            async with timer:
                await self._compute(work, scope, receive, send)
        except TimeoutError as error:
            if not timer.expired():  # a timeout inside the app
                raise
            self._metrics.count_refusal("deadline")
            detail = f"Not done within {settings.deadline:g} s (HEED_DEADLINE)."
            raise DeadlineExceeded(detail) from error
        finally:
            self._in_flight["requests"] -= 1

    async def _compute(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request in its turn, and learn what its kind costs."""
        status = 0  # until an answer begins
        turn: Turn | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            async with self._turn(work) as turn:
                await self._app(scope, receive, watch)
        except Overloaded:
            if turn is None:  # refused by the queue
                self._metrics.count_refusal("requests")
            raise
        finally:
            # A request that is wrong costs less than its kind; one that was cut off, more than it
            # had attained by then.
            if turn is not None and (
                200 <= status < 300 or (status == 0 and turn.attained > turn.cost)
            ):
                self._costs.observe(work, turn.attained)

    def _turn(self, work: Work) -> AbstractAsyncContextManager[Turn]:
        patience = self._settings.deadline * _PATIENCE if work.is_urgent else math.inf
        return self._queue.turn(work.priority, self._costs.expected(work), patience)


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT
