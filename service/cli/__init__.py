"""The command line: demo, serve, import, train, evaluate, export, keys, backup, doctor and others.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from service.cli.benchmark import benchmark
from service.cli.console import (
    DATA,
    Data,
    describe_error,
    err,
    in_namespace,
    open_store,
    out,
    set_threads,
)
from service.cli.jobs import jobs
from service.cli.loadtest import loadtest
from service.cli.operations.backups import backup, restore
from service.cli.operations.check import check
from service.cli.operations.distribute import distribute
from service.cli.operations.doctor import doctor
from service.cli.operations.forgotten import forgotten
from service.cli.operations.health import health
from service.cli.operations.keys import keys
from service.cli.operations.namespaces import namespaces
from service.cli.recommending import recommend_all
from service.cli.search_quality import evaluate_search, tune_search
from service.cli.training import evaluate, train
from service.cli.transfer.copying import copy
from service.cli.transfer.export import export
from service.cli.transfer.imports import import_dataset, imports, open_movielens
from service.cli.versions import versions
from service.domain.errors import HeedError
from service.runtime.durable_files import PRIVATE_DIRECTORY

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
app.add_typer(namespaces, name="namespaces")
app.add_typer(keys, name="keys")
app.add_typer(jobs, name="jobs")
app.add_typer(forgotten, name="forgotten")
app.command("health")(health)
app.command("export", no_args_is_help=True)(in_namespace(export))
app.command("check")(in_namespace(check))
app.command("train")(in_namespace(train))
app.command("evaluate")(in_namespace(evaluate))
app.command("benchmark")(in_namespace(benchmark))
app.command("loadtest")(loadtest)
app.command("evaluate-search")(in_namespace(evaluate_search))
app.command("tune-search")(in_namespace(tune_search))
app.command("recommend-all")(in_namespace(recommend_all))
app.command("copy", no_args_is_help=True)(copy)
app.command("backup", no_args_is_help=True)(backup)
app.command("restore", no_args_is_help=True)(restore)
app.command("doctor")(doctor)
app.command("distribute")(distribute)


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
    from service.snapshots.versions.opening import open_registry

    with open_store(data) as store:
        counts = asyncio.run(store.counts())
        if not counts["events"]:
            import_dataset(store, open_movielens(dataset, data))
        model = open_registry(data, store).current()
    if model is None:
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
            help="Allow binding an address that other machines can reach although there is no "
            "API key, so that nothing authenticates them.",
        ),
    ] = None,
    first_key: Annotated[
        bool,
        typer.Option(
            "--first-key",
            help="Where there never was an API key, create one with all scopes, in the file "
            "admin.key of the data directory.",
        ),
    ] = False,
) -> None:
    """Serve over HTTP. All other settings are environment variables HEED_*."""
    _serve(
        examples=False,
        with_first_key=first_key,
        data=data,
        host=host,
        port=port,
        insecure=insecure,
        workers=workers,
    )


# ---------------------------------------------------------------------------------- main


def main() -> None:
    """Run the console script; errors of the domain and of files are printed in one line."""
    # For all files of this process, SQLite's included, and of the processes that it starts.
    os.umask(0o777 & ~PRIVATE_DIRECTORY)
    try:
        app()
    except (HeedError, OSError) as error:
        # In two parts, since brackets in the message would be parsed as markup.
        err.print("[bold red]error:[/]", end=" ")
        err.print(describe_error(error), markup=False, soft_wrap=True)
        raise SystemExit(1) from None


def _serve(
    *, examples: bool, with_first_key: bool = False, **options: Path | str | int | None
) -> None:
    """Serve with these settings; None = as the environment says."""
    # Requests run in parallel, one thread each; set before torch and FAISS are imported.
    set_threads(1)
    # What is imported and loaded stays: the collector would walk it again and again, in vain. The
    # server enables it once it serves.
    gc.disable()
    from service.domain.settings import Settings
    from service.http.serving import server
    from service.runtime import logs

    gc.freeze()
    logs.configure("info")  # until the settings say how
    try:
        settings = Settings.read({k: v for k, v in options.items() if v is not None})
        logs.configure(settings.log_level, settings.log_format)
        server.run(settings, out, examples=examples, with_first_key=with_first_key)
    except (HeedError, OSError) as error:
        if not logs.is_json():
            raise
        logging.getLogger("heed").critical("%s", describe_error(error))
        raise SystemExit(1) from None
