"""The command line: demo, serve, import, train, evaluate, export, keys, backup, doctor and others.

Heavy libraries are imported by the commands that need them, so that `heed --help` answers at once.
"""

from __future__ import annotations

import os

import typer

from service.cli.administration import forgotten, keys, namespaces
from service.cli.backups import backup, copy, export, restore
from service.cli.checks import check, doctor, health
from service.cli.console import describe_error, err, in_namespace
from service.cli.imports import imports
from service.cli.lab import benchmark, evaluate, loadtest
from service.cli.recommending import recommend_all
from service.cli.search import evaluate_search, tune_search
from service.cli.serving import demo, serve
from service.cli.training import jobs, train, versions
from service.domain.errors import HeedError
from service.runtime.durable_files import PRIVATE_DIRECTORY

app = typer.Typer(
    name="heed",
    help="Attention-based retrieval and recommendation: histories and catalogues are keys and "
    "values, target items and text are queries, and every answer says why.\n\n"
    "Start with [bold]heed demo[/bold], which fetches a public data set, serves it and trains.",
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
app.command("demo")(demo)
app.command("serve")(serve)


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
