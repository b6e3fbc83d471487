"""Tables, sentences, warnings and charts of a load test, for the terminal and an HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from jinja2 import Environment, PackageLoader, select_autoescape

from service.lab.open_loop import ALL, OUTSIDE, PERCENTILES, REST, WAITED

_TICKS = 5  # on an axis, about
_FEW_POINTS = 40  # points that are also drawn one by one

_OUTCOMES = ("requests", "refusals", "failures")  # counted in each interval of a timeline

Values = Sequence[float | None]


class Frame(NamedTuple):
    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


FRAME = Frame(440, 230, 56, 428, 10, 186)


class Mark(NamedTuple):
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
        drawn.append(Line(name, points, dots if len(dots) <= _FEW_POINTS else ()))
    return Chart(
        title=title,
        x=x,
        y=y,
        x_marks=[Mark(across(value), text) for value, text in _marks(x_low, x_high, x_step)],
        y_marks=[Mark(up(value), text) for value, text in _marks(0.0, y_high, y_step)],
        lines=drawn,
        limit=None if limit is None else up(limit),
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


Report = Mapping[str, Any]  # as `run` returns it

_LATE = 0.1  # share of a latency above which the generator's own part is a warning
_EXCEPTIONS = 5  # requests that a step of a ramp must allow to be slow, to say much
_FEW = 1_000  # requests below which one in a thousand is none


class ReportTable(NamedTuple):
    """Rows of cells; the first `text_columns` are words, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    note: str = ""
    text_columns: int = 1


def render_page(report: Report) -> str:
    """Render a report as one HTML file without scripts or links."""
    ramp = [_ramp(report)] if "ramp" in report else []
    return _TEMPLATES.get_template("page.html").render(
        report=report,
        conclusions=conclusions(report),
        charts=draw_charts(report),
        frame=FRAME,
        tables=[*tables(report), *ramp, setup(report)],
    )


def setup(report: Report) -> ReportTable:
    rows = [line.split(": ", 1) for line in _lines("setup.txt", report)]
    return ReportTable("Setup", ("", ""), rows, text_columns=2)


def tables(report: Report) -> list[ReportTable]:
    """Latency by kind of request, refusals, errors, and stages of the server, where there are."""
    load = report["load"]
    found = [_latencies(load)]
    for title, what in (("Refused", "refused"), ("Errors", "errors")):
        rows = [
            (name, why, load["details"].get(f"{name} {why}", ""), f"{count:,}")
            for name, each in load["kinds"].items()
            if name != ALL
            for why, count in each[what].items()
        ]
        if rows:
            columns = ("request", "status or error", "first response", "times")
            found.append(ReportTable(title, columns, rows, text_columns=3))
    if load["stages"]:
        found.append(_stages(load["stages"]))
    return found


def verdict(report: Report) -> str:
    """Say in a few sentences what the server did, which limit failed first, and what to do next."""
    load, ramp = report["load"], report.get("ramp")
    step, sent = load["kinds"][ALL], load["kinds"][ALL]["requests"]
    if report["ended"] == "silent":
        said = f"Heed stopped answering, after {step['successes']:,} of {sent:,} requests."
        return f"{said} Next: look at its log, and at /health/ready."
    _, refused, failed = _counts(step)
    said = (
        f"Heed answered {_rate(load['successes_per_second'])} requests a second, "
        f"p99 {milliseconds(step['latency']['p99'])} ms, and refused {_share(refused, sent)}."
        if step["successes"]
        else f"Heed answered none of {sent:,} requests, and refused {_share(refused, sent)}."
    )
    if failed:
        said += f" {_share(failed, sent)} failed, most with {next(iter(step['errors']))}."
    at, details = "", load["details"]
    if ramp and ramp["held"] is None:
        said += f" {ramp['slo']} held at no rate."
    elif ramp and ramp["broke"]:
        step = next(each for each in ramp["steps"] if each["rate"] == ramp["broke"])
        at, details = f" at {_rate(ramp['broke'])} a second", step["details"]
    elif ramp:
        return f"{said} Next: raise --max-rate, for no rate broke the objective."
    return f"{said} {_limit(report, step, details, at)}"


def conclusions(report: Report) -> list[str]:
    return _lines("conclusions.txt", report)


def warnings(report: Report) -> list[str]:
    load, lines = report["load"], []
    generator, latency = load["generator"], load["kinds"][ALL]["latency"]

    def exceeds(delay: Mapping[str, float | None], p: str) -> bool:
        return (delay[p] or 0.0) > _LATE * (latency[p] or math.inf)

    late = [p for p in ("p50", "p95", "p99") if exceeds(generator["late"], p)]
    if late:
        delays = ", ".join(
            f"{p} {milliseconds(generator['late'][p])} of {milliseconds(latency[p])} ms"
            for p in late
        )
        lines.append(
            f"the generator was late: its own delay is {delays}. Give it a core of its own or "
            "another machine, or lower --rate"
        )
    if exceeds(waited := generator["waited_for_a_connection"], "p99"):
        lines.append(
            f"1 % of requests waited {milliseconds(waited['p99'])} ms or longer for a connection: "
            f"{report['options']['connections']:,} (--connections) were busy, or new ones opened"
        )
    if strays := report.get("data", {}).get("strays"):
        lines.append(
            "an earlier load test left users; unless it still runs, remove them by "
            + " and ".join(strays)
        )
    if "ramp" in report:
        steps, allowed = report["ramp"]["steps"], _LATE * report["ramp"]["slo_seconds"]
        lines += [
            f"at {step['rate']:,.1f} a second the objective broke with sends up to "
            f"{milliseconds(step['late']['p99'])} ms late (p99): the generator may be the limit"
            for step in steps
            if not step["held"] and (step["late"]["p99"] or 0.0) > allowed
        ]
        # Steps that ended early have fewer requests, and need no more.
        whole = [step["requests"] for step in steps if step["ended"] == "completed"]
        few = min(whole, default=_FEW)
        slow = few * (1 - report["ramp"]["slo_percentile"] / 100)
        if slow < _EXCEPTIONS:
            lines.append(
                f"of a step of {few:,} requests {slow:.1f} may be slow: chance decides; raise "
                "--duration or --rate"
            )
    if 0 < load["kinds"][ALL]["successes"] < _FEW:
        lines.append(f"fewer than {_FEW:,} responses: p99.9 is about the slowest; load for longer")
    return lines


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


