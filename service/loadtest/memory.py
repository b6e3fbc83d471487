"""Resident memory of the server under load, read from its metrics."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import httpx

# prometheus_client's parser takes longer than a request, on the generator's core.
_SAMPLE = re.compile(
    r"^(heed_(?:items|users|events)|process_resident_memory_bytes)(?:\{[^}]*\})? (\S+)$",
    re.MULTILINE,
)
_PATIENCE = 5.0  # seconds for one answer


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Sum the samples of each gauge over the workers; empty where `/metrics` does not answer."""
    sums: dict[str, float] = {}
    try:
        text = http.get("/metrics", timeout=_PATIENCE).raise_for_status().text
    except httpx.HTTPError:
        return sums  # a server that is too busy shows in the latencies
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


class MemorySampler:
    """Reads the resident memory of all workers now and then, on a thread, until the block ends.

    Memory that workers share is counted for each of them.

    Args:
        http: client of the service; closed when the block ends.
        interval: seconds between two readings, each of which takes the server some milliseconds.
    """

    def __init__(self, http: httpx.Client, interval: float) -> None:
        self._http = http
        self._interval = interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heed-loadtest-memory")
        self.readings: list[tuple[float, float]] = []  # seconds since the first one, bytes

    def __enter__(self) -> MemorySampler:
        self._started = time.monotonic()
        self._read()
        if self.readings:  # a server without the metric is not asked again
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.readings:
            self._thread.join()
            self._read()
        self._http.close()

    def as_dict(self) -> dict[str, Any] | None:
        """Return bytes at the start, after a third of the time, at the end and at most.

        In the first third caches fill; growth after it does not end by itself. None without any
        reading.
        """
        if not self.readings:
            return None
        third = self.readings[-1][0] / 3
        return {
            "start": self.readings[0][1],
            "third": next(size for at, size in self.readings if at >= third),
            "end": self.readings[-1][1],
            "most": max(size for _, size in self.readings),
            "readings": self.readings,
        }

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            self._read()

    def _read(self) -> None:
        size = read_metrics(self._http).get("process_resident_memory_bytes")
        if size is not None:
            self.readings.append((time.monotonic() - self._started, size))
