"""Resident memory of a server under load, read from its metrics."""

from __future__ import annotations

import itertools
import time

import httpx

from service.loadtest.memory import MemorySampler, read_metrics
from service.loadtest.report.content import conclusions

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


def test_all_processes_count() -> None:
    """Resident memory is summed over all workers, and absent without a metric."""
    assert read_metrics(answering(ONE)) == {"process_resident_memory_bytes": 150_000_000}
    assert read_metrics(answering(SEVERAL)) == {"process_resident_memory_bytes": 300_000_000}
    assert read_metrics(answering("heed_http_in_flight 1\n")) == read_metrics(answering()) == {}


def test_memory_is_read_until_the_end() -> None:
    """Memory is sampled at the start, a third, the end and the maximum of the load."""
    sizes = [f"process_resident_memory_bytes {size}\n" for size in range(100, 10_000, 100)]
    with MemorySampler(answering(*sizes), 0.02) as sampler:
        while len(sampler.readings) < 5:
            time.sleep(0.01)
    found = sampler.as_dict()
    assert found is not None
    assert found["start"] == 100
    assert found["start"] <= found["third"] <= found["end"] == found["most"] >= 600
    assert found["end"] == found["readings"][-1][1] == 100 * len(found["readings"])
    report = {
        "load": {"kinds": {"all": {"unfinished": 0}}},
        "ended": "completed",
        "memory": {"start": 2**20, "third": 2**21, "end": 2**22},
    }
    assert conclusions(report) == [
        "The server held 1 MiB at the beginning, 2 after a third of the time and 4 at the end."
    ]


def test_server_without_metrics_is_polled_once() -> None:
    """Without metrics there are no readings and no result."""
    with MemorySampler(answering(), 0.001) as sampler:
        time.sleep(0.02)
    assert sampler.readings == []
    assert sampler.as_dict() is None
