"""The command line: demo, serve, import, train, evaluate, models, export, bench.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, err, one_store, out
from service.cli.transfer import exports, imports, print_imported
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
versions = typer.Typer(
    help="List model versions, choose which one serves, and remove old ones.", no_args_is_help=True
)
app.add_typer(imports, name="import")
app.add_typer(versions, name="models")
app.add_typer(exports, name="export")


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

    with one_store(data) as store:
        counts = asyncio.run(store.counts())
        if not counts["events"]:
            out.print(datasets.MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
            with out.status(f"fetching {dataset}"):
                source = datasets.fetch_movielens(dataset, data / CACHE_FOLDER)
            print_imported(importing.load(store, source, out))
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

    with one_store(data) as store, showing.bars(out) as told:
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


@versions.command("prune")
def prune_models(
    keep: Annotated[
        int,
        typer.Option(min=0, help="How many of the newest stay; 0 leaves only the current one."),
    ],
    data: Data = DATA,
) -> None:
    """Remove old versions from the disk: all but the newest and the current one.

    The current version stays whatever its age; so do versions that cannot be
    loaded, for someone to look at. What is removed cannot be activated again.
    """
    from service.registry import Registry

    removed = Registry(data / MODELS_FOLDER).prune(keep)
    for version in removed:
        out.print(f"{version} removed")
    if not removed:
        out.print("There was nothing to remove.")


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
    with one_store(data) as store, showing.told(out, as_json=tell_json) as told:
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


def _training_threads() -> None:
    """All cores, unless the environment says how many."""
    # Threads that spin while they wait starve each other as soon as anything else is running.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not os.environ.get("OMP_NUM_THREADS"):
        _threads(os.cpu_count() or 1)


def _threads(count: int) -> None:
    """How many threads numerical libraries start; counts only before they are imported."""
    os.environ["OMP_NUM_THREADS"] = str(count)
