"""Command `heed jobs`: list, show and cancel trainings, of services and of `heed train`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, in_namespace, out
from service.cli.shared_store import open_shared_store

jobs = typer.Typer(
    help="List trainings, show one, and cancel the one that runs.", no_args_is_help=True
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="As [bold]heed jobs list[/] has it.")]
_PATIENCE = 30.0  # seconds for a cancelled training to end
_POLL = 0.2


@contextmanager
def _runner(data: Path) -> Iterator[Any]:
    from service.jobs.runner import JobRunner
    from service.runtime.durable_files import make_directory

    make_directory(data)
    with open_shared_store(data) as store:
        yield JobRunner(data, lambda _: (), store=store)


@jobs.command("list")
@in_namespace
def list_jobs(
    data: Data = DATA,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The most jobs.")] = 20,
) -> None:
    """List the newest trainings, newest first."""
    from rich.table import Table

    from service.cli.progress_bars import said
    from service.domain.timestamps import to_rfc3339

    with _runner(data) as runner:
        found = asyncio.run(runner.latest(limit))
    if not found:
        out.print("No training yet. Start one with [bold]heed train[/bold].")
        return
    shown = Table()
    for name in ("job", "state", "created", "started by", "progress or outcome"):
        shown.add_column(name, overflow="fold", no_wrap=name == "job")
    for job in found:
        stage = said(job.progress) if job.progress else ""
        text = job.error or ((job.result or {}).get("sentence", "") if job.is_final else stage)
        shown.add_row(job.id, job.state, to_rfc3339(job.created), job.started_by or "", text)
    out.print(shown)


@jobs.command("show")
@in_namespace
def show(job_id: JobId, data: Data = DATA) -> None:
    """Print a training as JSON, as GET /v1/jobs/JOB answers it, with the end of its output."""
    import orjson

    from service.jobs.views import job_document

    with _runner(data) as runner:
        job = asyncio.run(runner.get(job_id))
    document = {**job_document(job), "log": job.log, "stderr": job.stderr}
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


@jobs.command("cancel")
@in_namespace
def cancel(job_id: JobId, data: Data = DATA) -> None:
    """Stop a training, and wait until it has ended. One that has ended does not change."""
    with _runner(data) as runner:
        job = asyncio.run(runner.cancel(job_id))
        until = time.monotonic() + _PATIENCE
        while not job.is_final and time.monotonic() < until:
            time.sleep(_POLL)
            job = asyncio.run(runner.get(job_id))
    if not job.is_final:
        out.print(f"{job_id} has been requested to stop, and still runs: look again later.")
        raise typer.Exit(1)
    out.print(f"{job_id}: {job.state}")
