"""Command `heed jobs`: list, show and cancel trainings, of the service and of `heed train`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, Data, in_namespace, out

jobs = typer.Typer(
    help="List trainings, show one, and cancel the one that runs.", no_args_is_help=True
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="As [bold]heed jobs list[/] has it.")]
_PATIENCE = 30.0  # seconds for a cancelled training to end
_POLL = 0.2


def _runner(data: Path) -> Any:
    from service.jobs.runner import JobRunner

    data.mkdir(parents=True, exist_ok=True)
    return JobRunner(data, lambda _: ())


@jobs.command("list")
@in_namespace
def list_jobs(
    data: Data = DATA,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The most jobs.")] = 20,
) -> None:
    """List the newest trainings, newest first."""
    from rich.table import Table

    from service.domain.timestamps import to_rfc3339

    found = asyncio.run(_runner(data).latest(limit))
    if not found:
        out.print("No training yet. Start one with [bold]heed train[/bold].")
        return
    shown = Table()
    for name in ("job", "state", "created", "started by", "progress or error"):
        shown.add_column(name, overflow="fold", no_wrap=name == "job")
    for job in found:
        progress = job.progress or {}
        stage = str(progress.get("stage", ""))
        if "epoch" in progress:
            stage += f", epoch {progress['epoch']}/{progress['epochs']}"
        said = job.error or ("" if job.is_final else stage)
        shown.add_row(job.id, job.state, to_rfc3339(job.created), job.started_by or "", said)
    out.print(shown)


@jobs.command("show")
@in_namespace
def show(job_id: JobId, data: Data = DATA) -> None:
    """Print a training as JSON, as GET /v1/jobs/JOB answers it, with the end of its output."""
    import orjson

    from service.jobs.views import job_document

    job = asyncio.run(_runner(data).get(job_id))
    document = {**job_document(job), "log": job.log, "stderr": job.stderr}
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))


@jobs.command("cancel")
@in_namespace
def cancel(job_id: JobId, data: Data = DATA) -> None:
    """Stop a training, and wait until it has ended. One that has ended does not change."""
    runner = _runner(data)
    job = asyncio.run(runner.cancel(job_id))
    until = time.monotonic() + _PATIENCE
    while not job.is_final and time.monotonic() < until:
        time.sleep(_POLL)
        job = asyncio.run(runner.get(job_id))
    if not job.is_final:
        out.print(f"{job_id} has been requested to stop, and still runs: look again later.")
        raise typer.Exit(1)
    out.print(f"{job_id}: {job.state}")
