"""The command line: demo, serve, import, train, evaluate, models, export, bench.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.benchmark import benchmark
from service.cli.console import DATA, Data, err, one_store, out, threads, training_threads
from service.cli.recommending import recommend_all
from service.cli.transfer import exports, imports, print_imported
from service.errors import HeedError
from service.layout import CACHE_FOLDER, CHECKPOINT_FILE, MODELS_FOLDER

Preset = Literal["quick", "best"]

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
app.command("benchmark")(benchmark)
app.command("recommend-all")(recommend_all)


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
        _train(data, preset=None, epochs=None, seed=0, activate=True, tell_json=False)
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
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="quick takes minutes; best takes longer and ranks better where there are many "
            "events. By default quick up to 300,000 events, best beyond.",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most; it may stop early.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    activate: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Serve it when it is published.")
    ] = True,
    json_progress: Annotated[
        bool, typer.Option("--json-progress", help="Say progress as JSON lines on stdout.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That share the work. By default one for each core, where batches are large "
            "enough to be shared; OMP_NUM_THREADS limits the cores.",
        ),
    ] = None,
) -> None:
    """Train on everything stored, and publish the model if it beats popularity.

    A training that was killed goes on where it stopped, if the events are still the same.

    On several machines that see the same data: [bold]torchrun … --no-python heed train[/bold].
    """
    _train(
        data,
        preset,
        epochs,
        seed,
        activate=activate,
        tell_json=json_progress,
        processes=processes,
    )


@app.command()
def evaluate(
    data: Data = DATA,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="quick takes minutes; best takes longer and ranks better where there are many "
            "events. By default quick up to 300,000 events, best beyond.",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="At most; it may stop early.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Compare the model with popularity, EASE and transition counts on the stored events.

    Items and users with fewer than five events are left out; the last event of each user is the
    test case and the one before it the validation case; the whole catalogue is ranked.
    """
    training_threads()
    from models.protocols import protocol_a
    from service import benchmarking, comparing, showing, training
    from service.embeddings import Embeddings
    from service.errors import ModelRejected

    with one_store(data) as store, showing.bars(out) as told:
        corpus = training.read(store, Embeddings(*_encoder(data)), told)
        try:
            task = protocol_a(corpus.log)
        except ValueError as error:
            raise ModelRejected(str(error)) from error
        chosen = _preset(corpus, preset, epochs)
        table = benchmarking.compare(
            task, corpus.content[task.items], chosen, first_seed=seed, told=told
        )
    out.print(comparing.shown(task, table))
    if json_file is not None:
        report = comparing.as_json(task, table, str(chosen))
        json_file.write_text(json.dumps(report, indent=1) + "\n")


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
    threads(1)
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
    threads(1)
    from service import serving_http
    from service.settings import Settings

    given = {"data": data, "host": host, "port": port, "insecure": insecure}
    settings = Settings.read({k: v for k, v in given.items() if v is not None})
    serving_http.run(settings, out, examples=examples)


def _train(
    data: Path,
    preset: str | None,
    epochs: int | None,
    seed: int,
    *,
    activate: bool,
    tell_json: bool,
    processes: int | None = None,
) -> None:
    training_threads()
    from service import showing, team, training
    from service.embeddings import Embeddings
    from service.registry import Registry

    if not team.leads():
        out.quiet, tell_json = True, False
    # In a job, stdout belongs to the messages.
    with one_store(data) as store, showing.told(out, as_json=tell_json) as told:
        embeddings = Embeddings(*_encoder(data))
        try:
            corpus = training.read(store, embeddings, told)
            chosen = _preset(corpus, preset, epochs)
            if not tell_json:
                out.print(f"Training with the preset {chosen}.")
            result = training.train(
                corpus,
                Registry(data / MODELS_FOLDER),
                embeddings.name,
                preset=chosen,
                seed=seed,
                activate=activate,
                told=told,
                checkpoint=data / CHECKPOINT_FILE,
                processes=processes,
            )
        except HeedError as error:
            if tell_json:
                sys.stdout.write(json.dumps({"error": error.detail}) + "\n")
                raise typer.Exit(1) from None
            raise
    if not result:  # another process says it
        return
    if tell_json:
        sys.stdout.write(json.dumps({"result": result}) + "\n")
        sys.stdout.flush()
    else:
        out.print(showing.trained(result))


def _preset(corpus: Any, name: str | None, epochs: int | None) -> Any:
    from models.presets import choose

    return choose(len(corpus.log), corpus.log.n_items, name, epochs=epochs)


def _encoder(data: Path) -> tuple[Any, Path]:
    from models.text import StaticEncoder
    from service.layout import EMBEDDINGS_FILE

    return StaticEncoder(), data / EMBEDDINGS_FILE
