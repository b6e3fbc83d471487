"""Tables and progress bars of what is measured, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.loadtest.timing import Spread, Told


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


def ratio(found: Spread) -> str:
    """A ratio with its quartiles."""
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def ms(seconds: float) -> str:
    """Milliseconds, without the unit."""
    return f"{1e3 * seconds:.2f}"


def part(found: Spread) -> str:
    """A ratio below 1, as one over what it is."""
    return f"1/{1 / found.median:.1f} [1/{1 / found.high:.1f}, 1/{1 / found.low:.1f}]"


def median(found: Spread) -> str:
    """The median of a time."""
    return seconds(found.median)


def rate(found: Spread) -> str:
    """A rate with its quartiles."""
    return f"{found.median:,.0f} ({found.low:,.0f}–{found.high:,.0f})"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1e3 * value:.2f} ms" if value < 1 else f"{value:.2f} s"
