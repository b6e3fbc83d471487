"""A wall clock of one server's processes that is wrong, and that is set while they run.

libfaketime stands between a process and the system's clocks. It does not touch the monotonic clock,
as setting the clock of a machine does, and the times of files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.server import Server

_FOLDERS = ("/usr/lib/*-linux-gnu/faketime", "/usr/lib/faketime", "/usr/lib64/faketime")


def library() -> Path | None:
    """Return libfaketime for processes with threads; None where it is not installed."""
    found = [
        path for folder in _FOLDERS for path in Path("/").glob(f"{folder[1:]}/libfaketimeMT.so.1")
    ]
    return found[0] if found else None


class SteppedClock:
    """The wall clock of the servers that it starts.

    Args:
        file: holds how far the clock is ahead; processes read it each time they read the clock.
        ahead: seconds by which it is ahead of the machine's clock at first; behind, if negative.
        monotonic: step the monotonic clock as well, which no machine does.
    """

    def __init__(self, file: Path, ahead: int = 0, *, monotonic: bool = False) -> None:
        self._file, self._monotonic = file, monotonic
        self.ahead = ahead
        self.set(ahead)

    def set(self, ahead: int) -> None:
        """Set the clock to `ahead` seconds ahead of the machine's, at once."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead:+d}\n")
        new.replace(self._file)
        self.ahead = ahead

    def now(self) -> int:
        return time.time_ns() // 1000 + self.ahead * 1_000_000

    def served(self, data: Path, **settings: Any) -> Server:
        """Start a server, all of whose processes have this clock."""
        with self._preloaded():
            return Server(data, fresh=True, **settings)

    @contextmanager
    def _preloaded(self) -> Iterator[None]:
        variables = {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": str(int(not self._monotonic)),
            "NO_FAKE_STAT": "1",
        }
        os.environ.update(variables)
        try:
            yield
        finally:
            for name in variables:
                del os.environ[name]
