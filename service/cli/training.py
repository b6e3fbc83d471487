"""Commands `heed train`, `heed jobs` and `heed models`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    err,
    in_namespace,
    open_embeddings,
    open_shared_store,
    open_store,
    out,
    use_all_cores,
)
from service.domain.errors import Conflict, HeedError
from service.jobs.job import MAX_EPOCHS
from service.runtime.data_layout import CHECKPOINT_FILE

_log = logging.getLogger(__name__)

Chosen = Annotated[
    Literal["quick", "best"] | None,
    typer.Option(
        "--preset",
        help="quick takes minutes; best takes longer and ranks better with many events. By "
        "default quick up to 300,000 events, best beyond.",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_EPOCHS,
        help="In all, instead of the preset's; fewer if the validation stops improving, which is "
        "then said. The last two thirds are of the attention and of the newest events at most.",
    ),
]

# Peak resident memory of `heed train --preset quick` on MovieLens 100k, torch included.
SMALL_TRAINING_BYTES = 2_400_000_000


def train(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    activate: Annotated[
        bool,
        typer.Option(
            "--activate/--no-activate", help="Serve it if it is better than what is served."
        ),
    ] = True,
    json_progress: Annotated[
        bool, typer.Option("--json-progress", help="Print progress as JSON lines on stdout.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that share the work. By default one for each core if batches are "
            "large enough; OMP_NUM_THREADS limits the cores.",
        ),
    ] = None,
    as_job: Annotated[
        bool, typer.Option("--as-job", hidden=True, help="The caller holds the training lock.")
    ] = False,
) -> None:
    """Train on all stored events, and serve the model if it ranks held-out events better.

    It is compared with the served model on the same events, by NDCG@10. A model that is not better
    beyond the noise is kept, and [bold]heed models activate[/] serves it.

    A model is served only with the text encoder that it was trained with.

    A training that was killed is resumed, if the events are still the same. One training of a
    namespace runs at a time, of services or of this command, on all machines that share the store;
    heed jobs lists and cancels them.

    On several machines: [bold]torchrun … --no-python heed train[/bold]. Each process reads the
    events of users of its own, from the same store or a copy of it; the first one publishes.
    """
    use_all_cores()
    from models.training.presets import Preset, choose_preset
    from service.cli import progress_bars
    from service.domain.settings import Settings
    from service.runtime import logs
    from service.runtime.memory import memory_room
    from service.snapshots.shared_registry import open_registry
    from service.training import process_group, train_and_publish, training_corpus

    def announce(used: Preset) -> None:
        if len(corpus.shard_events) > 1:
            events = " + ".join(f"{count:,}" for count in corpus.shard_events)
            out.print(f"{len(corpus.shard_events)} processes have read {events} events.")
        out.print(f"Training with the preset {used}.")

    if not process_group.is_rank_zero():
        out.quiet, json_progress = True, False
    if json_progress:
        # Uncaught exceptions stay as Python prints them, for the record of the job.
        logs.configure(Settings.read().log_level, "json", uncaught=False)
    # In a job, stdout is for messages.
    messages = progress_bars.job_messages(progress_bars.print_message)
    shown = nullcontext(messages) if json_progress else progress_bars.stage_bars(out)
    options = {"preset": preset, "epochs": epochs, "seed": seed}
    chosen_options = {name: value for name, value in options.items() if value is not None}
    is_exclusive = not as_job and process_group.is_rank_zero()
    with (
        open_store(data) as store,
        _exclusive(data, chosen_options, store) if is_exclusive else nullcontext() as job,
        shown as drawn,
    ):
        recorded = None if job is None else progress_bars.job_messages(job.take)

        def progress(*said: Any) -> None:
            drawn(*said)
            if recorded is not None:
                recorded(*said)

        _warn_of_memory(memory_room())
        try:
            vectors = open_embeddings(encoder, data)
            earlier = asyncio.run(store.count_forgotten(0))
            group = process_group.join_torchrun()
            corpus = training_corpus.read_store(store, vectors, progress, group)
            chosen = choose_preset(corpus.events, corpus.log.n_items, preset, epochs=epochs)
            result = train_and_publish.train(
                corpus,
                open_registry(data, store),
                vectors.encoder.name,
                preset=chosen,
                seed=seed,
                activate=activate,
                caller_activates=as_job,
                progress=progress,
                checkpoint=data / CHECKPOINT_FILE,
                processes=processes,
                announce=None if json_progress else announce,
                count_forgotten=lambda: asyncio.run(store.count_forgotten(0)) - earlier,
            )
        except HeedError as error:
            if json_progress:
                _log.error("%s", error)  # which the service's log takes over
                progress_bars.print_message({"error": error.told})
                raise typer.Exit(1) from None
            raise
        if job is not None:
            job.take({"result": result})
    if not result:  # rank 0 reports it
        return
    if json_progress:
        progress_bars.print_message({"result": result})
        return
    out.print(f"[bold]{result['version']}[/], in {result['seconds']:.0f} s: {result['sentence']}")


def _warn_of_memory(room: int | None) -> None:
    if room is not None and room < SMALL_TRAINING_BYTES:
        err.print(
            f"[bold yellow]warning:[/] {room / 1e6:,.0f} MB of memory are left, and training on "
            f"100,000 events took {SMALL_TRAINING_BYTES / 1e6:,.0f} MB: the system may kill it "
            "(signal 9). Give the container or the machine more memory, or train elsewhere on a "
            "copy of the data.",
            soft_wrap=True,
        )


@contextmanager
def _exclusive(data: Path, options: dict[str, Any], store: Any) -> Iterator[Any]:
    """Record this process' training as a job. Raises `Conflict` while another one runs."""
    from service.jobs.command_job import command_job

    with command_job(data, options, store) as job:
        try:
            yield job
        except KeyboardInterrupt:
            if job.stopped_for is None:
                raise
            raise Conflict(job.stopped_for) from None


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

    from service.jobs.job import job_document

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


