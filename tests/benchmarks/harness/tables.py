"""Tables of benchmarks and the format of figures in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from service.lab.load_report import ReportTable
from service.lab.load_test import print_table
from service.lab.load_test import progress_bar as stage
from tests.benchmarks.harness.timing import Spread

__all__ = ["median", "ms", "part", "rate", "ratio", "seconds", "stage", "table"]


def table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    left: int = 1,
) -> None:
    """Print a table whose first `left` columns are words."""
    print_table(console, ReportTable(title, columns, rows, caption, left))


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
