"""A real `heed serve` process for tests, and the HTTP clients that talk to it."""

from __future__ import annotations

import re
import signal
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

from tests.support.heed_process import PATIENCE, ROOT, HeedProcess

__all__ = ["PATIENCE", "ROOT", "Server", "stored_events"]

_SERVES = re.compile(r"serves on (http://127\.0\.0\.1:\d+)")
# It trusts nobody. Servers speak plain HTTP, and to read the certificates of all authorities takes
# 25 ms, which each client would spend.
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Server:
    """`heed serve` on a free port of 127.0.0.1. As a context it is stopped, and must end well.

    Args:
        data: the data directory; what the server logs is beside it.
        fresh: start an interpreter that has imported nothing.
        command: `serve`, or another one that serves.
        prepare: called in its process before it serves.
        settings: HEED_* variables by their lower-case names. The deadline is long unless it is
            named, for a busy machine is no failure.
    """

    def __init__(
        self,
        data: Path,
        *,
        fresh: bool = False,
        command: str = "serve",
        prepare: Callable[[], None] | None = None,
        **settings: Any,
    ) -> None:
        self.data = data
        self.killed = False
        named = {"port": 0, "deadline": 60, "drain_timeout": 60} | settings
        self.process = HeedProcess(
            command,
            "--data",
            data,
            log=data.with_name(data.name + ".log"),
            environment={f"HEED_{name.upper()}": str(value) for name, value in named.items()},
            fresh=fresh,
            prepare=prepare,
        )
        self.url = self._address()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.terminate()
        code = self.wait()
        well = code == 0 or self.killed or kind is not None
        assert well, f"it ended with {code}: {self.log()}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self) -> httpx.Client:
        """A client; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=_NO_AUTHORITIES)

    def connect(self) -> httpx.AsyncClient:
        """An asynchronous client; the caller closes it."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, verify=_NO_AUTHORITIES)

    def terminate(self) -> None:
        self.process.send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.killed = True
        self.process.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        return self.process.wait()

    def out(self) -> str:
        return self.process.out()

    def log(self) -> str:
        return self.process.log()

    def _address(self) -> str:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            alive = self.process.is_alive  # before its output is read, which is then complete
            if found := _SERVES.search(self.process.out()):
                return found.group(1)
            if not alive:
                break
            time.sleep(0.01)
        self.process.send(signal.SIGKILL)
        raise AssertionError(f"it did not serve, and ended with {self.wait()}: {self.log()}")


def stored_events(http: httpx.Client, user: str) -> list[dict[str, Any]]:
    """Return all stored events of a user, the newest first, page by page."""
    events: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        answer = http.get(f"/v1/users/{user}/history", params={"limit": "1000", **cursor})
        page = answer.raise_for_status().json()
        events += page["events"]
        if page["cursor"] is None:
            return events
        cursor = {"cursor": page["cursor"]}
