"""Recordings of loads and their statistics: latency, errors, server stages, send delays."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from service.loadtest.options import Slo
from service.loadtest.schedule import Floats, Schedule

# Exact percentiles of all latencies, which are recorded anyway; "max" is the 100th.
PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
ALL = "all"
OUTSIDE, WAITED, REST = "network and queues", "before sending", "rest of the server"
_TOTAL = "total"  # of Server-Timing
_STAGE = re.compile(r"([\w-]+)\s*;\s*dur=(\d+\.?\d*)")  # milliseconds
_INTERVALS = 200  # of a timeline

REFUSED = (429, 503)  # the server is well, and asks clients to come later

Ended = Literal["completed", "stopped", "silent", "objective missed"]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Recording:
    """Times and results of the N requests of a schedule, in seconds after the start; NaN = never.

    Latency is `done` - `schedule.due`: a request that waits behind a stall has waited from the
    moment at which it was due. A closed loop, which sends the next request when the last one was
    answered, sends fewer during a stall and does not see it (coordinated omission).
    """

    schedule: Schedule
    woke: Floats  # [N] when the generator came to it: later than due is the generator's delay
    sent: Floats  # [N] when it was written; between, it waited for a connection
    done: Floats  # [N] when its response was complete, or it failed
    status: NDArray[np.int16]  # [N] HTTP status; 0 without a response
    server_timing: list[str]  # [N] headers
    failures: dict[int, str] = field(default_factory=dict)  # reason without a response, by number
    details: dict[str, str] = field(default_factory=dict)  # first body by "kind status"
    ended: Ended = "completed"

    @classmethod
    def empty(cls, schedule: Schedule) -> Recording:
        """Return a recording in which nothing was sent."""
        n = len(schedule.due)
        woke, sent, done = (np.full(n, np.nan) for _ in range(3))
        return cls(schedule, woke, sent, done, np.zeros(n, dtype=np.int16), [""] * n)

    def kind_of(self, number: int) -> str:
        """Return the kind of a request."""
        return self.schedule.kinds[int(self.schedule.kind[number])]

    def succeeded(self, number: int) -> bool:
        """Report whether a request was answered with a status of success."""
        return 200 <= int(self.status[number]) < 300

    def refused(self, number: int) -> bool:
        """Report whether a request was answered with a status of `REFUSED`."""
        return int(self.status[number]) in REFUSED

    def due(self, kind: str = ALL) -> Mask:
        """[N] which requests of a kind came due after the warm-up, before the load ended."""
        mask = np.isfinite(self.woke) & self.schedule.counted
        return (
            mask if kind == ALL else mask & (self.schedule.kind == self.schedule.kinds.index(kind))
        )

    def successes(self, kind: str = ALL) -> Mask:
        """[N] which of them were answered with success."""
        return self.due(kind) & (self.status >= 200) & (self.status < 300)

    def latencies(self, kind: str = ALL) -> Floats:
        """Seconds from the due time to the complete response, of the successes."""
        return (self.done - self.schedule.due)[self.successes(kind)]

    def share_within(self, slo: Slo) -> float:
        """Share of requests that met an objective; failures did not."""
        return int((self.latencies() <= slo.seconds).sum()) / max(1, int(self.due().sum()))


def summarize(recording: Recording) -> dict[str, Any]:
    """Return all statistics of one load as plain values for JSON; times in seconds."""
    schedule, due = recording.schedule, recording.due()
    span = float(schedule.due[due].max() - schedule.warmup) if due.any() else 0.0
    waited = (recording.sent - recording.woke)[due]
    return {
        "seconds": span,
        "ended": recording.ended,
        "requests_per_second": int(due.sum()) / span if span else 0.0,
        "successes_per_second": int(recording.successes().sum()) / span if span else 0.0,
        "kinds": {name: _kind(recording, name) for name in (ALL, *schedule.kinds)},
        "details": recording.details,
        "generator": {
            "late": percentiles((recording.woke - schedule.due)[due]),
            "waited_for_a_connection": percentiles(waited[np.isfinite(waited)]),
        },
        "stages": {name: stages for name in schedule.kinds if (stages := _stages(recording, name))},
        "timeline": _timeline(recording, span),
    }


def percentiles(seconds: Floats) -> dict[str, float | None]:
    """Return the `PERCENTILES` of times; None without any."""
    if not len(seconds):
        return dict.fromkeys(PERCENTILES)
    return dict(
        zip(PERCENTILES, np.percentile(seconds, list(PERCENTILES.values())).tolist(), strict=True)
    )


def parse_server_timing(header: str) -> dict[str, float]:
    """Return seconds by stage of a Server-Timing header; stages without a duration are left out."""
    return {name: float(duration) / 1e3 for name, duration in _STAGE.findall(header)}


# ------------------------------------------------------------------------------ the parts


def _kind(recording: Recording, name: str) -> dict[str, Any]:
    due, successes = recording.due(name), recording.successes(name)
    finished = np.isfinite(recording.done)
    # A request in flight when the load ended is neither an error nor a success.
    refused, errors = Counter[str](), Counter[str]()
    for number in np.flatnonzero(due & finished & ~successes).tolist():
        why = recording.failures.get(number) or str(recording.status[number])
        (refused if recording.refused(number) else errors)[why] += 1
    return {
        "requests": int(due.sum()),
        "successes": int(successes.sum()),
        "refused": dict(refused.most_common()),
        "errors": dict(errors.most_common()),
        "unfinished": int((due & ~finished).sum()),
        "latency": percentiles(recording.latencies(name)),
    }


def _stages(recording: Recording, name: str) -> dict[str, dict[str, float]]:
    """Median and p99 of each stage of the server, of the rest of its total, and of the time around.

    A stage that a request did not come to took it 0 s.
    """
    numbers = np.flatnonzero(recording.successes(name)).tolist()
    every = {number: parse_server_timing(recording.server_timing[number]) for number in numbers}
    timings = {number: each for number, each in every.items() if _TOTAL in each}
    if not timings:
        return {}
    rows = list(timings)
    table = {
        stage: np.array([each.get(stage, 0.0) for each in timings.values()])
        for stage in dict.fromkeys(stage for each in timings.values() for stage in each)
    }
    total = table.pop(_TOTAL)
    # Stages that nest count twice.
    table[REST] = np.maximum(total - sum(table.values()), 0.0)
    table[OUTSIDE] = np.maximum((recording.done - recording.sent)[rows] - total, 0.0)
    table[WAITED] = (recording.sent - recording.schedule.due)[rows]
    return {
        stage: dict(zip(("p50", "p99"), np.percentile(took, (50, 99)).tolist(), strict=True))
        for stage, took in table.items()
    }


def _timeline(recording: Recording, span: float) -> list[dict[str, Any]]:
    """Statistics of equal intervals of about a second or more, by when requests were due."""
    schedule, due, successes = recording.schedule, recording.due(), recording.successes()
    latency = recording.done - schedule.due
    refused = due & np.isin(recording.status, REFUSED)
    failed = due & np.isfinite(recording.done) & ~successes & ~refused
    edges = np.linspace(0.0, span, min(max(round(span), 1), _INTERVALS) + 1)
    ends = np.searchsorted(schedule.due, schedule.warmup + edges)
    ends[-1] = len(due)
    return [
        {
            "at": float(at),
            "requests": int(due[first:end].sum()),
            "refusals": int(refused[first:end].sum()),
            "failures": int(failed[first:end].sum()),
            "latency": percentiles(latency[first:end][successes[first:end]]),
        }
        for at, (first, end) in zip(edges, pairwise(ends), strict=False)
    ]
