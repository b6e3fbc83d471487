"""The course of a load test: sample the service, load it, remove what was written, report."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    track,
)
from rich.table import Table

from service import __version__
from service.domain.timestamps import to_rfc3339
from service.lab import load_report as reports
from service.lab.load_options import Options, Slo, parse_mix
from service.lab.open_loop import (
    ALL,
    PREPARED,
    OpenLoop,
    Recording,
    draw_schedule,
    find_highest_rate,
    summarize,
)
from service.lab.workload import (
    PREFIX,
    Readings,
    Requests,
    ask,
    by_hand,
    delete_all,
    draw_sample,
    open_http,
    read_metrics,
    sample_memory,
    summarize_memory,
)


@contextmanager
def progress_bar(console: Console, label: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar until the block ends, redrawn twice a second: drawing delays requests."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task(label, total=None, note="")

        def show(done: float, total: float, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield show


def print_table(console: Console, table: reports.ReportTable) -> None:
    grid = Table(
        title=table.title,
        title_justify="left",
        caption=table.note or None,
        caption_justify="left",
        show_header=any(table.columns),
    )
    for place, name in enumerate(table.columns):
        grid.add_column(name, justify="left" if place < table.text_columns else "right")
    for row in table.rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)


def show_step(console: Console, step: Mapping[str, Any], slo: Slo) -> None:
    verdict = "[green]holds[/]" if step["held"] else "[red]breaks[/]"
    refused = "".join(f", {count:,} refused ({why})" for why, count in step["refused"].items())
    errors = "".join(f", {count:,} × {error}" for error, count in step["errors"].items())
    console.print(
        f"{step['rate']:>9,.1f} a second {verdict}: {100 * step['within']:.2f} % within "
        f"{1e3 * slo.seconds:g} ms, p99 {reports.milliseconds(step['latency']['p99'])} ms"
        f"{refused}{errors}",
        highlight=False,
    )


def show(console: Console, report: reports.Report) -> None:
    for table in reports.tables(report):
        print_table(console, table)
    console.print(report["verdict"], style="bold", highlight=False, markup=False, soft_wrap=True)
    for line in reports.conclusions(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report["warnings"]:
        console.print("[bold yellow]warning:[/]", end=" ")
        console.print(line, highlight=False, markup=False, soft_wrap=True)


_READINGS = 60  # of the server's memory
_SECOND_LOOK = 1.0  # seconds until unanswered events are written or given up


def run(console: Console, options: Options) -> dict[str, Any]:
    """Load a service, remove what was written, print the report and return it as plain values.

    SIGINT and SIGTERM end the load early; what was measured until then is reported.

    Raises:
        Invalid: for options that make no sense.
        NotFound: when the service has no items or no users.
        Unavailable: when it does not answer, or refuses a request of the mix, before the load.
    """
    shares = parse_mix(options.mix)
    with open_http(options) as http:
        with console.status("reading items and users"):
            sample = draw_sample(http, options.users, options.seed)
        requests = Requests(shares, sample, options)
        counts = {k: v for k, v in read_metrics(http).items() if k.startswith("heed_")}
        report: dict[str, Any] = {
            "started": to_rfc3339(int(time.time() * 1e6)),
            "options": options.as_dict(),
            "mix": shares,
            "distinct_requests": PREPARED,
            "machine": {
                "system": platform.platform(),
                "cores": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "python": platform.python_version(),
                "heed": __version__,
            },
            "data": {
                **{name.removeprefix("heed_"): int(count) for name, count in counts.items()},
                "strays": _strays(options, sample.strays),
                "sampled_users": len(sample.users),
                "sampled_items": len(sample.items),
                "queries": len(sample.queries),
            },
        }
        try:
            report["data"]["model"] = _try_each_kind(http, requests, shares, options)
            print_table(console, reports.setup(report))
            report |= uvloop.run(_load(console, options, requests, http))
        except BaseException:
            for command in _clean(console, http, requests, options)["by_hand"]:
                console.print(f"left by the load test: {command}", markup=False, soft_wrap=True)
            raise
        report["cleaning"] = _clean(console, http, requests, options)
    report["verdict"] = reports.verdict(report)
    report["warnings"] = reports.warnings(report)
    show(console, report)
    return report


# ------------------------------------------------------------------------------ the parts


def _try_each_kind(
    http: httpx.Client, requests: Requests, kinds: Iterable[str], options: Options
) -> str | None:
    """Send one request of each kind; returns the version of the model that answered."""
    model = None
    for kind in kinds:
        path, body = requests.encode(kind, 0)
        json = {"content-type": "application/json"}
        answer = ask(http, "POST", path, content=body, headers=json, timeout=options.timeout)
        model = model or answer.get("model_version")
        requests.acknowledged += kind == "events"
    return model


async def _load(
    console: Console, options: Options, requests: Requests, http: httpx.Client
) -> dict[str, Any]:
    readings: Readings = []
    interval = max(1.0, options.duration / _READINGS)
    sampling = asyncio.create_task(sample_memory(http, interval, readings))
    report = await (_ramp if options.ramp else _at_rate)(console, options, requests)
    sampling.cancel()
    return report | {"memory": summarize_memory(readings)}


async def _at_rate(console: Console, options: Options, requests: Requests) -> dict[str, Any]:
    recording = await _send(console, "load", options.rate, options, requests)
    summary = summarize(recording)
    if (slo := options.slo) is not None:
        within = recording.share_within(slo)
        summary["slo"] = {"slo": str(slo), "within": within, "held": slo.is_met(within)}
    return {"ended": recording.ended, "load": summary}


async def _ramp(console: Console, options: Options, requests: Requests) -> dict[str, Any]:
    """Find the highest rate that meets the objective.

    The statistics are those of that rate; where none met it, of the lowest that was tried.
    """
    slo = options.slo or Slo(99.0, 0.05)
    steps: list[dict[str, Any]] = []
    loads: dict[float, dict[str, Any]] = {}
    ended = "completed"

    async def attempt(rate: float) -> bool | None:
        nonlocal ended
        label = f"load: {rate:,.0f} a second"
        recording = await _send(console, label, rate, options, requests, slo)
        loads[rate] = summary = summarize(recording)
        if recording.ended != "objective missed":
            ended = recording.ended
        within = recording.share_within(slo)
        held = slo.is_met(within) and ended == "completed"
        step = {
            "rate": rate,
            "held": held,
            "within": within,
            "ended": recording.ended,
            "late": summary["generator"]["late"],
            "details": summary["details"],
            **summary["kinds"][ALL],
        }
        steps.append(step)
        show_step(console, step, slo)
        return held if ended == "completed" else None

    held, broke = await find_highest_rate(options.rate, options.max_rate, attempt)
    ramp = {
        "slo": str(slo),
        "slo_seconds": slo.seconds,
        "slo_percentile": slo.percentile,
        "held": held,
        "broke": broke,
        "steps": steps,
    }
    return {"ended": ended, "load": loads[held or min(loads)], "ramp": ramp}


async def _send(
    console: Console,
    label: str,
    rate: float,
    options: Options,
    requests: Requests,
    slo: Slo | None = None,
) -> Recording:
    """Load at a rate behind a progress bar, until its end or a signal."""
    load = OpenLoop(options, draw_schedule(rate, options), requests.encode, slo)
    seconds = options.warmup + options.duration
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, load.stop)
    try:
        with progress_bar(console, label) as progress:

            def on_tick() -> None:
                note = f"{load.in_flight:,} in flight, {load.answered:,} answered"
                note += f", [yellow]{load.refused:,} refused[/]" if load.refused else ""
                note += f", [red]{load.failed:,} failed[/]" if load.failed else ""
                progress(min(load.now, seconds), seconds, note)

            recording = await load.run(on_tick)
            requests.note(recording)
            return recording
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _clean(
    console: Console, http: httpx.Client, requests: Requests, options: Options
) -> dict[str, Any]:
    """Delete what was written unless it is kept; say what is left, and how to remove it.

    Unanswered events may be written after the first look, so that a second one follows.
    """
    paths = requests.written_paths()
    left, taken = paths if options.keep else [], 0
    for look in range(0 if options.keep else 1 + bool(requests.unanswered)):
        if not left:
            time.sleep(look * _SECOND_LOOK)
            shown = track(paths, "taking events back", console=console, transient=True)
            events, left = delete_all(http, shown)
            taken += events
    return {
        "run": requests.run,
        "events": len(requests.written),
        "acknowledged": requests.acknowledged,
        "taken_back": taken,
        "of": "users of the service" if requests.writes_to_users else "users of its own",
        "kept": options.keep,
        "left": left,
        "by_hand": _by_hand(options, left),
    }


def _strays(options: Options, runs: Mapping[str, int]) -> list[str]:
    users = (f"/v1/users/{PREFIX}{run}-{n}" for run, count in runs.items() for n in range(count))
    return _by_hand(options, users)


def _by_hand(options: Options, paths: Iterable[str]) -> list[str]:
    key = any(name.lower() == "authorization" for name, _ in options.headers())
    return [
        f'{command} -H "Authorization: Bearer $HEED_API_KEY"' if key else command
        for command in by_hand(options.url, paths)
    ]
