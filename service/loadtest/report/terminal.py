"""What a load test says on the screen: progress while it runs, tables and warnings at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.loadtest.figures import Slo
from service.loadtest.material import Told
from service.loadtest.report.words import (
    COLUMNS,
    STAGES_NOTE,
    counted,
    described,
    failures,
    latency_rows,
    milliseconds,
    sentences,
    stage_rows,
    verdicts,
)
from service.loadtest.sending import Sending

_EVERY = 0.5  # seconds between two looks at the progress: drawing it makes requests late


@contextmanager
def stage(console: Console, name: str) -> Iterator[Told]:
    """A progress bar while something is measured; it is told how much is done, and of what."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(
    console: Console,
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    caption: str | None = None,
    left: int = 1,
) -> None:
    """A table whose first `left` columns are words and whose others are numbers."""
    grid = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for place, name in enumerate(columns):
        grid.add_column(name, justify="left" if place < left else "right")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


@contextmanager
def progress(
    console: Console, name: str, sending: Sending, seconds: float
) -> Iterator[Callable[[], None]]:
    """A bar over the time, and what is in flight; drawn by the function that it yields."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    drawn = 0.0
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(name, total=seconds, note="")

        def tick() -> None:
            nonlocal drawn
            if time.monotonic() - drawn < _EVERY:
                return
            note = f"{sending.in_flight:,} in flight, {sending.answered:,} answered"
            note += f", [red]{sending.failed:,} failed[/]" if sending.failed else ""
            bar.update(task, completed=min(sending.now, seconds), note=note, refresh=True)
            drawn = time.monotonic()

        yield tick


def step(console: Console, found: Mapping[str, Any], slo: Slo) -> None:
    """One step of a ramp, as a line."""
    at = found["latency"][f"p{slo.percentile:g}"] if f"p{slo.percentile:g}" in COLUMNS else None
    verdict = "[green]holds[/]" if found["held"] else "[red]breaks[/]"
    errors = f", {counted(found['errors'])}" if found["errors"] else ""
    shown = f", p{slo.percentile:g} {milliseconds(at)} ms" if at is not None else ""
    console.print(
        f"{found['rate']:>9,.1f} a second {verdict}: {100 * found['within']:.2f} % within "
        f"{1e3 * slo.seconds:g} ms{shown}{errors}",
        highlight=False,
    )


def data(console: Console, found: Mapping[str, Any]) -> None:
    """What is loaded, by what."""
    table(console, "What is loaded", ("what", "value"), described(found), left=2)


def everything(console: Console, found: Mapping[str, Any]) -> None:
    """All that was found."""
    load = found["load"]
    table(
        console,
        "Latency in ms, from when each request was due to its whole answer",
        ("request", "sent", "failed", *COLUMNS),
        latency_rows(load["kinds"]),
        caption=" ".join(sentences(found)),
    )
    if failed := failures(load):
        columns = ("request", "status or error", "times", "the first answer")
        table(console, "What failed", columns, failed, left=4)
    if load["stages"]:
        table(
            console,
            "Where the time went, in ms: p50 and p99 of each stage (Server-Timing) and of the rest",
            ("stage", *(f"{kind} {p}" for kind in load["stages"] for p in ("p50", "p99"))),
            stage_rows(load["stages"]),
            caption=STAGES_NOTE,
        )
    for line in verdicts(found):
        console.print(line, highlight=False, soft_wrap=True)
    for line in found["warnings"]:
        console.print("[bold yellow]warning:[/]", end=" ")
        console.print(line, highlight=False, markup=False, soft_wrap=True)
