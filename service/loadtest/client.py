"""A small HTTP client that costs little beside what it measures: requests are bytes beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson


class Answer:
    """Status, headers of interest, and body."""

    __slots__ = ("body", "status", "timing")

    def __init__(self) -> None:
        self.status = 0
        self.timing = b""  # of Server-Timing
        self.body = b""

    def json(self) -> Any:
        """The body's value."""
        return orjson.loads(self.body)


@dataclass(slots=True)
class Load:
    """What came of a number of requests."""

    seconds: float = 0.0  # from the first request to the last answer
    latencies: list[float] = field(default_factory=list)  # seconds, in order of completion
    answers: list[Answer] = field(default_factory=list)  # in order of completion

    @property
    def failed(self) -> int:
        """How many were not answered with 200."""
        return sum(answer.status != 200 for answer in self.answers)


def post(
    path: str, body: Any, *, host: str = "127.0.0.1", headers: Sequence[tuple[str, str]] = ()
) -> bytes:
    """A request, ready to be sent."""
    content = orjson.dumps(body)
    more = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("latin-1") + content


class Connection(asyncio.Protocol):
    """One connection that is kept; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._parts: list[bytes] = []
        self._done: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def open(self) -> bool:
        """Whether it was made and neither side has hung up."""
        return self._transport is not None

    async def ask(self, request: bytes) -> Answer:
        """Send a request from `post` and wait for the whole answer.

        Raises:
            ConnectionError: when the server hangs up first.
        """
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        self._answer, self._parts = Answer(), []
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ------------------------------------------------------------------ called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport  # type: ignore[assignment]  # what a Protocol is given

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    # ------------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if name.lower() == b"server-timing":
            self._answer.timing = value

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._answer.status = self._parser.get_status_code()
        self._answer.body = b"".join(self._parts)
        if not self._parser.should_keep_alive():
            self.close()  # as the server is about to
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """So many open connections to a server on this machine."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            stack.callback(connection.close)
            found.append(connection)
        yield found


async def closed_loop(connections: Sequence[Connection], requests: Sequence[bytes]) -> Load:
    """Send all requests; each connection sends its next one when its last was answered."""
    load = Load()
    waiting = iter(requests)

    async def work(connection: Connection) -> None:
        for request in waiting:
            started = time.perf_counter()
            answer = await connection.ask(request)
            load.latencies.append(time.perf_counter() - started)
            load.answers.append(answer)

    started = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    load.seconds = time.perf_counter() - started
    return load
