"""A real `heed serve` process for tests, and the HTTP clients that talk to it."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds until a process that neither answers nor ends is given up
_SERVES = re.compile(r"serves on (http://127\.0\.0\.1:\d+)")

# Every server is a process of its own, forked from one that has imported the service: imports take
# 3 s, far longer than what most tests ask of a server. Those that run `heed` itself are in
# `test_readme` and `test_cli`.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["service.cli", "service.http.app", "service.http.server", __name__])


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
        self._out = data.with_name(data.name + ".out")
        self._out.write_text("")
        named = {"port": 0, "deadline": 60, "drain_timeout": 60} | settings
        environment = {**os.environ, **{f"HEED_{k.upper()}": str(v) for k, v in named.items()}}
        self.process = _FORKS.Process(
            target=_serve, args=(data, environment, self._out, self._log), daemon=False
        )
        self.process.start()
        self.url = self._address()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.is_alive():
            self.terminate()
        code = self.wait()
        well = code == 0 or self.killed or error is not None
        assert well, f"it ended with {code}: {self.log()}"

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def client(self) -> httpx.Client:
        """A client; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def connect(self) -> httpx.AsyncClient:
        """An asynchronous client; the caller closes it."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE)

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.killed = True
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        self.process.join(PATIENCE)
        code = self.process.exitcode
        assert code is not None, f"it goes on: {self.log()}"
        return code

    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()

    def _address(self) -> str:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            alive = self.process.is_alive()  # before its output is read, which is then complete
            if found := _SERVES.search(self._out.read_text()):
                return found.group(1)
            if not alive:
                break
            time.sleep(0.01)
        self.process.kill()
        raise AssertionError(f"it did not serve, and ended with {self.wait()}: {self.log()}")


def _serve(data: Path, environment: Mapping[str, str], out: Path, log: Path) -> None:
    """Run `heed serve` in a process of its own; what it prints is appended to files."""
    for path, number in ((out, 1), (log, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["heed", "serve", "--data", str(data)]
    from service.cli import main

    main()
