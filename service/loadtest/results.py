"""Recordings of loads and their statistics: latency, errors, server stages, send delays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
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
_POINTS = 200  # of a curve and of a timeline

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
    server_timing: list[bytes]  # [N] headers
    failures: dict[int, str] = field(default_factory=dict)  # reason without a response, by number
    details: dict[tuple[str, str], str] = field(default_factory=dict)  # first body, by kind, status
    ended: Ended = "completed"
    connections: int = 0  # opened

    @classmethod
    def empty(cls, schedule: Schedule) -> Recording:
        """Return a recording in which nothing was sent."""
        n = len(schedule)
        woke, sent, done = (np.full(n, np.nan) for _ in range(3))
        return cls(schedule, woke, sent, done, np.zeros(n, dtype=np.int16), [b""] * n)

    def kind_of(self, number: int) -> str:
        """Return the kind of a request."""
        return self.schedule.kinds[int(self.schedule.kind[number])]

    def succeeded(self, number: int) -> bool:
        """Whether a request was answered with a status of success."""
        return 200 <= int(self.status[number]) < 300

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


def percentiles(seconds: Floats) -> dict[str, float | None]:
    """Return the `PERCENTILES` of times; None without any."""
    if not len(seconds):
        return dict.fromkeys(PERCENTILES)
    return dict(
        zip(PERCENTILES, np.percentile(seconds, list(PERCENTILES.values())).tolist(), strict=True)
    )


def summarize(recording: Recording) -> dict[str, Any]:
    """Return all statistics of one load as plain values for JSON; times in seconds."""
    schedule, due = recording.schedule, recording.due()
    names = [ALL, *schedule.kinds]
    span = float(schedule.due[due].max() - schedule.warmup) if due.any() else 0.0
    waited = (recording.sent - recording.woke)[due]
    return {
        "seconds": span,
        "ended": recording.ended,
        "requests_per_second": int(due.sum()) / span if span else 0.0,
        "successes_per_second": int(recording.successes().sum()) / span if span else 0.0,
        "kinds": {name: _kind(recording, name) for name in names},
        "details": {" ".join(key): text for key, text in recording.details.items()},
        "generator": {
            "late": percentiles((recording.woke - schedule.due)[due]),
            "waited_for_a_connection": percentiles(waited[np.isfinite(waited)]),
            "connections": recording.connections,
        },
        "in_flight": _in_flight(recording, recording.woke[due]),
        "stages": {name: stages for name in schedule.kinds if (stages := _stages(recording, name))},
        "curves": {name: _curve(recording.latencies(name)) for name in names},
        "timeline": _timeline(recording, span),
    }


def parse_server_timing(header: bytes) -> dict[str, float]:
    """Return seconds by stage of a Server-Timing header; stages without a duration are left out."""
    stages = {}
    for part in header.decode("latin-1").split(","):
        name, *params = (each.strip() for each in part.split(";"))
        for param in params:
            key, _, value = param.partition("=")
            try:
                if key.lower() == "dur":
                    stages[name] = float(value.strip('"')) / 1e3
            except ValueError:
                continue
    return stages


# ------------------------------------------------------------------------------ the parts


def _kind(recording: Recording, name: str) -> dict[str, Any]:
    due, successes = recording.due(name), recording.successes(name)
    finished = np.isfinite(recording.done)
    # A request in flight when the load ended is neither an error nor a success.
    errors = Counter(
        recording.failures.get(number) or str(recording.status[number])
        for number in np.flatnonzero(due & finished & ~successes).tolist()
    )
    return {
        "requests": int(due.sum()),
        "successes": int(successes.sum()),
        "errors": dict(errors.most_common()),
        "unfinished": int((due & ~finished).sum()),
        "latency": percentiles(recording.latencies(name)),
    }


def _count_in_flight(recording: Recording, at: Floats) -> NDArray[np.int64]:
    """How many requests had been started and were not finished at each of these times."""
    started = np.isfinite(recording.woke)
    finished = np.where(np.isfinite(recording.done), recording.done, np.inf)[started]
    return np.searchsorted(np.sort(recording.woke[started]), at, side="right") - np.searchsorted(
        np.sort(finished), at, side="right"
    )


def _in_flight(recording: Recording, at: Floats) -> dict[str, float]:
    if not len(at):
        return {"mean": 0.0, "max": 0}
    counts = _count_in_flight(recording, at)
    return {"mean": float(counts.mean()), "max": int(counts.max())}


def _stages(recording: Recording, name: str) -> dict[str, dict[str, float]]:
    """Median and p99 of each stage of the server, of the rest of its total, and of the time around.

    A stage that a request did not come to took it 0 s.
    """
    rows = [n for n in np.flatnonzero(recording.successes(name)).tolist()
            if recording.server_timing[n]]  # fmt: skip
    if not rows:
        return {}
    timings = [parse_server_timing(recording.server_timing[row]) for row in rows]
    known = dict.fromkeys(stage for each in timings for stage in each if stage != _TOTAL)
    table = {stage: np.array([each.get(stage, 0.0) for each in timings]) for stage in known}
    inner = np.sum(list(table.values()), axis=0) if table else np.zeros(len(rows))
    total = np.array([each.get(_TOTAL, np.nan) for each in timings])
    total = np.where(np.isnan(total), inner, total)
    table[REST] = np.maximum(total - inner, 0.0)  # stages that nest count twice
    table[OUTSIDE] = np.maximum((recording.done - recording.sent)[rows] - total, 0.0)
    table[WAITED] = (recording.sent - recording.schedule.due)[rows]
    return {
        stage: dict(zip(("p50", "p99"), np.percentile(took, (50, 99)).tolist(), strict=True))
        for stage, took in table.items()
    }


def _curve(seconds: Floats) -> Sequence[tuple[float, float]]:
    """Latency by percentile, in steps that shrink with the share beyond, down to one request."""
    n = len(seconds)
    if n < 2:
        return []
    at = 100 * (1 - np.geomspace(1.0, 1.0 / n, min(_POINTS, n)))
    return list(zip(at.tolist(), np.percentile(seconds, at).tolist(), strict=True))


def _timeline(recording: Recording, span: float) -> list[dict[str, Any]]:
    """Statistics of intervals of at least a second each, by when requests were due."""
    due, successes = recording.due(), recording.successes()
    if not due.any():
        return []
    at = recording.schedule.due - recording.schedule.warmup
    latency, finished = recording.done - recording.schedule.due, np.isfinite(recording.done)
    width = max(1.0, span / _POINTS)
    intervals = []
    for start in (width * np.arange(int(span / width) + 1)).tolist():
        inside = due & (at >= start) & (at < start + width)
        end = np.array([recording.schedule.warmup + start + width])
        intervals.append(
            {
                "at": start,
                "seconds": min(width, span - start),
                "requests": int(inside.sum()),
                "failures": int((inside & finished & ~successes).sum()),
                "in_flight": int(_count_in_flight(recording, end)[0]),
                "latency": percentiles(latency[inside & successes]),
            }
        )
    return intervals
