"""Charts of a report as lines between axes with units, in the coordinates of an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TICKS = 5  # on an axis, about
_FEW = 40  # points that are also drawn one by one

_OUTCOMES = ("requests", "refusals", "failures")  # counted in each interval of a timeline

Values = Sequence[float | None]


class Frame(NamedTuple):
    """Size of a picture, and of the rectangle of its lines."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


FRAME = Frame(440, 230, 56, 428, 10, 186)


class Mark(NamedTuple):
    """A place on an axis, and its text."""

    at: float
    text: str


class Line(NamedTuple):
    """A line with its name in the legend; `dots` has its points if they are few."""

    name: str
    points: str
    dots: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Lines over one axis; `limit` is the height of an objective."""

    title: str
    x: str
    y: str
    x_marks: Sequence[Mark]
    y_marks: Sequence[Mark]
    lines: Sequence[Line]
    limit: float | None


def draw_charts(report: Mapping[str, Any]) -> list[Chart]:
    """Draw latency by rate for a ramp, and latency, requests and memory over time if known."""
    found = []
    if steps := sorted(report.get("ramp", {}).get("steps", ()), key=lambda step: step["rate"]):
        title = f"Latency by rate; the dashed line is the objective, {report['ramp']['slo']}"
        rates = [step["rate"] for step in steps]
        limit = 1e3 * report["ramp"]["slo_seconds"]
        found.append(_chart(title, "requests a second", "ms", rates, _latency(steps), limit=limit))
    timeline = report["load"]["timeline"]
    if len(timeline) > 1:
        x, seconds = "seconds after the warm-up", timeline[1]["at"]
        times = [each["at"] for each in timeline]
        found.append(_chart("Latency over time", x, "ms", times, _latency(timeline)))
        counts = {name: [each[name] / seconds for each in timeline] for name in _OUTCOMES}
        answered = [n - sum(rest) for n, *rest in zip(*counts.values(), strict=True)]
        lines = {"answered": answered, "refused": counts["refusals"], "failed": counts["failures"]}
        found.append(_chart("Requests over time", x, "requests a second", times, lines))
    if (memory := report.get("memory")) and len(memory["readings"]) > 1:
        times = [at for at, _ in memory["readings"]]
        lines = {"memory": [size / 2**20 for _, size in memory["readings"]]}
        title = "Memory of the server, all workers together"
        found.append(_chart(title, "seconds after the first request", "MiB", times, lines))
    return found


def _latency(rows: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """Return percentiles of each row, in milliseconds."""
    return {
        p: [None if (s := row["latency"][p]) is None else 1e3 * s for row in rows]
        for p in ("p50", "p95", "p99")
    }


def _chart(
    title: str,
    x: str,
    y: str,
    xs: Sequence[float],
    lines: Mapping[str, Values],
    *,
    limit: float | None = None,
) -> Chart:
    most = max((v for values in lines.values() for v in values if v is not None), default=0.0)
    x_step, x_low, x_high = _axis(min(xs), max(xs))
    y_step, _, y_high = _axis(0.0, max(most, limit or 0.0))

    def across(value: float) -> float:
        share = (value - x_low) / (x_high - x_low)
        return round(FRAME.left + (FRAME.right - FRAME.left) * share, 1)

    def up(value: float) -> float:
        return round(FRAME.bottom - (FRAME.bottom - FRAME.top) * value / y_high, 1)

    drawn = []
    for name, values in lines.items():
        dots = [(across(at), up(v)) for at, v in zip(xs, values, strict=True) if v is not None]
        points = " ".join(f"{left},{top}" for left, top in dots)
        drawn.append(Line(name, points, dots if len(dots) <= _FEW else ()))
    return Chart(
        title,
        x,
        y,
        [Mark(across(value), text) for value, text in _marks(x_low, x_high, x_step)],
        [Mark(up(value), text) for value, text in _marks(0.0, y_high, y_step)],
        drawn,
        None if limit is None else up(limit),
    )


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Return a step, 1, 2 or 5 times a power of ten, and the bounds as whole steps."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= span / _TICKS)
    first = math.floor(low / step)
    return step, first * step, max(math.ceil(high / step), first + 1) * step


def _marks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    values = (low + step * place for place in range(round((high - low) / step) + 1))
    return [(value, f"{value:,.6g}") for value in values]
