"""Progress bars of commands that read or write rows. Imports no heavy library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from service.datasets.base import Dataset

RateCallback = Callable[[str, int, int | None], None]


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
def rate_bars(console: Console, unit: str) -> Iterator[RateCallback]:
    """Draw a count and its rate for one stage after the other.

    Yields a function that takes the stage, the count and its total, None where it is unknown.
    """
    with Progress(*columns(), console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[stage] = bar.add_task(stage, total=None, note="")
            speed = bar.tasks[tasks[stage]].speed
            note = f"{speed:,.0f} {unit}/s" if speed else ""
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield show
