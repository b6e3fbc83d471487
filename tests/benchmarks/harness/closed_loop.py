"""A closed loop: each connection sends its next request when its last one was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tests.benchmarks.harness.http_client import Connection, Response


@dataclass(slots=True)
class Load:
    """Responses of a number of requests, in order of completion."""

    seconds: float = 0.0  # from the first request to the last response
    latencies: list[float] = field(default_factory=list)  # seconds
    answers: list[Response] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Number of requests that were not answered with 200."""
        return sum(answer.status != 200 for answer in self.answers)


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Open a number of connections to a server on this machine."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(count):
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            stack.callback(connection.close)
            connections.append(connection)
        yield connections


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
