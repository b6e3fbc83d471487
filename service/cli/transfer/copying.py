"""Command `heed copy`: what a store holds, to another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from service.cli.console import JsonFile, Namespace, out, put_requests_first, write_json
from service.domain.errors import Conflict, Invalid
from service.domain.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from service.maintenance.copying import CopyProgress, StoreCopy
    from service.maintenance.store_places import StorePlace

_LEFT_OUT = (
    "Not copied, since they are in the data directory and not in the store: models, fitted search "
    "parameters, records of trainings, caches and settings."
)


def copy(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Data directory (or sqlite:DIRECTORY, or the file of a store), or "
            "postgresql://USER@HOST/DATABASE; a password is read from PGPASSFILE or ~/.pgpass.",
        ),
    ],
    target: Annotated[
        str,
        typer.Option("--to", metavar="TARGET", help="A place of the same kinds; it must be empty."),
    ],
    namespace: Namespace = DEFAULT_NAMESPACE,
    all_namespaces: Annotated[
        bool,
        typer.Option("--all-namespaces", help="Copy every namespace of SOURCE, under its name."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Copy a store to another: from SQLite to PostgreSQL, back, or between two of a kind.

    Everything is copied that a store holds: events with their ids and order, items with
    embeddings, profiles, all versions of scenarios, API keys, the ledger of forgotten users, and
    imports, which can be undone at TARGET too. Models and what else is in the data directory are
    not copied: move them yourself.

    Stop the service of SOURCE first: what is written meanwhile makes the stores differ, and TARGET
    is not served then. An interrupted command goes on where it stopped when it is run again. The
    exit code is 0 once counts and digests of both are the same.
    """
    put_requests_first()
    from service.maintenance.store_places import parse_place

    ours, theirs = parse_place(source), parse_place(target)
    names = ours.namespaces() if all_namespaces else [namespace]
    if all_namespaces and not names:
        raise Invalid("", f"--from: there is no store in {ours.name}")
    report: dict[str, Any] = {}
    differing: list[str] = []
    for name in names:  # all, before the first is copied
        asyncio.run(_begin(ours, theirs, name, with_keys=all_namespaces))
    # A service opens `default` first, which is whole only when all are.
    for name in sorted(names, key=lambda name: name == DEFAULT_NAMESPACE):
        started = time.monotonic()
        done = asyncio.run(_copy(ours, theirs, name))
        seconds = time.monotonic() - started
        _describe(name, done, seconds)
        differing += [f"{name}: {table}" for table in done.differing]
        report[name] = {
            "seconds": round(seconds, 1),
            "copied": {"users": done.users, "events": done.events},
            "tables": {
                each.name: {"source": each.source._asdict(), "target": each.target._asdict()}
                for each in done.tables
            },
        }
    write_json(json_file, {"namespaces": report, "differing": differing})
    if differing:
        out.print(
            f"{ours.name} and {theirs.name} differ in {', '.join(differing)}: something was "
            "written meanwhile. Stop the service, and copy to an empty place.",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)
    out.print(f"{theirs.name} holds what {ours.name} does.", markup=False, soft_wrap=True)
    out.print(_LEFT_OUT, soft_wrap=True)


async def _begin(ours: StorePlace, theirs: StorePlace, name: str, *, with_keys: bool) -> None:
    """Mark the target of a namespace as an unfinished copy."""
    from service.maintenance.copying import begin_copy

    origin, own_id = ours.identity(name), ours.namespace_id(name)
    if with_keys and theirs.namespace_id(name) not in (None, own_id):
        raise Conflict(
            f"{theirs.name} has a namespace {name} of its own, which keys of {ours.name} do not "
            "open: remove it there, so that the copy creates it, or copy without --all-namespaces"
        )
    await ours.open(name).close()  # fails before the target is created
    target = theirs.open(name, own_id, is_target=True)
    try:
        if theirs.identity(name) == origin:
            raise Invalid("", "--from and --to are the same store")
        await begin_copy(target, origin)
    finally:
        await target.close()


async def _copy(ours: StorePlace, theirs: StorePlace, name: str) -> StoreCopy:
    """Copy a namespace, and compare."""
    from service.maintenance.copying import copy_store

    source = ours.open(name)
    try:
        target = theirs.open(name, is_target=True)
        try:
            with _bar(name) as progress:
                return await copy_store(source, target, ours.identity(name), progress=progress)
        finally:
            await target.close()
    finally:
        await source.close()


def _describe(name: str, done: StoreCopy, seconds: float) -> None:
    table = Table(title=f"namespace {name}", title_justify="left")
    for column in ("table", "digest"):
        table.add_column(column, no_wrap=True)
    for column in ("source", "target"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for each in done.tables:
        table.add_row(
            each.name.replace("_", " "),
            each.source.digest,
            f"{each.source.records:,}",
            f"{each.target.records:,}",
            "same" if each.is_same else "[bold red]differs[/]",
        )
    out.print(table)
    out.print(f"{done.events:,} events of {done.users:,} users copied in {seconds:,.1f} s")


@contextmanager
def _bar(name: str) -> Iterator[CopyProgress]:
    """Draw the stage, its share and its rate; yield a function that takes them."""
    from rich.progress import Progress

    from service.cli.transfer.row_bars import columns

    with Progress(*columns(), console=out, transient=True) as bar:
        task, latest = bar.add_task("", total=None, note=""), ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal task, latest
            if stage != latest:
                bar.remove_task(task)
                task, latest = bar.add_task(f"{name}: {stage}", total=None, note=""), stage
            speed = bar.tasks[0].speed
            note = f"{done:,}" + (f"  {speed:,.0f}/s" if speed else "") if done else ""
            bar.update(task, completed=done, total=total or None, note=note)

        yield show
