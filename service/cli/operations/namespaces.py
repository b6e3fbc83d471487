"""Command `heed namespaces`: create, list and remove namespaces of an installation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, open_directory, open_store, out
from service.domain.errors import HeedError
from service.domain.names import DEFAULT_NAMESPACE
from service.runtime import namespace_folders
from service.runtime.data_layout import MODELS_FOLDER, NAMESPACES_FOLDER

namespaces = typer.Typer(
    help="Create, list and remove namespaces: each has its own items, users, events, scenarios, "
    "models and jobs. The namespace default is the data directory itself, and is always there.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="1 to 64 of a-z, 0-9, '_' and '-'.")]


@namespaces.command("create")
def create(name: Name, data: Data = DATA) -> None:
    """Create an empty namespace; a running service serves it at once."""
    with open_directory(data) as directory:
        folder = directory.create(name)
    out.print(f"Namespace {name} created in {folder}.", markup=False, soft_wrap=True)


@namespaces.command("list")
def list_namespaces(data: Data = DATA) -> None:
    """List the namespaces with their records, their bytes on this disk and the model that serves.

    With HEED_STORE the records are in the database, and only copies and caches on this disk.
    """
    from rich.table import Table

    table = Table()
    table.add_column("namespace", no_wrap=True)  # for copying
    for name in ("items", "users", "events", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    with open_directory(data) as directory:
        for name in [DEFAULT_NAMESPACE, *directory.names()]:
            table.add_row(name, *_described(directory, data, name))
    out.print(table)


@namespaces.command("remove")
def remove(
    name: Name,
    data: Data = DATA,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False,
) -> None:
    """Remove a namespace and every byte of it. A running service refuses its requests at once.

    Nothing brings it back. A namespace in which a training runs is not removed.
    """
    from service.domain.settings import Settings
    from service.stores.opening import is_shared

    with open_directory(data) as directory:
        folder = directory.find(name)
        if not yes and name != DEFAULT_NAMESPACE:
            items, users, events, size, _ = _described(directory, data, name)
            place = " of the database, for all machines" if is_shared(Settings.read().store) else ""
            out.print(
                f"This deletes {items} items, {users} users and {events} events{place}, "
                f"{size} in {folder}.",
                markup=False,
                soft_wrap=True,
            )
            if typer.prompt(f"Type {name} to remove it", default="", show_default=False) != name:
                out.print("Nothing was removed.")
                raise typer.Exit(1)
        directory.remove(name)
    out.print(f"Namespace {name} removed.", markup=False, soft_wrap=True)


def _described(directory: Any, data: Path, name: str) -> tuple[str, str, str, str, str]:
    """Return the items, users, events, bytes and model of a namespace, as they are printed."""
    from service.snapshots.shared_registry import open_registry

    folder = directory.find(name) if name != DEFAULT_NAMESPACE else data
    size = namespace_folders.folder_size(folder)
    if name == DEFAULT_NAMESPACE:
        size -= namespace_folders.folder_size(folder / NAMESPACES_FOLDER)
    shown = f"{size / 1e6:.1f} MB"
    try:
        if directory.token(name) is None:
            return "–", "–", "–", shown, "no store"
        with open_store(folder) as store:
            counts = asyncio.run(store.counts())
            model = ""
            if store.shared is not None or (folder / MODELS_FOLDER).is_dir():
                model = open_registry(folder, store).current() or ""
    except HeedError as error:
        return "?", "?", "?", shown, str(error)
    items, users, events = (f"{counts[each]:,}" for each in ("items", "users", "events"))
    return items, users, events, shown, model
