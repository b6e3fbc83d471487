"""A minimal HTTP/1.1 client in a closed loop: each connection asks again when it was answered.

Requests are encoded before a measurement. The client's own time is part of every latency: that of
aiohttp, which `heed loadtest` uses, would be a tenth of the quickest answers that are compared.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import uvloop

from service.domain.errors import Unavailable

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Answer(NamedTuple):
    """Status and body of a response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return orjson.loads(self.body)


class Connection(NamedTuple):
    """A keep-alive connection with at most one request in flight."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, request: bytes) -> Answer:
        """Send a request of `encode_post` and return the complete response.

        Raises:
            asyncio.IncompleteReadError: when the server closes the connection first.
        """
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await self.reader.readexactly(int(length[1])) if length else b""
        return Answer(int(head[9:12]), body)


@dataclass(slots=True)
class Load:
    """Responses of a number of requests, in order of completion."""

    seconds: float = 0.0  # from the first request to the last response
    latencies: list[float] = field(default_factory=list)  # seconds
    answers: list[Answer] = field(default_factory=list)

    def check(self, who: str = "the server") -> None:
        """Raise Unavailable if a response has another status than 200."""
        for answer in self.answers:
            if answer.status != 200:
                raise Unavailable(f"{who} answered {answer.status}: {answer.body[:300]!r}")


def encode_post(path: str, body: Any) -> bytes:
    """Encode a POST request with a JSON body."""
    content = orjson.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("latin-1") + content


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Open a number of connections to a server on this machine."""
    connections = [
        Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(count)
    ]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.writer.close()


async def closed_loop(connections: Sequence[Connection], requests: Sequence[bytes]) -> Load:
    """Send all requests over these connections."""
    load = Load()
    waiting = iter(requests)

    async def work(connection: Connection) -> None:
        for request in waiting:
            started = time.perf_counter()
            answer = await connection.send(request)
            load.latencies.append(time.perf_counter() - started)
            load.answers.append(answer)

    started = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    load.seconds = time.perf_counter() - started
    return load


def ask(port: int, requests: Sequence[bytes], connections: int = 1) -> Load:
    """Send requests in a closed loop. Raises Unavailable if one is not answered with 200."""

    async def send() -> Load:
        async with connected(port, connections) as opened:
            return await closed_loop(opened, requests)

    load: Load = uvloop.run(send())
    load.check()
    return load
