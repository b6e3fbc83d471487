"""Bounds on the path and the body of a request, as pure ASGI middleware.

Past a bound the answer comes at once (413, 408 or 429 with `Retry-After`), never a hang. A body is
read whole before its request is admitted, so that a slow sender holds a little memory and never one
of the places in which work is done.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.domain.errors import Crowded, TooLarge
from service.domain.settings import Settings
from service.http.arrivals import Arrivals, SlowPlace, sender_of
from service.http.clients.disconnects import ClientConnection, connection_of

BODY = "heed.body"  # in the scope of every request but streams
CROWDED = "heed.crowded"  # in the scope once all connections are in work: why it is refused
MIN_STREAM_RATE = 1024  # bytes a second, far below what any link carries
ITEMS_PATH = "/v1/items"
STREAM_TYPE = "application/x-ndjson"
_NOT_GZIP = HTTPException(400, "The body is no whole gzip, as its Content-Encoding says.")
MERGE_PATCH_TYPE = "application/merge-patch+json"  # RFC 7396


class Paths:
    """The outermost middleware: keeps a slash inside an id apart from the slashes between segments.

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
        await self._app({**scope, "path": path}, receive, send)


def segment(part: str) -> str:
    """Decode one segment of a path that `Paths` rewrote."""
    return part.replace("%2F", "/").replace("%25", "%")


class Bodies:
    """Reads the whole body, up to a size and within a time, before anything else happens.

    All bodies that are held at one time share `max_buffered_bytes`, so that many slow senders
    cannot fill the memory either. Streams pass through chunk by chunk, each within that time, and
    not slower than `MIN_STREAM_RATE`; their reader bounds the lines. One sender has at most its
    share of the bytes, of the streams and of the slow bodies. A gzip body, also one of lines, is
    read whole and inflated, and its size is bounded before and after.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, arrivals: Arrivals) -> None:
        self._app = app
        self._arrivals = arrivals
        self._max_body = settings.max_body_bytes
        self._timeout = settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if CROWDED in scope:
            self._arrivals.count_closed()
            raise Crowded(scope[CROWDED])
        connection, sender = connection_of(scope), sender_of(scope)
        connection.sender = sender
        if is_stream(scope) and not _is_compressed(scope):
            self._arrivals.streams.take(sender)
            try:
                await self._app(scope, self._paced(receive, connection), send)
            finally:
                self._arrivals.streams.give_back(sender)
        else:
            chunks: list[bytes] = []
            try:
                await self._read(scope, receive, connection, chunks)
                chunks[:] = [b"".join(chunks)]  # not held twice
                if _is_compressed(scope):
                    chunks.append(await asyncio.to_thread(self._inflated, chunks[0]))
                    self._arrivals.buffered.take(sender, len(chunks[1]))
                scope[BODY] = chunks[-1]
                if is_stream(scope):
                    receive = _replayed(chunks[-1], receive)
                await self._app(scope, receive, send)
            except TooLarge as error:
                if is_stream(scope):
                    error.detail += " Without Content-Encoding, a stream has no such limit."
                raise
            finally:
                self._arrivals.buffered.give_back(sender, sum(map(len, chunks)))

    async def _read(
        self, scope: Scope, receive: Receive, connection: ClientConnection, chunks: list[bytes]
    ) -> None:
        """Append the body to `chunks`. Raises `ClientDisconnect` when its sender goes away."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body:
                raise self._too_large()  # before a byte of it is read
        size = 0
        sender = connection.sender
        place = SlowPlace(self._arrivals.slow, sender, connection.refuse)
        try:
            async with asyncio.timeout(self._timeout) as timer:
                with connection.waits(timer):
                    async for chunk in Request(scope, receive).stream():
                        size += len(chunk)
                        if size > self._max_body:
                            raise self._too_large()
                        self._arrivals.buffered.take(sender, len(chunk))
                        chunks.append(chunk)
        except TimeoutError:
            raise self._ended(connection) from None
        finally:
            place.release()

    def _paced(self, receive: Receive, connection: ClientConnection) -> Receive:
        """Wrap the `receive` of a stream; only waits for its client lower its rate."""
        waited, size = 0.0, 0

        async def paced() -> Message:
            nonlocal waited, size
            begun = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout) as timer:
                    with connection.waits(timer):
                        message = await receive()
            except TimeoutError:
                raise self._ended(connection) from None
            waited += time.monotonic() - begun
            size += len(message.get("body", b""))
            if waited >= self._timeout and message.get("more_body"):
                if size < MIN_STREAM_RATE * waited:
                    raise _too_slow(
                        f"The stream sent {size} bytes in {waited:.3g} s; its client must send at "
                        f"least {MIN_STREAM_RATE} a second, over each HEED_BODY_TIMEOUT."
                    )
                waited, size = 0.0, 0
            return message

        return paced

    def _ended(self, connection: ClientConnection) -> Exception:
        """Say why a wait for the client ended: refused, or timed out."""
        if connection.refusal:
            return Crowded(connection.refusal)
        detail = f"The body took longer than {self._timeout:g} s to arrive (HEED_BODY_TIMEOUT)."
        return _too_slow(detail)

    def _inflated(self, body: bytes) -> bytes:
        """Return the bytes of a gzip body. Raises `TooLarge` beyond the size of any body."""
        inflated, rest = b"", body
        while rest:  # gzip may have several members
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            try:
                inflated += member.decompress(rest, self._max_body + 1 - len(inflated))
            except zlib.error:
                raise _NOT_GZIP from None
            if len(inflated) > self._max_body:
                raise self._too_large()
            if not member.eof:
                raise _NOT_GZIP
            rest = member.unused_data
        return inflated

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is larger than {self._max_body} bytes (HEED_MAX_BODY_BYTES).")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _too_slow(detail: str) -> HTTPException:
    return HTTPException(408, detail, headers={"Connection": "close"})


def _unread(detail: str) -> HTTPException:
    return HTTPException(415, detail, headers={"Accept-Encoding": "gzip", "Connection": "close"})


def _is_compressed(scope: Scope) -> bool:
    """True for a gzip body. Raises HTTPException (415) for any other encoding."""
    encoding = ",".join(Headers(scope=scope).getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise _unread(f"Content-Encoding may be gzip, not {encoding[:50]}.")
    return encoding.endswith("gzip")


def is_stream(scope: Scope) -> bool:
    """True for the one request that is read as a stream instead of whole."""
    path = scope["path"].removeprefix(scope["root_path"])
    return scope["method"] == "POST" and path == ITEMS_PATH and media_type(scope) == STREAM_TYPE


def media_type(scope: Scope) -> str:
    """The media type of a request's body, in lower case; empty without one."""
    return Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
