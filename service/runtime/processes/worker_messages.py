"""Messages between the workers of one port: requests of two words over Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from service.runtime.logs import log_failure
from service.runtime.processes.heartbeats import Heartbeats
from service.runtime.processes.worker_table import WorkerTable

_log = logging.getLogger(__name__)

_MAX_REQUEST = 128  # bytes
_START_TIME = 30.0  # seconds that a new worker may take to listen
_STALL_POLL = 0.2  # seconds between two looks whether a worker that is waited for has stalled

# By the first word of a request; called with the second, the name of a namespace.
MessageHandlers = Mapping[str, Callable[[str], Awaitable[bytes]]]


def worker_sockets(count: int) -> list[socket.socket]:
    """Return a listening socket for each worker; create them before the workers are forked.

    Linux gives them abstract names: no files that would have to be removed.
    """
    sockets = []
    for _ in range(count):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.bind("")
        one.listen()
        sockets.append(one)
    return sockets


class WorkerPeers:
    """The other workers, from the view of one worker.

    Args:
        sockets: from `worker_sockets`.
        number: index of this worker's own socket.
        heartbeats: of all workers. One that has stalled is not waited for.
        table: the workers as their parent sees them.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        number: int,
        heartbeats: Heartbeats,
        table: WorkerTable | None = None,
    ) -> None:
        self._sockets = sockets
        self._heartbeats = heartbeats
        self.number = number
        self.table = table or WorkerTable(len(sockets))

    async def listen(self, handlers: MessageHandlers) -> asyncio.Server:
        """Answer requests of the other workers until the returned server is closed."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                request = (await reader.read(_MAX_REQUEST)).decode("ascii")
                kind, _, name = request.partition(" ")
                writer.write(await handlers[kind](name))
                await writer.drain()
            except ConnectionError:
                _log.debug("a worker did not wait for its answer", exc_info=True)
            except Exception as error:  # noqa: BLE001 - the other worker goes on without the answer
                log_failure(_log, "a request of another worker failed", error)
            finally:
                writer.close()

        # A duplicate: the server closes its socket, whose name a restarted worker needs again.
        return await asyncio.start_unix_server(serve, sock=self._sockets[self.number].dup())

    async def ask(self, request: str, patience: float) -> dict[int, bytes]:
        """Ask all other workers; return the answers, by number, that came within `patience` s.

        A worker that has stalled is left out: it answers nobody. Should it go on, it reads by
        itself what the others had to say.
        """
        others = [number for number in range(len(self._sockets)) if number != self.number]
        answers = await asyncio.gather(*(self._ask_alive(one, request, patience) for one in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer}

    async def silent(self, patience: float) -> list[int]:
        """Return the workers that have run for a while and do not answer within `patience` s.

        A worker that is being started again is not among them: it takes no connections.
        """
        established = time.monotonic() - _START_TIME
        asked = [
            number
            for number in range(len(self._sockets))
            if number != self.number
            and self.table[number].is_running
            and self.table[number].started < established
        ]
        answers = await asyncio.gather(*(self._ask(one, "ping", patience) for one in asked))
        return [number for number, answer in zip(asked, answers, strict=True) if not answer]

    async def _ask_alive(self, number: int, request: str, patience: float) -> bytes:
        """Ask one worker for as long as its heart beats."""
        asking = asyncio.ensure_future(self._ask(number, request, patience))
        try:
            while not asking.done():
                if self._heartbeats.is_stalled(number):
                    _log.warning("worker %d is not waited for: it does not serve now", number)
                    return b""
                await asyncio.wait([asking], timeout=_STALL_POLL)
            return asking.result()
        finally:
            asking.cancel()

    async def _ask(self, number: int, request: str, patience: float) -> bytes:
        """Ask one worker; the answer is empty where it was not reached."""
        loop = asyncio.get_running_loop()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
                one.setblocking(False)
                async with asyncio.timeout(patience):
                    await loop.sock_connect(one, self._sockets[number].getsockname())
                    await loop.sock_sendall(one, request.encode("ascii"))
                    parts = []
                    while part := await loop.sock_recv(one, 1 << 16):
                        parts.append(part)
            return b"".join(parts)
        except OSError as error:
            reason = f"silent for {patience:g} s" if isinstance(error, TimeoutError) else str(error)
            _log.warning("worker %d was not reached: %s", number, reason)
            return b""
