"""Output on the terminal: progress during the load, tables and warnings at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.loadtest import report as reports
from service.loadtest.options import Slo


@contextmanager
def progress(console: Console, label: str) -> Iterator[Callable[..., None]]:
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
    """Print a table; words are aligned left and numbers right."""
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
    """Print a line about one step of a ramp."""
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
    """Print the results."""
    for table in reports.tables(report):
        print_table(console, table)
    console.print(report["verdict"], style="bold", highlight=False, markup=False, soft_wrap=True)
    for line in reports.conclusions(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report["warnings"]:
        console.print("[bold yellow]warning:[/]", end=" ")
        console.print(line, highlight=False, markup=False, soft_wrap=True)
