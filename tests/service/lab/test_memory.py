"""Resident memory of a server under load, read from its metrics."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import httpx

from service.lab.load_report import conclusions
from service.lab.workload import Readings, read_metrics, sample_memory, summarize_memory

ONE = "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 1.5e+08\nx 3\n"
SEVERAL = (
    'process_resident_memory_bytes{worker="0"} 1e+08\n'
    'process_resident_memory_bytes{worker="1"} 2e+08\n'
)


def answering(*texts: str) -> httpx.Client:
    """A client of a server with these metrics, the last one again and again; 404 without any."""
    left = iter([*texts, *itertools.repeat(texts[-1], 1_000)] if texts else ())

    def answer(_: httpx.Request) -> httpx.Response:
        text = next(left, None)
        return httpx.Response(404) if text is None else httpx.Response(200, text=text)

    return httpx.Client(base_url="http://heed", transport=httpx.MockTransport(answer))


async def sampled(http: httpx.Client) -> Readings:
    """Readings of a while."""
    readings: Readings = []
    with suppress(TimeoutError):
        await asyncio.wait_for(sample_memory(http, 0.02, readings), 0.3)
    return readings


def test_all_processes_count() -> None:
    """Resident memory is summed over all workers, and absent without a metric."""
    assert read_metrics(answering(ONE)) == {"process_resident_memory_bytes": 150_000_000}
    assert read_metrics(answering(SEVERAL)) == {"process_resident_memory_bytes": 300_000_000}
    assert read_metrics(answering("heed_http_in_flight 1\n")) == read_metrics(answering()) == {}


def test_counts_are_those_of_one_namespace() -> None:
    """Counts are not summed over workers, nor over namespaces."""
    text = "".join(
        f'heed_items{{namespace="{name}",worker="{worker}"}} {items}\n'
        for name, items in (("a", 5.0), ("default", 7.0), ("z", 9.0))
        for worker in "01"
    )
    assert read_metrics(answering(text)) == {"heed_items": 7}
    assert read_metrics(answering('heed_events{namespace="a"} 3.0\n')) == {"heed_events": 3}


def test_memory_is_read_until_the_end() -> None:
    """Memory is sampled at the start, a third, the end and the maximum of the load."""
    sizes = [f"process_resident_memory_bytes {size}\n" for size in range(100, 10_000, 100)]
    readings = asyncio.run(sampled(answering(*sizes)))
    found = summarize_memory(readings)
    assert found is not None
    assert found["start"] == 100
    assert found["start"] <= found["third"] <= found["end"] == found["most"] > 100
    assert found["end"] == readings[-1][1] == 100 * len(readings)
    report = {
        "load": {"kinds": {"all": {"unfinished": 0}}},
        "ended": "completed",
        "memory": {"start": 2**20, "third": 2**21, "end": 2**22},
    }
    assert conclusions(report) == [
        "The server held 1 MiB at the beginning, 2 after a third of the time and 4 at the end."
    ]


def test_server_without_metrics_is_polled_once() -> None:
    readings = asyncio.run(sampled(answering()))
    assert readings == []
    assert summarize_memory(readings) is None
