"""Commands `heed train` and `heed evaluate`, on the stored events."""

from __future__ import annotations

import asyncio
import logging
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
    JsonFile,
    err,
    open_embeddings,
    open_store,
    out,
    use_all_cores,
    write_json,
)
from service.domain.errors import Conflict, HeedError, Invalid
from service.domain.timestamps import from_rfc3339
from service.jobs.training_command import MAX_EPOCHS
from service.runtime.data_layout import CHECKPOINT_FILE

_log = logging.getLogger(__name__)

Protocol = Literal["newest", "leave-one-out", "hstu", "global-time"]
Chosen = Annotated[
    Literal["quick", "best"] | None,
    typer.Option(
        "--preset",
        help="quick takes minutes; best takes longer and ranks better with many events. By "
        "default quick up to 300,000 events, best beyond.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, help="Trainings to take the mean of.")]
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


def _parse_date(text: str) -> int:
    """Parse an RFC 3339 time or a date, UTC, into microseconds."""
    try:
        return from_rfc3339(text, zone_required=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Date = Annotated[
    int | None,
    typer.Option(
        parser=_parse_date,
        metavar="DATE",
        help="Of global-time, such as 2024-05-01, UTC. By default nine tenths of the events come "
        "before it.",
    ),
]


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
    from service.runtime.memory_room import memory_room
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
    bars = progress_bars.stage_bars(out)
    shown = nullcontext(progress_bars.json_lines()) if json_progress else bars
    options = {"preset": preset, "epochs": epochs, "seed": seed}
    chosen_options = {name: value for name, value in options.items() if value is not None}
    is_exclusive = not as_job and process_group.is_rank_zero()
    with (
        open_store(data) as store,
        _exclusive(data, chosen_options, store) if is_exclusive else nullcontext() as job,
        shown as drawn,
    ):
        progress = drawn if job is None else progress_bars.both(drawn, job.take)
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
    """Say that a training may be killed, where there is less memory than a small one took."""
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


def evaluate(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    protocol: Annotated[
        Literal["newest", "leave-one-out", "global-time"],
        typer.Option(
            help="newest: test on the last event of each user, or on the last basket where users "
            "buy in baskets, and validate on the one before, as heed train does. leave-one-out: "
            "the last event of users with five or more, of items with five or more, as in papers. "
            "global-time: train before a date, and test on one drawn event of each user from then "
            "on, so that no model learns from later events than it could when it serves."
        ),
    ] = "newest",
    date: Date = None,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the first training, and of the draw of global-time.")
    ] = 0,
    seeds: Seeds = 1,
    json_file: JsonFile = None,
) -> None:
    """Compare the model with baselines on the stored events.

    The baselines are popularity, of all time and of the 7 days before the request, what the user
    took before, EASE (up to 20,000 items) and transition counts. The whole catalogue is ranked;
    ties count against a model.

    All but global-time let models learn from what other users did after a request: compare rankers
    for the service by global-time.

    A second table has NDCG@10 by gap to the target, length of the history and age of the item, and
    debiased: cases are weighted by 1 / sqrt(1 + n), n being the target's training events.
    """
    require_global_time(date, protocol)
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.evaluation import compare_models, comparison_report
    from service.training import training_corpus

    with open_store(data) as store, progress_bars.stage_bars(out) as progress:
        corpus = training_corpus.read_store(store, open_embeddings(encoder, data), progress)
        (task,) = split_log(corpus.log, protocol, date, seed)
        chosen = choose_preset(len(corpus.log), corpus.log.n_items, preset, epochs=epochs)
        table = compare_models.compare(
            task,
            corpus.content[task.items],
            chosen,
            seeds=seeds,
            first_seed=seed,
            progress=progress,
        )
    if not corpus.has_times:
        out.print("Most events have no time of their own: the last of a user is one at random.")
    out.print(comparison_report.render_table(task, table))
    used = chosen.as_trained(task.train, task.validation)
    write_json(json_file, comparison_report.to_json(task, table, str(used)))


def require_global_time(date: int | None, protocol: str) -> None:
    """Raise `Invalid` for a date that the protocol does not use."""
    if date is not None and protocol != "global-time":
        raise Invalid("", "--date needs --protocol global-time")


def split_log(log: Any, protocol: Protocol, date: int | None = None, seed: int = 0) -> list[Any]:
    """Split a log of events into an evaluation task; the date and the seed are of global-time."""
    from models.evaluation import splits
    from service.evaluation.compare_models import split, split_at, split_newest

    if protocol == "newest":
        return split_newest(log)
    if protocol == "global-time":
        return split_at(log, date, seed)
    if protocol == "hstu":
        return split(log, splits.leave_one_out_hstu)
    return split(log, splits.leave_one_out_5_core)
