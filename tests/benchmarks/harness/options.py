"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path | None, typer.Option("--data", help="Use a copy of this data directory, not generated.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Of each timing, in turns.")]
Requests = Annotated[int, typer.Option(min=1, help="To each server in each round.")]
Seconds = Annotated[float, typer.Option(min=1, help="Of each load.")]
