"""Bounds on the path and the body of a request, as pure ASGI middleware.

Past a bound the answer comes at once (413, 408 or 429 with `Retry-After`), never a hang. A body is
read whole before its request is admitted, so that a slow sender holds a little memory and never one
of the places in which work is done.
"""

from __future__ import annotations

import asyncio
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.errors import Overloaded, TooLarge
from service.domain.settings import Settings
from service.http.access.access_control import KEY, NAMESPACE
from service.http.telemetry import Metrics
from service.http.telemetry.metrics import SERVED

BODY = "heed.body"  # in the scope of every request but streams
ITEMS_PATH = "/v1/items"
STREAM_TYPE = "application/x-ndjson"
MERGE_PATCH_TYPE = "application/merge-patch+json"  # RFC 7396

# What is found inside, and telemetry, outside, counts and logs.
_SHARED = ("route", KEY, NAMESPACE, SERVED)


class Paths:
    """Keeps a slash inside an id apart from the slashes between segments.

    Servers hand the path over decoded, where `/v1/items/a%2Fb` and `/v1/items/a/b` are one. This
    decodes `raw_path` anew but leaves `%2F` and `%25` standing in it, so that routing sees one
    segment; `segment` undoes those two. Bytes that are no UTF-8 become surrogates, which no id may
    hold.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        raw: bytes | None = scope.get("raw_path")
        if raw is None and scope["type"] == "http":  # the server does not tell them apart
            path = scope["path"].replace("%", "%25")
        elif raw is not None and b"%" in raw:
            parts = (unquote_to_bytes(part) for part in raw.partition(b"?")[0].split(b"/"))
            path = "/".join(
                part.decode(errors="surrogateescape").replace("%", "%25").replace("/", "%2F")
                for part in parts
            )
        else:
            await self._app(scope, receive, send)
            return
        # A copy, because the server goes on to log the path of its own.
        inner = {**scope, "path": path}
        try:
            await self._app(inner, receive, send)
        finally:
            for name in _SHARED:
                if name in inner:
                    scope[name] = inner[name]


def segment(part: str) -> str:
    """Decode one segment of a path that `Paths` rewrote."""
    return part.replace("%2F", "/").replace("%25", "%")


class Bodies:
    """Reads the whole body, up to a size and within a time, before anything else happens.

    All bodies that are held at one time share `max_buffered_bytes`, so that many slow senders
    cannot fill the memory either. Streams pass through chunk by chunk, each within that time; their
    reader bounds the lines.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body = settings.max_body_bytes
        self._max_held = settings.max_buffered_bytes
        self._timeout = settings.body_timeout
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif is_stream(scope):
            await self._app(scope, self._timed(receive), send)
        else:
            chunks: list[bytes] = []
            try:
                await self._read(scope, receive, chunks)
                scope[BODY] = b"".join(chunks)
                chunks[:] = [scope[BODY]]  # not held twice
                await self._app(scope, receive, send)
            finally:
                self._held -= sum(map(len, chunks))

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> None:
        """Append the body to `chunks`. Raises `ClientDisconnect` when its sender goes away."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body:
                raise self._too_large()  # before a byte of it is read
        size = 0
        try:
            async with asyncio.timeout(self._timeout):
                async for chunk in Request(scope, receive).stream():
                    size += len(chunk)
                    if size > self._max_body:
                        raise self._too_large()
                    if self._held + len(chunk) > self._max_held:
                        self._metrics.count_refusal("bodies")
                        raise Overloaded("Too many bodies are arriving (HEED_MAX_BUFFERED_BYTES).")
                    self._held += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            raise self._too_slow() from None

    def _timed(self, receive: Receive) -> Receive:
        async def timed() -> Message:
            try:
                async with asyncio.timeout(self._timeout):
                    return await receive()
            except TimeoutError:
                raise self._too_slow() from None

        return timed

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than {self._max_body} bytes (HEED_MAX_BODY_BYTES).")

    def _too_slow(self) -> HTTPException:
        detail = f"The body took longer than {self._timeout:g} s to arrive (HEED_BODY_TIMEOUT)."
        return HTTPException(408, detail, headers={"Connection": "close"})


def is_stream(scope: Scope) -> bool:
    """True for the one request that is read as a stream instead of whole."""
    path = scope["path"].removeprefix(scope["root_path"])
    return scope["method"] == "POST" and path == ITEMS_PATH and media_type(scope) == STREAM_TYPE


def media_type(scope: Scope) -> str:
    """The media type of a request's body, in lower case; empty without one."""
    return Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
