"""Admission of requests, and their deadline, as pure ASGI middleware.

A request beyond a bound is refused at once (429 with `Retry-After`), never left to hang.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from service.domain.errors import DeadlineExceeded, Overloaded
from service.domain.settings import Settings
from service.http.limits import is_stream

_EXEMPT = frozenset({"/", "/health/live", "/health/ready", "/metrics", "/docs", "/openapi.json"})


class Admission:
    """Lets so many requests in at once, refuses the next at once, and ends them at the deadline.

    A refusal costs next to nothing, so a service at three times its load still does what it can.
    Streams have places of their own and no deadline: they last as long as there is input. What
    `is_unhurried` picks has a place like any other, and no deadline. What `is_exempt` picks
    (health, metrics) always gets in.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._requests = asyncio.Semaphore(settings.max_in_flight)
        self._streams = asyncio.Semaphore(settings.max_streams)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or is_exempt(scope):
            await self._app(scope, receive, send)
            return
        settings = self._settings
        stream = is_stream(scope)
        if stream and self._streams.locked():
            raise Overloaded(f"{settings.max_streams} streams are being read (HEED_MAX_STREAMS).")
        if not stream and self._requests.locked():
            raise Overloaded(
                f"{settings.max_in_flight} requests are in flight (HEED_MAX_IN_FLIGHT)."
            )
        timer = asyncio.timeout(None if stream or is_unhurried(scope) else settings.deadline)
        try:
            async with self._streams if stream else self._requests, timer:
                await self._app(scope, receive, send)
        except TimeoutError as error:
            if not timer.expired():  # a timeout inside the app
                raise
            detail = f"Not done within {settings.deadline:g} s (HEED_DEADLINE)."
            raise DeadlineExceeded(detail) from error


def is_exempt(scope: Scope) -> bool:
    """True for what must answer also when the service is full: it costs nothing."""
    return scope["path"].removeprefix(scope["root_path"]) in _EXEMPT


def is_unhurried(scope: Scope) -> bool:
    """True for requests whose work goes on without them, so that a deadline would say 503 of it.

    `POST /v1/models/{version}/activate` reads every byte of a model, and answers before it serves.
    Writes of items answer once the items are served: a bulk import waits, so that searches do not.
    """
    parts = scope["path"].removeprefix(scope["root_path"]).split("/")
    match scope["method"], parts:
        case "POST", ["", "v1", "models", _, "activate"]:
            return True
        case ("POST", ["", "v1", "items"]) | ("DELETE" | "PATCH", ["", "v1", "items", _]):
            return True
    return False
