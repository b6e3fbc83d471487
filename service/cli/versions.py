"""Command `heed models`: list, activate and prune model versions."""

from __future__ import annotations

from typing import Annotated

import typer

from service.cli.console import DATA, Data, in_namespace, out
from service.cli.shared_store import open_shared_store

versions = typer.Typer(
    help="List model versions, choose which one serves, and remove old ones.", no_args_is_help=True
)


@versions.command("list")
@in_namespace
def list_models(data: Data = DATA) -> None:
    """List the versions with their validation metrics."""
    from rich.table import Table

    from service.domain.timestamps import to_rfc3339
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        found = open_registry(data, store).versions()
    if not found:
        out.print("No model yet. Train one with [bold]heed train[/bold].")
        return
    shown = Table()
    for name in ("", "version", "created", "NDCG@10", "HR@10", "events", "size"):
        # Versions stay on one line, for copying.
        shown.add_column(name, overflow="fold", no_wrap=name == "version")
    for version in found:
        metadata = version.metadata or {}
        metrics = metadata.get("metrics") or {}
        shown.add_row(
            "*" if version.current else "",
            version.version,
            "" if version.created is None else to_rfc3339(version.created),
            version.broken or f"{metrics.get('ndcg', float('nan')):.4f}",
            "" if version.broken else f"{metrics.get('hr', float('nan')):.4f}",
            f"{metadata.get('events', 0):,}",
            f"{version.size / 1e6:.1f} MB",
        )
    out.print(shown)


@versions.command("activate")
@in_namespace
def activate_model(
    version: Annotated[str, typer.Argument(help="A version of `heed models list`.")],
    data: Data = DATA,
) -> None:
    """Serve this version, forward or back; running services follow within a second.

    Of several machines, those that lack the version fetch it first.
    """
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        open_registry(data, store).activate(version)
    out.print(f"{version} is current.")


@versions.command("prune")
@in_namespace
def prune_models(
    keep: Annotated[
        int,
        typer.Option(min=0, help="Number of newest versions kept; 0 keeps only the current one."),
    ],
    data: Data = DATA,
) -> None:
    """Remove old versions: all but the newest and the current one, of several machines from all.

    The current version is always kept; so are versions that cannot be loaded, for inspection. A
    removed version cannot be activated again.
    """
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        removed = open_registry(data, store).prune(keep)
    for version in removed:
        out.print(f"{version} removed")
    if not removed:
        out.print("There was nothing to remove.")
