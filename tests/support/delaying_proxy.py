"""A TCP proxy between a client and a server, as a network that becomes slow, mute or absent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.postgres_programs import free_port

CHUNK = 65536  # bytes
MOST_CHUNKS = 64  # that wait for their time in one direction
PATIENCE = 10.0  # seconds until the proxy itself is given up
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no time


class DelayingProxy:
    """Passes on what comes to a port of its own, in a thread, until told otherwise.

    What it does can be changed at any time, and holds of connections that are open as well.

    Clients connect to its `port` of 127.0.0.1 instead of the server's.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._delay = 0.0
        self._flows = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.flow()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def through(self, url: str) -> str:
        """Return the URL of a server with the proxy's address instead of the server's."""
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user[0]}{user[1]}127.0.0.1:{self.port}").geturl()

    def flow(self, delay: float = 0.0) -> None:
        """Pass everything on, each chunk that comes from now on `delay` seconds later.

        What was held up by `stall` goes on its way.
        """
        self._run(self._flow(delay))

    def stall(self) -> None:
        """Pass nothing on; accept connections, which hear nothing."""
        self._run(self._stall())

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay as they are."""
        self._run(self._refuse())

    def cut(self) -> None:
        self._run(self._cut())

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _run(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._loop).result(PATIENCE)

    async def _flow(self, delay: float) -> None:
        self._delay = delay
        self._flows.set()
        await self._listen()

    async def _stall(self) -> None:
        self._flows.clear()
        await self._listen()

    async def _listen(self) -> None:
        if self._listening is None:
            self._listening = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _refuse(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def _cut(self) -> None:
        for writer in self._writers:
            connection: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # one that its other end has just closed
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        await self._refuse()
        await self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        server: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            answers, server = await asyncio.open_connection(*self._target)
            self._writers.add(server)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, server))
                both.create_task(self._pass_on(answers, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side has gone, so the other goes as well
        finally:
            self._tasks.discard(task)
            for each in (writer, server):
                if each is not None:
                    self._writers.discard(each)
                    each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one direction; chunks wait beside one another, not for one another."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)

        async def read() -> None:
            while chunk := await reader.read(CHUNK):
                await waiting.put((self._loop.time() + self._delay, chunk))
            await waiting.put((self._loop.time() + self._delay, b""))

        async def write() -> None:
            while True:
                due, chunk = await waiting.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flows.wait()
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                with contextlib.suppress(OSError):
                    writer.write_eof()

        async with asyncio.TaskGroup() as both:
            both.create_task(read())
            both.create_task(write())
