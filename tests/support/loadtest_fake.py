"""A small server with Heed's routes that answers as slowly and as badly as a test wants."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

USERS = [f"u{number}" for number in range(30)]
ITEMS = [f"i{number}" for number in range(50)]
TIMING = "store;dur=2.5, attend;dur=5, total;dur=10"

Behaviour = Callable[["Fake", str, int], int | None]


class Fake:
    """Requests that it was sent, and how it answers.

    Args:
        behaviour: of a POST: the status, or None to hang up. It is told the kind and how many of
            that kind came before, and may take its time.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.key: str | None = None  # that requests must have
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()  # POSTs by kind
        self.bodies: dict[str, list[Any]] = {}
        self.deleted: list[str] = []
        self.busy = 0  # DELETEs that it refuses
        self.users = [*USERS, "loadtest-of-another-run"]
        self.url = ""

    def listed(self, path: str) -> Any:
        """The answer to a GET; None where there is none."""
        if path == "/v1/users":
            return {"users": [{"user_id": user} for user in self.users], "cursor": None}
        if path == "/v1/items":
            items = [{"item_id": i, "title": f"Title of {i}", "hidden": i == "i0"} for i in ITEMS]
            return {"items": items, "cursor": None}
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        found = self.fake.listed(self.path.partition("?")[0])
        self._answer(404 if found is None else 200, found)

    def do_DELETE(self) -> None:
        with self.fake.lock:
            is_busy = self.fake.busy > 0
            self.fake.busy -= is_busy
            if not is_busy:
                self.fake.deleted.append(unquote(self.path))
        self._answer(429 if is_busy else 200, {"forgotten": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind = self.path.removeprefix("/v1/")
        with self.fake.lock:
            number = self.fake.asked[kind]
            self.fake.asked[kind] += 1
            self.fake.bodies.setdefault(kind, []).append(body)
        status = self.fake.behaviour(self.fake, kind, number)
        if status is None:
            self.close_connection = True
            return
        self._answer(status, {"items": [], "model_version": "m-1", "status": status})

    def _answer(self, status: int, content: Any) -> None:
        if self.fake.key is not None and self.headers["authorization"] != self.fake.key:
            status, content = 401, {"detail": "no"}
        data = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nServer-Timing: {TIMING}\r\nContent-Length: {len(data)}\r\n"
        self.wfile.write(head.encode() + b"\r\n" + data)

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # who asked has hung up
            super().handle()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1_000


@contextmanager
def faking(behaviour: Behaviour = lambda *_: 200) -> Iterator[Fake]:
    """A fake on a free port, until the block ends."""
    fake = Fake(behaviour)
    handler = type("Handler", (_Handler,), {"fake": fake})
    with _Server(("127.0.0.1", 0), handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
