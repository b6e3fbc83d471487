"""uvicorn's HTTP/1.1 protocol with bounds on headers, on waiting and on the number of connections.

The parser copies an unfinished header anew for every read, and neither it nor uvicorn limits the
size of headers, the time they take, or how long a connection may stay open before its first byte.
Bodies are bounded by `limits.Bodies`.
"""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.domain.settings import Settings
from service.http.clients.disconnects import CLIENT, ClientConnection
from service.http.problems import problem

_MAX_PIPELINED = 16  # requests that may wait for the answers to those before them


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client connection, closed once it exceeds a limit of the settings.

    While no request is in work, the next header must begin within `idle_timeout` (uvicorn's
    keep-alive timer, here started before the first request too) and be complete within
    `header_timeout` of its first byte. The parser may take `max_header_bytes` until it completes a
    header or yields a piece of a body, which bounds trailers and the extensions of chunks too. A
    header that begins in the middle of a read is counted from the next read on.
    """

    def __init__(self, *, settings: Settings, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._pending_bytes = 0  # that the parser took since a header's end or a body's piece
        self.header_timer: asyncio.TimerHandle | None = None
        self._client = ClientConnection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the idle timer; at the limit of connections, close an idle one or this one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if len(self.connections) > self._settings.max_connections:
            # The longest idle one, or this one if all others are in work.
            closed = min(self.connections, key=lambda each: (_closes_at(each), each is self))
            # Not `close`, which waits for a client that may never read what was sent.
            closed.transport.abort()
            self.connections.discard(closed)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and what is computed for the client."""
        self._stop_header_timer()
        super().connection_lost(exc)
        self._client.lose()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, piece by piece where there are more bytes than may be pending."""
        limit = self._settings.max_header_bytes
        while data and not self.transport.is_closing():
            room = limit - self._pending_bytes
            piece, data = data[:room], data[room:]
            self._pending_bytes += len(piece)  # which the parser's callbacks set to 0
            super().data_received(piece)
            if self._pending_bytes >= limit:
                self._refuse(
                    431, f"The header is larger than {limit} bytes (HEED_MAX_HEADER_BYTES)."
                )
        if self.header_timer is None and _is_idle(self):
            timeout = self._settings.header_timeout
            self.header_timer = self.loop.call_later(
                timeout,
                self._refuse,
                408,
                f"The header took longer than {timeout:g} s to arrive (HEED_HEADER_TIMEOUT).",
            )

    def on_headers_complete(self) -> None:
        """Begin a request, and the next header's budget."""
        self._pending_bytes = 0
        self._stop_header_timer()
        if len(self.pipeline) == _MAX_PIPELINED:
            raise ValueError("too many requests wait on one connection")  # answered with 400
        super().on_headers_complete()
        self.cycle.scope[CLIENT] = self._client  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body over."""
        self._pending_bytes = 0
        super().on_body(body)

    def _stop_header_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def _refuse(self, status: int, detail: str) -> None:
        """Close the connection, with a problem unless an answer may be half sent."""
        if self.transport.is_closing():
            return
        if _is_idle(self):
            phrase = HTTPStatus(status).phrase
            answer = problem({}, status, phrase, detail, headers={"Connection": "close"})
            headers = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
            line = b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
            self.transport.write(line + headers + b"\r\n" + bytes(answer.body))
        self.transport.close()


def _is_idle(connection: Any) -> bool:
    """True while no request of the connection waits for its answer."""
    return connection.cycle is None or connection.cycle.response_complete


def _closes_at(connection: Any) -> float:
    """The time, by the loop's clock, at which the connection is closed unless it makes progress."""
    if not _is_idle(connection):
        return math.inf
    timer = connection.header_timer or connection.timeout_keep_alive_task
    return timer.when() if timer else 0.0
