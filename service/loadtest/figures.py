"""What a record comes to: latency from the scheduled time, errors, stages, the generator's lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.loadtest.arrivals import Floats
from service.loadtest.sending import Record

PERCENTILES = (50.0, 95.0, 99.0, 99.9)
ALL = "all"
OUTSIDE, WAITED, REST = "network and queues", "before sending", "rest of the server"
_TOTAL = "total"  # of Server-Timing
_SHARE = 0.1  # of a latency that may be the generator's own
_POINTS = 200  # of a curve

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Slo:
    """So many percent of all requests are answered with success within so many seconds."""

    percentile: float
    seconds: float

    def held(self, within: float) -> bool:
        """Whether a share of requests that were within it is enough."""
        return within >= self.percentile / 100

    def allowed(self, requests: int) -> int:
        """How many of so many may fail or be slower."""
        return int(requests * (1 - self.percentile / 100) + 1e-9)

    def __str__(self) -> str:
        return f"{self.percentile:g} % within {1e3 * self.seconds:g} ms"


@dataclass(frozen=True, slots=True)
class Seen:
    """A record without its warm-up.

    Args:
        record: of one load.
        kinds: of its mix, in order.
        warmup: seconds at its beginning that do not count.
    """

    record: Record
    kinds: Sequence[str]
    warmup: float = 0.0

    def of(self, kind: str = ALL) -> Mask:
        """Which requests of a kind left and count."""
        record = self.record
        mask = np.isfinite(record.woke) & (record.schedule.due >= self.warmup)
        return mask if kind == ALL else mask & (record.schedule.kinds == self.kinds.index(kind))

    def succeeded(self, kind: str = ALL) -> Mask:
        """Which of them were answered with success."""
        return self.of(kind) & (self.record.status >= 200) & (self.record.status < 300)

    def latencies(self, kind: str = ALL) -> Floats:
        """Seconds from when each was due to its whole answer, of those with success."""
        return (self.record.done - self.record.schedule.due)[self.succeeded(kind)]

    def errors(self, kind: str = ALL) -> dict[str, int]:
        """How many failed, by HTTP status or by what there was instead."""
        found: Counter[str] = Counter()
        for number in np.flatnonzero(self.of(kind) & ~self.succeeded(kind)).tolist():
            status = int(self.record.status[number])
            # What was under way when it ended is no error, and no success either.
            found[str(status) if status else self.record.failures.get(number, "")] += 1
        found.pop("", None)
        return dict(found.most_common())

    def unfinished(self, kind: str = ALL) -> int:
        """How many were under way when it ended."""
        return int((self.of(kind) & ~np.isfinite(self.record.done)).sum())

    def within(self, slo: Slo) -> float:
        """The share of requests that kept an objective; those that failed did not."""
        return int((self.latencies() <= slo.seconds).sum()) / max(1, int(self.of().sum()))


def percentiles(seconds: Floats) -> dict[str, float | None]:
    """p50 to p99.9 and the greatest; None without any."""
    if not len(seconds):
        return {**{f"p{p:g}": None for p in PERCENTILES}, "max": None}
    found = np.percentile(seconds, PERCENTILES)
    return {
        **{f"p{p:g}": float(value) for p, value in zip(PERCENTILES, found, strict=True)},
        "max": float(seconds.max()),
    }


def figures(seen: Seen) -> dict[str, Any]:
    """Everything of one load, as plain values for JSON; times in seconds."""
    names = [ALL, *seen.kinds]
    mask = seen.of()
    due = seen.record.schedule.due
    span = float(due[mask].max() - seen.warmup) if mask.any() else 0.0
    return {
        "seconds": span,
        "ended": seen.record.ended,
        "requests_per_second": int(mask.sum()) / span if span else 0.0,
        "successes_per_second": int(seen.succeeded().sum()) / span if span else 0.0,
        "kinds": {name: _kind(seen, name) for name in names},
        "details": {
            f"{seen.kinds[kind]} {error}": text
            for (kind, error), text in seen.record.details.items()
        },
        "generator": _generator(seen),
        "in_flight": _in_flight(seen),
        "stages": {name: stages for name in seen.kinds if (stages := _stages(seen, name))},
        "curves": {name: _curve(seen.latencies(name)) for name in names},
        "timeline": _timeline(seen),
    }


def tails(seen: Seen, rate: float) -> dict[str, Any]:
    """Of each kind at one rate its latency, and how many times its p50 its p99 is."""
    latency = {kind: percentiles(seen.latencies(kind)) for kind in seen.kinds}
    return {
        "rate": rate,
        "kinds": latency,
        "p99_over_p50": {
            kind: each["p99"] / each["p50"] if each["p50"] and each["p99"] else None
            for kind, each in latency.items()
        },
    }


def late(generator: Mapping[str, Mapping[str, float | None]], of: Mapping[str, Any]) -> list[str]:
    """Which percentiles of a latency are the generator's own by more than a tenth.

    Args:
        generator: percentiles of its lateness.
        of: of the latency.
    """
    lag = generator["late"]
    return [
        name
        for name in ("p50", "p95", "p99")
        if lag[name] is not None and of[name] is not None and lag[name] > _SHARE * of[name]
    ]


# ------------------------------------------------------------------------------ the parts


def _kind(seen: Seen, name: str) -> dict[str, Any]:
    return {
        "requests": int(seen.of(name).sum()),
        "successes": int(seen.succeeded(name).sum()),
        "errors": seen.errors(name),
        "unfinished": seen.unfinished(name),
        "latency": percentiles(seen.latencies(name)),
    }


def _generator(seen: Seen) -> dict[str, Any]:
    """How late its own sends were."""
    record, mask = seen.record, seen.of()
    waited = (record.sent - record.woke)[mask]
    return {
        "late": percentiles((record.woke - record.schedule.due)[mask]),
        "waited_for_a_connection": percentiles(waited[np.isfinite(waited)]),
        "connections": record.connections,
    }


def _in_flight(seen: Seen) -> dict[str, float]:
    """How many requests had left and were not over, each time when one more left."""
    record = seen.record
    left = np.isfinite(record.woke)
    over = np.sort(np.where(np.isfinite(record.done), record.done, np.inf)[left])
    at = record.woke[seen.of()]
    if not len(at):
        return {"mean": 0.0, "max": 0}
    begun = np.searchsorted(np.sort(record.woke[left]), at, side="right")
    there = begun - np.searchsorted(over, at, side="right")
    return {"mean": float(there.mean()), "max": int(there.max())}


def parsed_timing(header: bytes) -> dict[str, float]:
    """Seconds by stage, of a Server-Timing header; what has no duration is left out."""
    found = {}
    for part in header.decode("latin-1").split(","):
        name, *params = (each.strip() for each in part.split(";"))
        for param in params:
            key, _, value = param.partition("=")
            try:
                if key.lower() == "dur":
                    found[name] = float(value.strip('"')) / 1e3
            except ValueError:
                continue
    return found


def _stages(seen: Seen, name: str) -> dict[str, dict[str, float]]:
    """Median and p99 of each stage, of what was before and of what is left.

    Stages that a request did not come to took it 0 s.
    """
    record = seen.record
    sent = np.flatnonzero(seen.succeeded(name)).tolist()
    rows = [number for number in sent if record.timing[number]]
    if not rows:
        return {}
    timings = [parsed_timing(record.timing[number]) for number in rows]
    known = list(dict.fromkeys(stage for each in timings for stage in each if stage != _TOTAL))
    table = {stage: np.array([each.get(stage, 0.0) for each in timings]) for stage in known}
    inner = np.sum(list(table.values()), axis=0) if table else np.zeros(len(rows))
    total = np.array([each.get(_TOTAL, np.nan) for each in timings])
    total = np.where(np.isnan(total), inner, total)
    table[REST] = np.maximum(total - inner, 0.0)  # stages that nest count twice
    table[OUTSIDE] = np.maximum((record.done - record.sent)[rows] - total, 0.0)
    table[WAITED] = (record.sent - record.schedule.due)[rows]
    return {
        stage: dict(zip(("p50", "p99"), map(float, np.percentile(took, (50, 99))), strict=True))
        for stage, took in table.items()
    }


def _curve(seconds: Floats) -> list[tuple[float, float]]:
    """Latency by percentile, closer together towards the tail, no further than it is known."""
    n = len(seconds)
    if n < 2:
        return []
    beyond = np.geomspace(1.0, 1.0 / n, min(_POINTS, n))
    return [
        (float(p), float(value))
        for p, value in zip(
            100 * (1 - beyond), np.percentile(seconds, 100 * (1 - beyond)), strict=True
        )
    ]


def _timeline(seen: Seen) -> list[dict[str, Any]]:
    """Part by part of the time, at least a second each, by when requests were due."""
    record, mask, well = seen.record, seen.of(), seen.succeeded()
    if not mask.any():
        return []
    due, took = record.schedule.due, record.done - record.schedule.due
    end = float(due[mask].max())
    width = max(1.0, (end - seen.warmup) / _POINTS)
    part = ((due - seen.warmup) / width).astype(np.int64)
    ended = np.sort(np.where(np.isfinite(record.done), record.done, np.inf))
    left = np.sort(record.woke[np.isfinite(record.woke)])
    found = []
    for number in range(int(part[mask].max()) + 1):
        inside = mask & (part == number)
        at = seen.warmup + (number + 1) * width
        there = np.searchsorted(left, at, "right") - np.searchsorted(ended, at, "right")
        found.append(
            {
                "at": number * width,
                "seconds": min(width, end - seen.warmup - number * width),
                "requests": int(inside.sum()),
                "failures": int((inside & ~well & np.isfinite(record.done)).sum()),
                "in_flight": int(there),
                "latency": percentiles(took[inside & well]),
            }
        )
    return found
