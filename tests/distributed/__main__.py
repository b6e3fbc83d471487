"""Command line of the drill on a Citus cluster of this machine, whose workers it kills."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from rich.console import Console

from tests.distributed.drill import Drill
from tests.distributed.local_server import LocalServer
from tests.support.citus_databases import MISSING, CitusDatabases

out = Console(highlight=False, soft_wrap=True)


def drill(
    coordinator: Annotated[str, typer.Option(envvar="HEED_TEST_CITUS", help="Its URL.")] = "",
    users: Annotated[int, typer.Option(help="Users of the load.")] = 120,
    clients: Annotated[int, typer.Option(help="Clients at once.")] = 6,
    seconds: Annotated[float, typer.Option(help="Length of each fault.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Kills and hangs, of each so many.")] = 2,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Only check the cluster.")] = False,
) -> None:
    """Load two replicas over a Citus cluster while workers fail; exit code 1 if a promise broke."""
    if not coordinator:
        _refuse(MISSING)
    try:
        cluster = CitusDatabases(coordinator, prefix="heed_drill_")
        workers = {
            group: LocalServer(cluster.worker_url(coordinator, group)) for group in cluster.workers
        }
    except (ValueError, psycopg.Error) as error:
        _refuse(str(error))
    if check:
        return
    with tempfile.TemporaryDirectory(prefix="heed-drill-") as folder:
        try:
            made = Drill(
                cluster.create_database(),
                workers,
                Path(folder),
                users=users,
                clients=clients,
                seed=seed,
                seconds=seconds,
                rounds=rounds,
            )
            asyncio.run(made.run())
        finally:
            cluster.drop_databases()
    for line in made.seen:
        out.print(line, markup=False)
    for line in made.broken:
        out.print(f"BROKEN {line}", style="red", markup=False)
    if made.broken:
        raise typer.Exit(1)
    out.print("All promises held.")


def _refuse(reason: str) -> None:
    out.print(f"make distributed: {reason}", markup=False)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(drill)
