"""The server's memory while it is loaded, as its metrics say it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import httpx

_RESIDENT = re.compile(r"^process_resident_memory_bytes(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_LOOKS = 60  # in the whole time: each takes the server a few milliseconds
_PATIENCE = 5.0  # seconds for one answer


def resident(metrics: str) -> float | None:
    """Bytes that all processes have resident, from the text of `/metrics`; None where it is silent.

    What several workers share is counted for each of them.
    """
    found = _RESIDENT.findall(metrics)
    return sum(map(float, found)) if found else None


class Watch:
    """Looks at a service's memory now and then, on a thread, until the block ends.

    Args:
        url: of the service.
        headers: of every request.
        seconds: that it lasts, about.
    """

    def __init__(self, url: str, headers: Sequence[tuple[str, str]], seconds: float) -> None:
        self._http = httpx.Client(base_url=url, headers=list(headers), timeout=_PATIENCE)
        self._every = max(1.0, seconds / _LOOKS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heed-loadtest-memory")
        self.seen: list[tuple[float, float]] = []  # seconds since the first look, bytes

    def __enter__(self) -> Watch:
        self._began = time.monotonic()
        self._look()
        if self.seen:  # who says nothing now will not later
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self.seen:
            self._thread.join()
            self._look()
        self._http.close()

    def as_dict(self) -> dict[str, Any] | None:
        """Bytes at the beginning, after a third of the time, at the end and at most; None unseen.

        In the first third caches fill; what grows after it goes on growing.
        """
        if not self.seen:
            return None
        third = self.seen[-1][0] / 3
        return {
            "start": self.seen[0][1],
            "third": next(size for at, size in self.seen if at >= third),
            "end": self.seen[-1][1],
            "most": max(size for _, size in self.seen),
            "seen": self.seen,
        }

    def _watch(self) -> None:
        while not self._ended.wait(self._every):
            self._look()

    def _look(self) -> None:
        with suppress(httpx.HTTPError):  # a server that is too busy to say is seen elsewhere
            answer = self._http.get("/metrics")
            size = resident(answer.text) if answer.is_success else None
            if size is not None:
                self.seen.append((time.monotonic() - self._began, size))
