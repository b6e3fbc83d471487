"""uvicorn's HTTP/1.1 protocol with bounds on headers, on waiting and on the number of connections.

The parser copies an unfinished header again for every read, and neither it nor uvicorn limits the
size of headers, the time they take, or how long a connection may stay open before its first byte.
Bodies are bounded by `bodies.Bodies`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import defaultdict
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.domain.settings import Settings
from service.http.limits import (
    GRACE,
    Arrivals,
    ClientConnection,
    SlowPlace,
    address_of,
    is_exempt,
)
from service.http.problems import problem
from service.http.scope_keys import CLIENT, CROWDED

BURST = 256  # new connections beyond the bound, until they have been read
_RESERVE = 16  # connections beyond the bound, for health probes, once all others are in work
_SETTLE = 0.05  # seconds in which a new connection is read
_MAX_PIPELINED = 16  # requests that may wait for the answers to those before them


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client connection, closed once it exceeds a limit of the settings.

    While no request is in work, the next header must begin within `idle_timeout` (uvicorn's
    keep-alive timer, here started before the first request too) and be complete within
    `header_timeout` of its first byte. The parser may take `max_header_bytes` until it completes a
    header or yields a piece of a body, which bounds trailers and the extensions of chunks too. A
    header that begins in the middle of a read is counted from the next read on.

    A connection whose header has not arrived after `GRACE` needs a place for slow requests of its
    sender.
    """

    def __init__(
        self, *, settings: Settings, arrivals: Arrivals, crowd: Crowd, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._settings = settings
        self._arrivals = arrivals
        self._crowd = crowd
        self._pending_bytes = 0  # that the parser took since a header's end or a body's piece
        self._slow_place: SlowPlace | None = None
        self.header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the idle timer; beyond the limit, one connection gives way."""
        super().connection_made(transport)
        self.peer = ClientConnection(address_of(self.client))
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._await_header()
        self._crowd.grew(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and the work for the client."""
        self._end_header()
        super().connection_lost(exc)
        self.peer.lose()

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
        if self.header_timer is None and self.is_idle:
            timeout = self._settings.header_timeout
            self.header_timer = self.loop.call_later(
                timeout,
                self._refuse,
                408,
                f"The header took longer than {timeout:g} s to arrive (HEED_HEADER_TIMEOUT).",
            )
            self._await_header()

    def on_headers_complete(self) -> None:
        """Begin a request, and the next header's budget."""
        self._pending_bytes = 0
        self._end_header()
        if len(self.pipeline) == _MAX_PIPELINED:
            raise ValueError("too many requests wait on one connection")  # answered with 400
        super().on_headers_complete()
        scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
        scope[CLIENT] = self.peer
        if self._crowd.is_full(self.connections) and not is_exempt(scope):
            limit = self._crowd.limit
            scope[CROWDED] = f"All {limit} connections are in work (HEED_MAX_CONNECTIONS)."

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body over."""
        self._pending_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self.peer.since = time.monotonic()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """True while no request waits for an answer."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_in_work(self) -> bool:
        """True while a request is being answered, not waiting for its client to send or read."""
        waits = self.peer.is_waiting or self.flow.write_paused
        return not (self.is_idle or waits)

    @property
    def is_new(self) -> bool:
        """True before the first header, within `GRACE` of the beginning."""
        return self.cycle is None and time.monotonic() < self.peer.since + GRACE

    def give_way(self) -> None:
        """Close the connection, and refuse the body that it waits for."""
        self.connections.discard(self)
        if self.peer.is_waiting:
            self.peer.refuse(
                f"All {self._crowd.limit} connections are taken (HEED_MAX_CONNECTIONS). "
                f"{self.peer.sender} holds most of them, and this one is its slowest."
            )
        elif self.transport.get_write_buffer_size():
            # `close` would wait for a client that may never read.
            self.transport.abort()
        else:
            self.transport.close()

    def _await_header(self) -> None:
        if self._slow_place is None:
            sender = self.peer.sender
            self._slow_place = SlowPlace(self._arrivals.slow, sender, self._refuse_slow)

    def _end_header(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None
        if self._slow_place is not None:
            self._slow_place.release()
            self._slow_place = None

    def _refuse_slow(self, reason: str) -> None:
        if self.header_timer is None:  # nothing was sent that could be answered
            self.transport.close()
        else:
            self._refuse(429, reason, {"Retry-After": "1"})

    def _refuse(self, status: int, detail: str, more: dict[str, str] | None = None) -> None:
        """Close the connection, with a problem unless an answer may be half sent."""
        if self.transport.is_closing():
            return
        if self.is_idle:
            phrase = HTTPStatus(status).phrase
            answer = problem(
                {}, status, phrase, detail, headers={"Connection": "close", **(more or {})}
            )
            headers = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
            line = b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())
            self.transport.write(line + headers + b"\r\n" + bytes(answer.body))
        self.transport.close()


class Crowd:
    """The bound on the connections of a worker: beyond it, the largest sender loses some.

    Only connections that wait for their clients give way, the longest wait first, so that neither
    requests in work nor senders of few connections are hit. If none waits, a few new ones are
    accepted beyond the bound, on which health and metrics are answered and all else is refused.
    """

    def __init__(self, limit: int, arrivals: Arrivals) -> None:
        self.limit = limit
        self._arrivals = arrivals
        self._timer: asyncio.TimerHandle | None = None
        self._is_full = False

    def grew(self, newest: LimitedHttpProtocol) -> None:
        """Keep the bound after a new connection, not read yet."""
        connections: set[Any] = newest.connections
        excess = len(connections) - self.limit
        if excess > BURST:
            self._thin(connections)
            if len(connections) > self.limit + BURST:  # none could give way
                newest.give_way()
        elif excess > 0 and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_SETTLE, self._thin, connections)

    def is_full(self, connections: set[Any]) -> bool:
        """True beyond the bound, if no connection could give way."""
        return (
            self._is_full
            and len(connections) > self.limit
            and all(each.is_in_work or each.is_new for each in connections)
        )

    def _thin(self, connections: set[LimitedHttpProtocol]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [each for each in connections if not each.is_in_work]
        waiting.sort(key=lambda each: each.peer.since, reverse=True)  # the longest wait last
        spared = _RESERVE if all(each.is_new for each in waiting) else 0
        held: defaultdict[str, list[LimitedHttpProtocol]] = defaultdict(list)
        for each in waiting:
            held[each.peer.sender].append(each)
        largest = [(-len(group), sender) for sender, group in held.items()]
        heapq.heapify(largest)
        for _ in range(min(len(connections) - self.limit, len(waiting) - spared)):
            _, sender = largest[0]
            self._arrivals.count_closed()
            held[sender].pop().give_way()
            heapq.heapreplace(largest, (-len(held[sender]), sender))
        self._is_full = len(connections) > self.limit
