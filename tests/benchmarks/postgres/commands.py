"""The command `postgres` of the benchmarks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import out, set_threads
from service.domain.errors import Invalid

_ALL = "growth,score,appends,replicas"


def postgres(
    events: Annotated[
        str, typer.Option(help="Of each database that grows, separated by commas.")
    ] = "100000,10000000",
    items: Annotated[int, typer.Option(min=100, help="Of the catalogue in each of them.")] = 20_000,
    mean: Annotated[int, typer.Option(min=2, help="Events of a user there, on average.")] = 100,
    parts: Annotated[str, typer.Option(help=f"Of {_ALL}, separated by commas.")] = _ALL,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            help="postgresql:// URL of a running server, whose user may create databases. "
            "Without it one is started.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Serve a copy of this, not generated data.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the rounds.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Measure the PostgreSQL store: reads, sizes and appends by the number of events.

    And over HTTP beside SQLite: a score, durable appends, and two replicas beside one. Ten million
    events take a quarter of an hour and 5 GB of disk in the folder of temporary files.
    """
    set_threads(1)
    from tests.benchmarks.postgres import runs

    chosen = _split(parts)
    unknown = set(chosen) - set(runs.PARTS)
    if unknown or not chosen:
        raise Invalid("", f"--parts must be of {_ALL}; it is {parts!r}")
    effort = runs.Effort(events=_sizes(events), items=items, mean=mean)
    if quick:
        effort = replace(effort, growth_rounds=3, score_rounds=5, append_rounds=3, replica_rounds=3)
    found = runs.run(
        out,
        effort,
        store=store,
        data=data,
        parts=[part for part in runs.PARTS if part in chosen],
    )
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(each.replace("_", "")) for each in _split(text))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1_000:
        raise Invalid("", f"--events must be numbers from 1000, separated by commas: {text!r}")
    return sizes


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
