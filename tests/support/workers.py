"""Which process answers: found where the system keeps it, not asked of the service."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.server import PATIENCE, Server
from tests.support.waiting import eventually

_ATTEMPTS = 200  # connections until one is a given worker's: of two, each gets half of them


class Answered(NamedTuple):
    """Answers of one process."""

    status: int
    body: Any


class Worker:
    """One worker process of a server, asked over connections that are its own."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._port = int(server.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Answers of this process, and of no other."""
        with self.connected() as ask:
            return ask(method, path, body, **headers)

    @contextmanager
    def connected(self) -> Iterator[Callable[..., Answered]]:
        """Hold a connection of this process; yield `ask` over it.

        Once another process hangs, a new connection may be given to that one, which takes it never.
        """
        with self._connected() as connection:

            def ask(method: str, path: str, body: Any = None, **headers: str) -> Answered:
                sent = None if body is None else json.dumps(body)
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request(method, path, sent, {"content-type": "application/json"} | named)
                answer = connection.getresponse()
                text = answer.read()
                assert self._holds(connection)
                plain = answer.headers.get_content_type() == "text/plain"
                return Answered(
                    answer.status, text.decode() if plain else text and json.loads(text)
                )

            yield ask

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        for _ in range(_ATTEMPTS):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
            connection.auto_open = 0  # another connection may be another worker's
            connection.connect()
            try:
                if self._holds(connection):
                    yield connection
                    return
            finally:
                connection.close()
        raise AssertionError(f"no connection was answered by process {self.pid}")

    def _holds(self, connection: http.client.HTTPConnection) -> bool:
        """True if this process, of all workers, has accepted a connection."""
        port = connection.sock.getsockname()[1]
        found: set[int] = set()

        def accepted() -> bool:  # it stands before that, and is nobody's
            inode = _inode(self._port, port)
            pids = children(self._server.pid)
            found.update(pid for pid in pids if inode and _has(pid, inode))
            return bool(found)

        eventually(accepted)
        return found == {self.pid}


def workers(server: Server) -> list[Worker]:
    """All workers that answer now."""
    return [Worker(server, pid) for pid in children(server.pid)]


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process by the names of smaps_rollup, as of proc(5)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {
        name: 1024 * int(size)
        for name, size in re.findall(r"^(\w+): +(\d+) kB", rollup, re.MULTILINE)
    }


def _inode(port: int, peer: int) -> str | None:
    """The server's end of the connection between two ports of this machine."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(field.rpartition(":")[2], 16) for field in fields[1:3]]
        if ports == [port, peer] and fields[9] != "0":
            return fields[9]
    return None


def _has(pid: int, inode: str) -> bool:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(descriptor.readlink()) == f"socket:[{inode}]":
                    return True
            except OSError:  # it was closed meanwhile
                continue
    except OSError:  # the process has ended
        return False
    return False
