"""Commands of the benchmarks of a loaded server: `overload`, `interference` and `largest`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import out, set_threads
from service.lab.load_options import DEFAULT_MIX

QUESTIONS = "score=4,recommend=2,search=3"  # the default mix of `heed loadtest` without its writes

Copied = Annotated[
    Path | None, typer.Option("--data", help="Use the model and data here, not generated ones.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Repeats; the median of their ratios counts.")]
Seconds = Annotated[float, typer.Option(min=1, help="Of each load.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")]


def overload(
    data: Copied = None,
    mix: Annotated[str, typer.Option(help="Shares by kind of request.")] = DEFAULT_MIX,
    deadline: Annotated[float, typer.Option(min=0.05, help="HEED_DEADLINE, seconds.")] = 1.0,
    rounds: Rounds = 3,
    seconds: Seconds = 8.0,
    json_file: JsonFile = None,
) -> None:
    """Load a service with once, twice and three times its capacity, in an open loop.

    The capacity is that of a closed loop in the same round. Server and client are on a core each.
    """
    set_threads(1)
    from tests.benchmarks.harness import tables
    from tests.benchmarks.harness.conditions import environment, exit_on_sigterm
    from tests.benchmarks.harness.processes import Cores, serving
    from tests.benchmarks.harness.timing import spread
    from tests.benchmarks.http import overload as measuring
    from tests.benchmarks.workload.data import prepare_data

    cores = Cores.choose()
    with exit_on_sigterm(), prepare_data(data) as ground:
        arguments = ["-m", "service.cli", "serve", "--data", str(ground.data), "--port", "0"]
        settings = environment() | {"HEED_DEADLINE": str(deadline)}
        with (
            serving(arguments, core=cores.server, environment=settings) as server,
            tables.stage(out, "overload") as progress,
        ):
            found = measuring.measure(
                server,
                cores,
                deadline=deadline,
                mix=mix,
                rounds=rounds,
                seconds=seconds,
                progress=progress,
            )
    tables.table(
        out,
        f"Load beside capacity, {tables.rate(spread(found.capacity))} requests a second",
        measuring.COLUMNS,
        found.rows(),
        caption=f"{cores}; load average {os.getloadavg()[0]:.1f}",
    )
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=1) + "\n")


def interference(
    data: Copied = None,
    mix: Annotated[str, typer.Option(help="Shares by kind of request.")] = QUESTIONS,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 60.0,
    deadline: Annotated[float, typer.Option(min=0.05, help="HEED_DEADLINE, seconds.")] = 1.0,
    rounds: Rounds = 3,
    seconds: Seconds = 8.0,
    json_file: JsonFile = None,
) -> None:
    """Measure questions beside bulk requests, an import and a training, over questions alone."""
    set_threads(1)
    from tests.benchmarks.harness import tables
    from tests.benchmarks.harness.conditions import environment, exit_on_sigterm
    from tests.benchmarks.harness.processes import Cores, serving
    from tests.benchmarks.http import interference as measuring
    from tests.benchmarks.workload.data import prepare_data

    cores = Cores.choose()
    with exit_on_sigterm(), prepare_data(data) as ground:
        arguments = ["-m", "service.cli", "serve", "--data", str(ground.data), "--port", "0"]
        settings = environment() | {"HEED_DEADLINE": str(deadline)}
        with (
            serving(arguments, core=cores.server, environment=settings) as server,
            tables.stage(out, "interference") as progress,
        ):
            found = measuring.measure(
                ground,
                server,
                cores,
                rate=rate,
                mix=mix,
                rounds=rounds,
                seconds=seconds,
                deadline=deadline,
                progress=progress,
            )
    tables.table(
        out,
        f"{rate:g} questions a second beside other work",
        measuring.COLUMNS,
        found.rows(),
        caption=f"{cores}; load average {os.getloadavg()[0]:.1f}",
    )
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_dict(), indent=1) + "\n")


def largest(
    attackers: Annotated[int, typer.Option(min=1, help="Connections of one key.")] = 1,
    only: Annotated[str, typer.Option(help="Questions with this in their names.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="HEED_WORKERS.")] = 1,
    seconds: Seconds = 3.0,
) -> None:
    """Ask the largest questions by one key, beside small ones of another key and liveness.

    The catalogue has 20,000 generated items. The attackers ask as fast as they are answered.
    """
    set_threads(1)
    from tests.benchmarks.harness import tables
    from tests.benchmarks.harness.conditions import environment, exit_on_sigterm
    from tests.benchmarks.harness.processes import serving
    from tests.benchmarks.http import largest as measuring
    from tests.support.largest import make_data

    with exit_on_sigterm(), tempfile.TemporaryDirectory(prefix="heed-bench-") as folder:
        data = make_data(Path(folder))
        tokens = measuring.issue_keys(data)
        arguments = ["-m", "service.cli", "serve", "--data", str(data), "--port", "0"]
        settings = environment() | {"HEED_WORKERS": str(workers), "HEED_DEADLINE": "1"}
        with (
            serving(arguments, core=None, environment=settings) as server,
            tables.stage(out, "largest questions") as progress,
        ):
            found = list(
                measuring.measure(
                    server.port,
                    tokens,
                    only=only,
                    attackers=attackers,
                    seconds=seconds,
                    progress=progress,
                )
            )
    tables.table(
        out,
        f"Beside {attackers} of one key, {workers} workers",
        measuring.COLUMNS,
        [each.row(found[0]) for each in found],
        caption=f"load average {os.getloadavg()[0]:.1f}",
    )
