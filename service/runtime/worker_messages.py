"""What the workers of one port tell each other: questions of one word over sockets of their own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

_LONGEST = 64  # bytes of a question

Answers = Mapping[str, Callable[[], Awaitable[bytes]]]


def meeting_points(count: int) -> list[socket.socket]:
    """A listening socket for each worker, to be made before there are any.

    Linux gives them names that are no files, and that nobody has to remove.
    """
    found = []
    for _ in range(count):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.bind("")
        one.listen()
        found.append(one)
    return found


class Siblings:
    """The other workers, as one of them sees them.

    Args:
        points: from `meeting_points`.
        number: of this worker among them.
    """

    def __init__(self, points: Sequence[socket.socket], number: int) -> None:
        self._points = points
        self.number = number

    async def answer(self, answers: Answers) -> asyncio.Server:
        """Answer the others, until what is returned is closed."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                question = (await reader.read(_LONGEST)).decode("ascii")
                writer.write(await answers[question]())
                await writer.drain()
            except Exception:  # noqa: BLE001 - the one who asked goes on without
                _log.exception("another worker was not answered")
            finally:
                writer.close()

        # A copy, for the server closes what it is given, and others have still to find the name.
        return await asyncio.start_unix_server(serve, sock=self._points[self.number].dup())

    async def ask(self, question: str, patience: float) -> dict[int, bytes]:
        """What the others answer, by number. Who does not within `patience` seconds is left out."""
        others = [number for number in range(len(self._points)) if number != self.number]
        answers = await asyncio.gather(*(self._ask(at, question, patience) for at in others))
        return {at: told for at, told in zip(others, answers, strict=True) if told is not None}

    async def _ask(self, number: int, question: str, patience: float) -> bytes | None:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(patience):
                one.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(one, self._points[number].getsockname())
                await loop.sock_sendall(one, question.encode("ascii"))
                parts = []
                while part := await loop.sock_recv(one, 1 << 16):
                    parts.append(part)
            return b"".join(parts) or None
        except OSError as error:
            why = f"silent for {patience:g} s" if isinstance(error, TimeoutError) else str(error)
            _log.warning("worker %d was not reached: %s", number, why)
            return None
        finally:
            one.close()
