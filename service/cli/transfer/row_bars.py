"""Progress bars of commands that read or write rows. Imports no heavy library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from models.compute.progress import ProgressCallback
from service.datasets.base import Dataset


def columns() -> tuple[ProgressColumn, ...]:
    """Columns of all bars: description, bar, percentage, the task's field `note`, time left."""
    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )


@contextmanager
def reading_bar(console: Console, source: Dataset) -> Iterator[Callable[[str, int], None]]:
    """Draw the bytes read of a data set; yield a function that takes the stage and its rows."""
    with Progress(*columns(), console=console, transient=True) as bar:
        task = bar.add_task(source.name, note="")

        def show(stage: str, rows: int) -> None:
            bar.update(
                task,
                description=f"{source.name}: {stage}",
                completed=source.progress.done,
                total=source.progress.total,
                note=f"{rows:,} rows",
            )

        yield show


@contextmanager
def rate_bar(console: Console, description: str, unit: str) -> Iterator[ProgressCallback]:
    """Draw a count and its rate; yield a function that takes the count and its total."""
    with Progress(*columns(), console=console, transient=True) as bar:
        task = bar.add_task(description, total=None, note="")

        def show(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            note = f"{speed:,.0f} {unit}/s" if speed else ""
            bar.update(task, completed=done, total=total, note=note)

        yield show