# ------------------------------------------------------------------------------ the parts


def _limit(report: Report, step: Mapping[str, Any], details: Mapping[str, str], at: str) -> str:
    """Say which limit of a load failed first, or how to find it, and what to do next."""
    _, refused, failed = _counts(step)
    workers = report["data"].get("worker_up")
    now = f", now {workers}" if workers else ""
    more = f"Next: start Heed with more workers, one for each core (HEED_WORKERS{now})."
    objective = step if at else report["load"].get("slo", {})
    slow = step["requests"] * (1 - objective.get("within", 1.0)) - refused - failed
    if failed > max(refused, slow):
        share, why = _share(failed, step["requests"]), next(iter(step["errors"]))
        said = f"The first limit{at}: {share} failed, most with {why}. " if at else ""
        return f"{said}Next: look at Errors, and in the log of the service."
    if refused > slow:
        body = next(details[key] for key in details if key.split()[-1] in step["refused"])
        detail = re.search(r'"detail": ?("(?:[^"\\]|\\.)*")', body)
        status = next(iter(step["refused"]))
        if "Rate Limited" in body:
            more = "Next: give the API key a higher --rate, or none."
        said = f"{status} “{orjson.loads(detail[1]).rstrip('.')}”" if detail else status
        share = f"{_share(refused, step['requests'])} were refused, " if at else ""
        return f"The first limit{at}: {share}{said}. {more}"
    if at or "ramp" in report or not objective.get("held", True):
        if at and (step["late"]["p99"] or 0.0) > _LATE * report["ramp"]["slo_seconds"]:
            more = "Next: give the load test a core of its own and run it again: it sent too late."
        return f"The first limit{at}: p99 was {milliseconds(step['latency']['p99'])} ms. {more}"
    return "Next: --ramp finds the highest rate that holds."


def _counts(each: Mapping[str, Any]) -> tuple[int, int, int]:
    return each["requests"], sum(each["refused"].values()), sum(each["errors"].values())


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if part else "none"


def _latencies(load: Mapping[str, Any]) -> ReportTable:
    late = load["generator"]["late"]
    rows = [
        [name, *(f"{count:,}" for count in _counts(each))]
        + [milliseconds(each["latency"][p]) for p in PERCENTILES]
        for name, each in load["kinds"].items()
    ]
    note = (
        f"{load['requests_per_second']:,.1f} requests a second were sent, "
        f"{load['successes_per_second']:,.1f} succeeded; the others have no latency. The generator "
        f"sent requests {milliseconds(late['p50'])} ms (p50), {milliseconds(late['p99'])} ms (p99) "
        f"and {milliseconds(late['max'])} ms (max) late, which is part of every latency."
    )
    title = "Latency in ms, from the time at which each request was due to its complete response"
    return ReportTable(title, ("request", "sent", "refused", "failed", *PERCENTILES), rows, note)


def _stages(stages: Mapping[str, Any]) -> ReportTable:
    """Time by stage of all kinds of request, the stages of the server first."""
    last = (REST, OUTSIDE, WAITED)
    names = dict.fromkeys(name for each in stages.values() for name in each if name not in last)
    columns = [(kind, p) for kind in stages for p in ("p50", "p99")]
    rows = [
        [name, *(milliseconds(stages[kind].get(name, {}).get(p)) for kind, p in columns)]
        for name in (*names, *last)
    ]
    note = (
        "Percentiles of single stages do not add up to those of the latency. "
        f"“{REST}” is its total less its stages, “{OUTSIDE}” the time of the response beyond "
        f"that total, “{WAITED}” the time between due and sent."
    )
    headings = ("stage", *(f"{kind} {p}" for kind, p in columns))
    return ReportTable("Time by stage (Server-Timing), in ms", headings, rows, note)


def _ramp(report: Report) -> ReportTable:
    percentiles = ("p50", "p95", "p99")
    columns = ("requests a second", "held", "sent", "refused", "failed", "% in time", *percentiles)
    rows = [
        (
            f"{step['rate']:,.1f}",
            "yes" if step["held"] else "no",
            *(f"{count:,}" for count in _counts(step)),
            f"{100 * step['within']:.2f}",
            *(milliseconds(step["latency"][p]) for p in percentiles),
            milliseconds(step["late"]["p99"]),
        )
        for step in report["ramp"]["steps"]
    ]
    note = "A step ends as soon as it cannot meet the objective any more."
    headings = (*columns, "send delay p99")
    return ReportTable("Steps of the ramp, times in ms", headings, rows, note)


def _lines(template: str, report: Report) -> list[str]:
    text = _TEMPLATES.get_template(template).render(report=report)
    return [line for line in text.splitlines() if line.strip()]


_TEMPLATES = Environment(
    loader=PackageLoader("service.lab"),
    autoescape=select_autoescape(["html"]),
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "ms": milliseconds,
    "n": lambda number: f"{number:,.0f}",
    "mib": lambda size: f"{size / 2**20:,.0f}",
}
