"""The command line: demo, serve, import, train, evaluate, models, export, loadtest.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from service.cli.benchmark import benchmark
from service.cli.console import DATA, Data, err, open_store, out, set_threads
from service.cli.health import health
from service.cli.jobs import jobs
from service.cli.loadtest import loadtest
from service.cli.recommending import recommend_all
from service.cli.search_quality import evaluate_search, tune_search
from service.cli.training import evaluate, train
from service.cli.transfer.export import export
from service.cli.transfer.imports import import_dataset, imports, open_movielens
from service.cli.versions import versions
from service.domain.errors import HeedError
from service.runtime.data_layout import MODELS_FOLDER

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
app.add_typer(imports, name="import")
app.add_typer(versions, name="models")
app.add_typer(jobs, name="jobs")
app.command("health")(health)
app.command("export", no_args_is_help=True)(export)
app.command("train")(train)
app.command("evaluate")(evaluate)
app.command("benchmark")(benchmark)
app.command("loadtest")(loadtest)
app.command("evaluate-search")(evaluate_search)
app.command("tune-search")(tune_search)
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
    from service.domain.settings import Settings
    from service.snapshots.registry import Registry

    with open_store(data) as store:
        counts = asyncio.run(store.counts())
        if not counts["events"]:
            import_dataset(store, open_movielens(dataset, data))
    if Registry(data / MODELS_FOLDER).current() is None:
        train(data, Settings.read().encoder)
    if not prepare:
        _serve(examples=True, data=data, host=host, port=port)


@app.command()
def serve(
    data: Data = DATA,
    host: Annotated[str | None, typer.Option(help="Address to bind; HEED_HOST.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; HEED_PORT.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Worker processes, best one for each core; HEED_WORKERS. They share the port and "
            "the memory of the loaded model; caches and limits are per worker."
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            help="Allow binding an address that other machines can reach, although nothing "
            "authenticates them.",
        ),
    ] = None,
) -> None:
    """Serve over HTTP. All other settings are environment variables HEED_*."""
    _serve(examples=False, data=data, host=host, port=port, insecure=insecure, workers=workers)


# ---------------------------------------------------------------------------------- main


def main() -> None:
    """Run the console script; errors of the domain and of files are printed in one line."""
    try:
        app()
    except (HeedError, OSError) as error:
        # In two parts, since brackets in the message would be parsed as markup.
        err.print("[bold red]error:[/]", end=" ")
        err.print(str(error), markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def _serve(*, examples: bool, **options: Path | str | int | None) -> None:
    """Serve with these settings; None = as the environment says."""
    # Requests run in parallel, one thread each; set before torch and FAISS are imported.
    set_threads(1)
    from service.domain.settings import Settings
    from service.http import server

    settings = Settings.read({k: v for k, v in options.items() if v is not None})
    server.run(settings, out, examples=examples)
