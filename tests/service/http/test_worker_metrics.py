"""Metrics of workers in one text, compared with what prometheus_client reads from each."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.http.telemetry import merge_workers, render_workers
from service.runtime.workers import WorkerTable

Sample = tuple[str, frozenset[tuple[str, str]], float]


def rendered(count: int) -> bytes:
    """Return metrics with and without labels, some of which look like syntax."""
    registry = CollectorRegistry()
    routes = Counter("c", "A } brace, \\ and\nmore.", ("route",), registry=registry)
    for route in ("/v1/{id}", 'a"} 7', "a\\b", "a\nb", 'x="y",z', ""):
        routes.labels(route).inc(count)
    Gauge("plain", "Without labels.", registry=registry).set(count / 3)
    Histogram("h", "Seconds.", registry=registry).observe(count)
    return generate_latest(registry)


def samples(text: bytes) -> set[Sample]:
    return {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_each_series_gets_its_worker() -> None:
    """The merged text has each sample of each worker, with its number, and each family once."""
    texts = {number: rendered(number + 1) for number in range(3)}
    merged = merge_workers(texts)
    assert samples(merged) == {
        (name, labels | {("worker", str(number))}, value)
        for number, text in texts.items()
        for name, labels, value in samples(text)
    }
    types = [line for line in merged.decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == 3


def test_workers_are_up_when_they_answer() -> None:
    """A worker that did not answer the scrape is not up; the table has its restarts."""
    table = WorkerTable(3)
    table.start(0)
    table.start(1)
    table.start(1)
    rendered = samples(render_workers(table, [0]))
    found = {(name, *dict(labels).values()): value for name, labels, value in rendered}
    up, restarts = "heed_worker_up", "heed_worker_restarts_total"
    assert [found[up, str(n)] for n in range(3)] == [1, 0, 0]
    assert [found[restarts, str(n)] for n in range(3)] == [0, 1, 0]
    assert found["heed_worker_uptime_seconds", "2"] == 0
