"""Tables and progress of benchmarks, and the format of figures in their cells."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from rich.console import Console
from rich.progress import track

from service import __version__
from service.lab.load_report import ReportTable
from service.lab.load_test import print_table
from tests.benchmarks.harness.timing import Spread

# Into a pipe or a file, tables keep the width that they need.
OUT = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
_ERR = Console(stderr=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    left: int = 1,
) -> None:
    """Print a table whose first `left` columns are words."""
    print_table(OUT, ReportTable(title, columns, list(rows), caption, left))


def rounds_of(count: int, what: str, first: int = 0) -> Iterator[int]:
    """Yield numbers of rounds behind a progress bar, which is drawn seldom: drawing takes time."""
    numbers = range(first, count)
    yield from track(
        numbers,
        what,
        console=_ERR,
        transient=True,
        refresh_per_second=1,
        disable=not _ERR.is_terminal,
    )


def print_machine(cores: object) -> None:
    """Print what the run was made on, without which figures mean little."""
    packages = ("torch", "faiss-cpu", "fastapi", "uvicorn", "apsw")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    OUT.print(
        f"heed {__version__}, Python {platform.python_version()}, {versions}; "
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores, "
        f"load average {os.getloadavg()[0]:.1f}; {cores}",
        style="dim",
        soft_wrap=True,
    )


def ratio(found: Spread) -> str:
    """A ratio with its quartiles."""
    return f"{found.median:.2f} ({found.low:.2f}–{found.high:.2f})"


def rate(found: Spread) -> str:
    """A rate with its quartiles."""
    return f"{found.median:,.0f} ({found.low:,.0f}–{found.high:,.0f})"


def ms(seconds: float) -> str:
    """Milliseconds, without the unit."""
    return f"{1e3 * seconds:.2f}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    if value < 1e-3:
        return f"{1e6 * value:.0f} µs"
    return f"{1e3 * value:.2f} ms" if value < 1 else f"{value:.2f} s"


def mib(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.0f} MiB"
