"""Command line of the drill on a Citus cluster, of which it kills one worker and stops another."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from rich.console import Console

from service.stores.postgres.database.distribution import distribute
from service.stores.postgres.database.migrations import migrate
from tests.distributed.drill import Drill, Fault
from tests.support.citus_databases import MISSING, CitusDatabases

SHARDS = 16
NEEDED = (
    "name commands of a shell that stop one worker and let it go on: --kill-command (SIGKILL to "
    "every process of a worker), --restart-command, --freeze-command (SIGSTOP, of another worker "
    "if there is one) and --thaw-command, or HEED_TEST_KILL, HEED_TEST_RESTART, HEED_TEST_FREEZE "
    "and HEED_TEST_THAW."
)
out = Console(highlight=False, soft_wrap=True)

Command = Annotated[str, typer.Option(help="For a shell.")]


def drill(
    coordinator: Annotated[str, typer.Option(envvar="HEED_TEST_CITUS", help="Its URL.")] = "",
    kill_command: Annotated[str, typer.Option(envvar="HEED_TEST_KILL")] = "",
    restart_command: Annotated[str, typer.Option(envvar="HEED_TEST_RESTART")] = "",
    freeze_command: Annotated[str, typer.Option(envvar="HEED_TEST_FREEZE")] = "",
    thaw_command: Annotated[str, typer.Option(envvar="HEED_TEST_THAW")] = "",
    users: Annotated[int, typer.Option(help="Users of the load.")] = 120,
    clients: Annotated[int, typer.Option(help="Clients at once.")] = 8,
    seconds: Annotated[float, typer.Option(help="Length of each phase.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Only check what is named.")] = False,
) -> None:
    """Load a service over a Citus cluster while workers fail; exit code 1 if a promise broke."""
    if not coordinator:
        _refuse(MISSING)
    if not all((kill_command, restart_command, freeze_command, thaw_command)):
        _refuse(NEEDED)
    faults = [
        Fault("a killed worker", kill_command, restart_command),
        Fault("a worker that hangs", freeze_command, thaw_command),
    ]
    try:
        cluster = CitusDatabases(coordinator, prefix="heed_drill_")
    except (ValueError, psycopg.Error) as error:
        _refuse(str(error))
    if check:
        return
    try:
        url = cluster.create_database()
        with psycopg.connect(url, autocommit=True) as connection:
            migrate(connection)
            distribute(connection, SHARDS)
        with tempfile.TemporaryDirectory(prefix="heed-drill-") as folder:
            made = Drill(
                cluster,
                url,
                Path(folder),
                users=users,
                clients=clients,
                seed=seed,
                seconds=seconds,
            )
            verdict = asyncio.run(made.run(faults))
    finally:
        cluster.drop_databases()
    for line in verdict.seen:
        out.print(line, markup=False)
    for line in verdict.broken:
        out.print(f"BROKEN {line}", style="red", markup=False)
    if verdict.broken:
        raise typer.Exit(1)
    out.print("All promises held.")


def _refuse(reason: str) -> None:
    out.print(f"make distributed: {reason}", markup=False)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(drill)
