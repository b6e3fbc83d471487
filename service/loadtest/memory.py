"""Resident memory of the server under load, read from its metrics."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx

# prometheus_client's parser takes longer than a request, on the generator's core.
_SAMPLE = re.compile(
    r"^(heed_(?:items|users|events|worker_up)|process_resident_memory_bytes)"
    r"(?:\{([^}]*)\})? (\S+)$",
    re.MULTILINE,
)
_DEFAULT = 'namespace="default"'
_PATIENCE = 5.0  # seconds for one answer

Readings = list[tuple[float, float]]  # seconds since the first one, bytes


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Read memory and `heed_worker_up`, summed over the workers, and counts, the same in each.

    Of several namespaces, the counts are those of `default`. Empty where `/metrics` does not
    answer.
    """
    found: dict[str, float] = {}
    try:
        text = http.get("/metrics", timeout=_PATIENCE).raise_for_status().text
    except httpx.HTTPError:
        return found  # a server that is too busy shows in the latencies
    samples = _SAMPLE.findall(text)
    has_default = any(_DEFAULT in labels for _, labels, _ in samples)
    for name, labels, value in samples:
        if name in ("process_resident_memory_bytes", "heed_worker_up"):
            found[name] = found.get(name, 0.0) + float(value)
        elif _DEFAULT in labels or not has_default:
            found[name] = float(value)
    return found


async def sample_memory(http: httpx.Client, interval: float, readings: Readings) -> None:
    """Append the resident memory of all workers now and then, until cancelled.

    Memory that workers share is counted for each of them. A server without the metric is asked
    once. Each reading takes the server some milliseconds.
    """
    started = time.monotonic()
    while True:
        metrics = await asyncio.to_thread(read_metrics, http)
        size = metrics.get("process_resident_memory_bytes")
        if size is not None:
            readings.append((time.monotonic() - started, size))
        elif not readings:
            return
        await asyncio.sleep(interval)


def summarize_memory(readings: Readings) -> dict[str, Any] | None:
    """Return bytes at the start, after a third of the time, at the end and at most.

    In the first third caches fill; growth after it does not end by itself. None without any
    reading.
    """
    if not readings:
        return None
    third = readings[-1][0] / 3
    return {
        "start": readings[0][1],
        "third": next(size for at, size in readings if at >= third),
        "end": readings[-1][1],
        "most": max(size for _, size in readings),
        "readings": readings,
    }
