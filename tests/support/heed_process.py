"""Processes that run a command of `heed`, forked from one that has imported the service.

Imports take 3 s, far longer than what most tests ask of a command, and what is computed once a
process half a second more. `test_documents` runs the commands themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = "tests.support.served_before"
PATIENCE = 120.0  # seconds until a process that neither answers nor ends is given up

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "service.cli",
        "service.http.app",
        "service.http.server",
        # Commands import these when they run, which is 40 % of the time of a small one.
        "service.cli.progress_bars",
        "service.engine.lists",
        "service.maintenance.backup",
        "service.maintenance.doctor",
        __name__,
        PRELOADED,
    ]
)


class HeedProcess:
    """`heed ARGUMENTS...` in a process of its own; its output goes to files.

    Args:
        arguments: of the command.
        log: stderr is appended to it; stdout to the file of the suffix .out beside it, which is
            emptied first.
        environment: variables besides those of this process.
        folder: in which it runs.
        fresh: start an interpreter that has imported nothing, which takes as long as a shell's.
        prepare: called in the process before the command.
    """

    def __init__(
        self,
        *arguments: object,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        fresh: bool = False,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self._log, self._out = log, log.with_suffix(".out")
        self._out.write_text("")
        variables = {**os.environ, **(environment or {})}
        context: Any = multiprocessing.get_context("spawn") if fresh else _FORKS
        self._process: Any = context.Process(
            target=_run,
            args=(list(map(str, arguments)), variables, self._out, log, folder, prepare),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def send(self, number: signal.Signals) -> None:
        """Send a signal; none where the process has ended."""
        if self.is_alive:
            os.kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> int:
        """Its exit code once it has ended; minus the number of the signal that killed it."""
        self._process.join(patience)
        assert self._process.exitcode is not None, f"it goes on: {self.log()}"
        return int(self._process.exitcode)

    def out(self) -> str:
        return self._out.read_text()

    def log(self) -> str:
        """Output on stderr of it and of earlier processes of this log."""
        return self._log.read_text()


def _run(
    arguments: list[str],
    environment: Mapping[str, str],
    out: Path,
    log: Path,
    folder: Path,
    prepare: Callable[[], object] | None,
) -> None:
    for path, number in ((out, 1), (log, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    # If the tests run in the background of a shell, SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["heed", *arguments]
    from service.cli import main

    if prepare is not None:
        prepare()
    main()
