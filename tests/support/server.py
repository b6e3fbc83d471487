"""A real `heed serve` process for tests, and the HTTP clients that talk to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds until a process that neither answers nor ends is given up
_SERVES = re.compile(r"serves on (http://127\.0\.0\.1:\d+)")


class Server:
    """`heed serve` on a free port of 127.0.0.1. As a context it is stopped, and must end well.

    Args:
        data: the data directory; what the server logs is beside it.
        settings: HEED_* variables by their lower-case names. The deadline is long unless it is
            named, for a busy machine is no failure.
    """

    def __init__(self, data: Path, **settings: Any) -> None:
        self.data = data
        self.killed = False
        self._log = data.with_name(data.name + ".log")
        named = {"port": 0, "deadline": 60, "drain_timeout": 60} | settings
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--data", str(data)],
                cwd=ROOT,
                env={**os.environ, **{f"HEED_{k.upper()}": str(v) for k, v in named.items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self._out = self.process.stdout  # open to its end, for the server may write on
        self.url = self._address()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.terminate()
        code = self.wait()
        well = code == 0 or self.killed or error is not None
        assert well, f"it ended with {code}: {self.log()}"

    def client(self) -> httpx.Client:
        """A client; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def connect(self) -> httpx.AsyncClient:
        """An asynchronous client; the caller closes it."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.killed = True
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        code = self.process.wait(PATIENCE)
        self._out.close()
        return code

    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()

    def _address(self) -> str:
        guard = threading.Timer(PATIENCE, self.process.kill)
        guard.start()
        try:
            for line in self._out:
                if found := _SERVES.search(line):
                    return found.group(1)
        finally:
            guard.cancel()
        raise AssertionError(f"it did not serve, and ended with {self.wait()}: {self.log()}")
