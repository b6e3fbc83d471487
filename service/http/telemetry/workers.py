"""Metrics of several workers in one text, each series with the number of its worker.

Workers are not summed up: a worker that is started again counts from 0, which a reader of the sums
could not tell from a worker that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from service.http.telemetry.metrics import Families
from service.runtime.processes.worker_table import WorkerRow, WorkerTable

_LABEL = ("worker",)


def merge_workers(texts: Mapping[int, bytes]) -> bytes:
    """Merge what each worker renders, by its number; each series gets its `worker` label.

    The label is put into the lines of the text, in the order of the families: prometheus_client's
    parser takes some fifty times as long, on the event loop.
    """
    heads: dict[str, list[str]] = {}  # of each family, its HELP and TYPE
    samples: dict[str, list[str]] = {}
    for number, text in sorted(texts.items()):
        label = f'worker="{number}"'
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "\n".join([*lines, ""]).encode()


def render_workers(table: WorkerTable | None, answered: Iterable[int]) -> bytes:
    """Render what is known of each worker: that it answered, its start and its restarts.

    Without a table this process is the only one, number 0.
    """
    answering = set(answered)
    rows = [_only()] if table is None else [table[number] for number in range(len(table))]
    up = GaugeMetricFamily(
        "heed_worker_up", "1 for a worker that answered this scrape in time.", labels=_LABEL
    )
    uptime = GaugeMetricFamily(
        "heed_worker_uptime_seconds", "Seconds since the worker's process started.", labels=_LABEL
    )
    restarts = CounterMetricFamily(
        "heed_worker_restarts", "Times that the worker's process was replaced.", labels=_LABEL
    )
    for number, row in enumerate(rows):
        label = (str(number),)
        up.add_metric(label, float(number in answering))
        running_for = time.monotonic() - row.started if row.is_running else 0.0
        uptime.add_metric(label, running_for)
        restarts.add_metric(label, row.restarts)
    return generate_latest(Families([up, uptime, restarts]))


_started = time.monotonic()


def _only() -> WorkerRow:
    return WorkerRow(True, _started, 0)


def _labelled(line: str, label: str) -> str:
    """Put one more label into a sample's line; the value has no brace, whatever labels have."""
    name, brace, value = line.rpartition("} ")
    if brace:
        return f"{name},{label}}} {value}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
