"""A minimal HTTP/1.1 client whose requests are encoded before the measurement starts.

The client's own processor time is part of every latency: 0.01 ms a request here, 0.12 ms with
aiohttp, which `heed loadtest` uses. Of the smallest answers that benchmarks compare it would be a
tenth.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import orjson


class Response:
    """Status, Server-Timing header and body."""

    __slots__ = ("body", "server_timing", "status")

    def __init__(self) -> None:
        self.status = 0
        self.server_timing = b""
        self.body = b""

    def json(self) -> Any:
        """Decode the body."""
        return orjson.loads(self.body)


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = Response()
        self._body: list[bytes] = []
        self._done: asyncio.Future[Response] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed the connection."""
        return self._transport is not None

    async def send(self, request: bytes) -> Response:
        """Send a request from `encode_post` and return the complete response.

        Raises:
            ConnectionError: when the server closes the connection first.
        """
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._response, self._body = Response(), []
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Close the connection; a response in flight is lost."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport  # type: ignore[assignment]  # a Protocol gets a Transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    # ------------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if name.lower() == b"server-timing":
            self._response.server_timing = value

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._response.status = self._parser.get_status_code()
        self._response.body = b"".join(self._body)
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)


def encode_post(path: str, body: Any) -> bytes:
    """Encode a POST request with a JSON body."""
    content = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("latin-1") + content
