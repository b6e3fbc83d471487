"""Admission of requests: their queues, their deadline and their number, as pure ASGI middleware."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.errors import DeadlineExceeded, Overloaded
from service.domain.settings import Settings
from service.engine.compose import compute_threads
from service.http.access.access_control import KEY
from service.http.admission.request_kinds import Kind, kind_of
from service.http.limits import is_stream
from service.http.telemetry import Metrics
from service.runtime.work_queue import Turn, WorkQueue

BULK_TURN = "heed.bulk_turn"  # in the scope of a stream: a context that is entered for each batch

_EXEMPT = frozenset({"/", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"})


class Admission:
    """Computes a few requests at once, lets the others wait their turn, ends all at the deadline.

    A request that would be done too late is refused at once (429 with `Retry-After`), and so is one
    beyond `max_in_flight`, of which one key has three quarters. One key may have all places but
    one, so that there is always one for another key. Bulk imports wait for questions.

    Streams have no deadline: they last as long as there is input, in places of `Arrivals`, and each
    of their batches is bulk work. What `is_exempt` picks (health, metrics) always gets in.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics
        threads = compute_threads(settings)
        # One more than can compute, so that none of them waits for a request to be read.
        questions = WorkQueue(threads + 2, threads + 1)
        bulk = WorkQueue(3, 2, after=questions)
        imports = WorkQueue(3, 2, after=questions)
        self._queues = {Kind.QUESTION: questions, Kind.BULK: bulk, Kind.IMPORT: imports}
        self._in_flight = {"requests": 0}
        self._of_keys: Counter[str] = Counter()  # requests in flight
        metrics.deadline.set(settings.deadline)
        places = partial(self._in_flight.__getitem__, "requests")
        metrics.watch_places("requests", settings.max_in_flight, places)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or is_exempt(scope):
            await self._app(scope, receive, send)
        elif is_stream(scope):
            scope[BULK_TURN] = partial(self._queues[Kind.IMPORT].turn, _key_of(scope))
            await self._app(scope, receive, send)
        else:
            await self._serve(kind_of(scope), scope, receive, send)

    async def _serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        most, seconds, key = self._settings.max_in_flight, self._settings.deadline, _key_of(scope)
        of_key = most - most // 4
        if self._in_flight["requests"] >= most or self._of_keys[key] >= of_key:
            self._metrics.count_refusal("requests")
            raise Overloaded(
                f"{of_key} requests of a key are in flight, or {most} of all (HEED_MAX_IN_FLIGHT)."
            )
        timer = asyncio.timeout(seconds if kind.is_urgent else None)
        turn: Turn | None = None
        self._in_flight["requests"] += 1
        self._of_keys[key] += 1
        try:
            async with timer:
                if kind not in self._queues:
                    await self._app(scope, receive, send)
                    return
                ends = time.monotonic() + seconds if kind.is_urgent else math.inf
                async with self._queues[kind].turn(key, ends) as turn:
                    await self._app(scope, receive, send)
        except Overloaded:
            if turn is None:  # refused by the queue
                self._metrics.count_refusal("requests")
            raise
        except TimeoutError as error:
            if not timer.expired():  # a timeout inside the app
                raise
            self._metrics.count_refusal("deadline")
            detail = f"Not done within {seconds:g} s (HEED_DEADLINE)."
            raise DeadlineExceeded(detail) from error
        finally:
            self._in_flight["requests"] -= 1
            self._of_keys[key] -= 1
            if not self._of_keys[key]:
                del self._of_keys[key]  # addresses are without number


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT


def _key_of(scope: Scope) -> str:
    """Return whose request it is: its API key, or its client where keys are off."""
    key = scope.get(KEY)
    if key is not None:
        return str(key.key_id)
    client = scope.get("client")
    return client[0] if client else ""