versions = typer.Typer(
    help="List model versions, choose which one serves, and remove old ones.", no_args_is_help=True
)


@versions.command("list")
@in_namespace
def list_models(data: Data = DATA) -> None:
    """List the versions with the metrics by which each was judged.

    NDCG@10 is that of the training's sentence, on held-out events; HR@10 is of the same question.
    """
    from rich.table import Table

    from service.domain.timestamps import to_rfc3339
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        found = open_registry(data, store).versions()
    if not found:
        out.print("No model yet. Train one with [bold]heed train[/bold].")
        return
    shown = Table()
    for name in ("", "version", "created", "NDCG@10", "HR@10", "events", "size"):
        # Versions stay on one line, for copying.
        shown.add_column(name, overflow="fold", no_wrap=name == "version")
    for version in found:
        metadata = version.metadata or {}
        verdict = metadata.get("verdict") or {}
        judged = metadata.get("new_items") if verdict.get("new_items") else metadata
        metrics = (judged or metadata).get("metrics") or {}
        ndcg = verdict.get("ndcg") or metrics.get("ndcg", float("nan"))  # null without a case
        shown.add_row(
            "*" if version.current else "",
            version.version,
            "" if version.created is None else to_rfc3339(version.created),
            version.broken or f"{ndcg:.4f}",
            "" if version.broken else f"{metrics.get('hr', float('nan')):.4f}",
            f"{metadata.get('events', 0):,}",
            f"{version.size / 1e6:.1f} MB",
        )
    out.print(shown)


@versions.command("activate")
@in_namespace
def activate_model(
    version: Annotated[str, typer.Argument(help="A version of `heed models list`.")],
    data: Data = DATA,
) -> None:
    """Serve this version, forward or back; running services follow within a second.

    If there are several machines, those that lack the version fetch it first.
    """
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        open_registry(data, store).activate(version)
    out.print(f"{version} is current.")


@versions.command("prune")
@in_namespace
def prune_models(
    keep: Annotated[
        int,
        typer.Option(min=0, help="Number of newest versions kept; 0 keeps only the current one."),
    ],
    data: Data = DATA,
) -> None:
    """Remove old versions: all but the newest and the current one, of several machines from all.

    The current version is always kept; so are versions that cannot be loaded, for inspection. A
    removed version cannot be activated again.
    """
    from service.snapshots.shared_registry import open_registry

    with open_shared_store(data) as store:
        removed = open_registry(data, store).prune(keep)
    for version in removed:
        out.print(f"{version} removed")
    if not removed:
        out.print("There was nothing to remove.")
