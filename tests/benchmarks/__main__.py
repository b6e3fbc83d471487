"""The command line of the benchmarks, `make bench`: speed as ratios of one run."""

from __future__ import annotations

import signal
import sys

import torch
import typer
from rich.console import Console

from service.domain.errors import HeedError
from tests.benchmarks.appended import appended
from tests.benchmarks.attention import attention
from tests.benchmarks.compare import compare
from tests.benchmarks.explanations import explanations
from tests.benchmarks.filters import filters
from tests.benchmarks.histories import histories
from tests.benchmarks.ingest import ingest
from tests.benchmarks.interference import interference
from tests.benchmarks.large_catalogue import recommend, search
from tests.benchmarks.largest import largest
from tests.benchmarks.overload import overload
from tests.benchmarks.postgres import postgres
from tests.benchmarks.ready import ready
from tests.benchmarks.rules import rules
from tests.benchmarks.service import service
from tests.benchmarks.workers import workers

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure Heed beside references, each figure a ratio or a median of one run.",
)
for command in (
    *(service, ingest, appended, overload, interference, largest, workers, ready, compare),
    *(recommend, search, filters, rules, attention, histories, postgres, explanations),
):
    app.command()(command)


def run(app: typer.Typer) -> None:
    """Run a command; errors of the domain and of files are one line."""
    # As Ctrl-C does, so that servers and folders do not stay behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    torch.set_num_threads(1)  # a thread a kernel, as the service has
    try:
        app()
    except (HeedError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    run(app)
