"""The report as one HTML file without scripts or links, with charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from service.loadtest.report import content
from service.loadtest.report.content import Report
from service.loadtest.results import PERCENTILES

_NINES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)

Points = Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """Lines and axis ticks, with coordinates scaled to [0, 1]."""

    title: str
    axes: tuple[str, str]
    lines: Mapping[str, Points]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    note: str = ""


def render(report: Report) -> str:
    """Render the HTML page of a report."""
    tables = [content.latencies(report), *content.details(report)]
    if "ramp" in report:
        tables.append(content.ramp(report))
    return content.render(
        "page.html",
        title=f"Load test of {report['options']['url']}",
        conclusions=content.conclusions(report),
        warnings=report["warnings"],
        tables=[*tables, content.setup(report)],
        charts=[chart for chart in _charts(report) if chart is not None],
        stages=report["load"]["stages"],
        stage_names=content.stage_names(report["load"]),
    )


def draw(
    title: str,
    axes: tuple[str, str],
    lines: Mapping[str, Points],
    scales: tuple[str, str] = ("linear", "linear"),
    note: str = "",
) -> Chart | None:
    """Scale lines to the unit square; None without points.

    Args:
        title: of the chart.
        axes: what x and y are.
        lines: by name; points that are not positive on a logarithmic axis are left out.
        scales: of x and y: linear (from 0), log, or nines (percentiles, by the share beyond).
        note: stands below.
    """
    kept = {
        name: [
            p for p in points if all(v > 0 or s != "log" for v, s in zip(p, scales, strict=True))
        ]
        for name, points in lines.items()
    }
    values = [p for points in kept.values() for p in points]
    if not values:
        return None
    (to_x, x_ticks), (to_y, y_ticks) = (
        _scale([p[at] for p in values], scale) for at, scale in enumerate(scales)
    )
    scaled = {name: [(to_x(x), to_y(y)) for x, y in points] for name, points in kept.items()}
    return Chart(title, axes, scaled, x_ticks, y_ticks, note)


# ------------------------------------------------------------------------------ the parts


def _charts(report: Report) -> list[Chart | None]:
    load = report["load"]
    timeline = load["timeline"]
    seconds = "seconds after the warm-up"
    over_time: Mapping[str, Points] = {
        p: [(e["at"], 1e3 * e["latency"][p]) for e in timeline if e["latency"][p] is not None]
        for p in PERCENTILES
        if p != "p99.9"
    }
    by_percentile: Mapping[str, Points] = {
        kind: [(p, 1e3 * value) for p, value in curve] for kind, curve in load["curves"].items()
    }
    # The last interval may be too short for a rate.
    whole = [each for each in timeline if each["seconds"] > 0.5] or timeline[:-1]
    requests: Mapping[str, Points] = {
        "requests a second": [(e["at"], e["requests"] / e["seconds"]) for e in whole],
        "failures a second": [(e["at"], e["failures"] / e["seconds"]) for e in whole],
        "in flight": [(e["at"], e["in_flight"]) for e in whole],
    }
    charts = [
        draw(
            "Latency over time",
            (seconds, "latency, ms"),
            over_time,
            ("linear", "log"),
            "By when requests were due: those that waited behind a stall count where they waited.",
        ),
        draw(
            "Latency by percentile", ("percentile", "latency, ms"), by_percentile, ("nines", "log")
        ),
        draw("Requests", (seconds, "requests"), requests),
    ]
    if "ramp" in report:
        charts.append(_ramp(report["ramp"]))
    return charts


def _ramp(ramp: dict[str, Any]) -> Chart | None:
    points = sorted((step["rate"], 100 * (1 - step["within"])) for step in ramp["steps"])
    allowed = 100 - ramp["slo_percentile"]
    lines: Mapping[str, Points] = {
        "measured": points,
        "allowed": [(points[0][0], allowed), (points[-1][0], allowed)],
    }
    slow = f"% failed or slower than {1e3 * ramp['slo_seconds']:g} ms"
    note = "A step ends as soon as it cannot meet the objective any more."
    return draw("The ramp", ("requests a second", slow), lines, ("log", "linear"), note)


def _scale(
    values: Sequence[float], scale: str
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Return a function to [0, 1], and the ticks as position and label."""
    low, high = min(values), max(values)
    if scale == "nines":
        span = max(_nines(high), 1.0)
        return lambda p: _nines(p) / span, [
            (_nines(p) / span, f"p{p:g}") for p in _NINES if _nines(p) <= span
        ]
    if scale == "log":
        steps = [m * 10.0**e for e in range(-4, 9) for m in (1, 2, 5)]
        low = max((s for s in steps if s <= low * 1.0001), default=low)
        high = min((s for s in steps if s >= high * 0.9999 and s > low), default=10 * low)
        shown = [s for s in steps if low <= s <= high]
        if len(shown) > 8:
            shown = [s for s in shown if f"{s:e}"[0] == "1"]
        span = math.log(high / low)
        return lambda v: math.log(v / low) / span, [
            (math.log(s / low) / span, f"{s:,g}") for s in shown
        ]
    rough = (high or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if rough <= m * power * 1.0001)
    top = step * math.ceil((high or 1.0) / step - 1e-9)
    return lambda v: v / top, [
        (v / top, f"{round(v, 9):,g}") for v in np.arange(0.0, top + step / 2, step).tolist()
    ]


def _nines(percent: float) -> float:
    """Each further nine is as wide as the one before."""
    return -math.log10(max(1 - percent / 100, 1e-9))
