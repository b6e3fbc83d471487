"""Command `heed doctor`."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from service.cli.console import DATA, Data, Namespace, out, set_threads
from service.domain.names import DEFAULT_NAMESPACE

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def doctor(
    data: Data = DATA,
    namespace: Namespace = DEFAULT_NAMESPACE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON instead of a table.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Check every page of stores over 256 MiB too.")
    ] = False,
    backup_days: Annotated[
        int, typer.Option(min=1, help="Age in days from which on a backup is old.")
    ] = 7,
) -> None:
    """Find what is wrong with this installation, and say what to do.

    Checks the stores, models, events, settings (HEED_*), disk, clock, permissions and backups, and
    the hit rate of the cache if the service runs; with HEED_STORE the server of the database, its
    replication and its sessions too. It only reads, and the service may be running.

    The exit code is 1 if there is an error or a warning; notes leave it at 0.
    """
    set_threads(1)
    from service.maintenance.doctor.diagnosis import diagnose
    from service.runtime.namespace_folders import find_namespace
    from service.stores.opening import is_shared

    # Other than other commands, it neither migrates a database nor fails without one.
    is_database = is_shared(os.environ.get("HEED_STORE", ""))
    folder = data if is_database else find_namespace(data, namespace)
    findings = diagnose(folder, os.environ, namespace=namespace, full=full, backup_days=backup_days)
    if as_json:
        typer.echo(json.dumps([each._asdict() for each in findings], indent=1))
    elif not findings:
        out.print("Nothing is wrong.")
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_lines=True)
        for name in ("severity", "what", "why it matters", "what to do"):
            table.add_column(name, overflow="fold")
        for each in findings:
            where = "" if each.namespace in (None, "default") else f"{each.namespace}: "
            table.add_row(
                Text(f"{each.severity}\n{each.code}", _COLOURS[each.severity]),
                Text(where + each.what),
                Text(each.why),
                Text(each.todo),
            )
        out.print(table)
    if any(each.severity != "note" for each in findings):
        raise typer.Exit(1)
