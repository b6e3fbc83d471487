"""Commands `heed train` and `heed evaluate`, on the stored events."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    open_embeddings,
    open_store,
    out,
    use_all_cores,
)
from service.domain.errors import HeedError
from service.runtime.data_layout import CHECKPOINT_FILE, EMBEDDINGS_FILE, MODELS_FOLDER

Chosen = Annotated[
    Literal["quick", "best"] | None,
    typer.Option(
        "--preset",
        help="quick takes minutes; best takes longer and ranks better with many events. By "
        "default quick up to 300,000 events, best beyond.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="At most; it may stop early.")]


def train(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same model.")] = 0,
    activate: Annotated[
        bool, typer.Option("--activate/--no-activate", help="Serve it when it is published.")
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
) -> None:
    """Train on all stored events, and publish the model if it beats popularity.

    A model is served only with the text encoder that it was trained with.

    A training that was killed is resumed, if the events are still the same.

    On several machines that share the data: [bold]torchrun … --no-python heed train[/bold].
    """
    run_training(
        data,
        encoder,
        preset,
        epochs,
        seed,
        activate=activate,
        json_progress=json_progress,
        processes=processes,
    )


def evaluate(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
) -> None:
    """Compare the model with popularity, EASE and transition counts on the stored events.

    Items and users with fewer than five events are left out; the last event of each user is the
    test case and the one before it the validation case; the whole catalogue is ranked.
    """
    use_all_cores()
    from service.cli import progress_bars
    from service.evaluation import compare_models, comparison_report
    from service.training import training_corpus

    with open_store(data) as store, progress_bars.stage_bars(out) as progress:
        corpus = training_corpus.read_store(
            store, open_embeddings(encoder, data / EMBEDDINGS_FILE), progress
        )
        task = last_event_task(corpus)
        chosen = preset_for(corpus, preset, epochs)
        table = compare_models.compare(
            task, corpus.content[task.items], chosen, first_seed=seed, progress=progress
        )
    out.print(comparison_report.render_table(task, table))
    if json_file is not None:
        report = comparison_report.to_json(task, table, str(chosen))
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def run_training(
    data: Path,
    encoder: str,
    preset: str | None = None,
    epochs: int | None = None,
    seed: int = 0,
    *,
    activate: bool = True,
    json_progress: bool = False,
    processes: int | None = None,
) -> None:
    """Train with the options of `heed train`."""
    use_all_cores()
    from service.cli import progress_bars
    from service.snapshots.registry import Registry
    from service.training import process_group, train_and_publish, training_corpus

    if not process_group.is_rank_zero():
        out.quiet, json_progress = True, False
    # In a job, stdout is for messages.
    with (
        open_store(data) as store,
        progress_bars.report_progress(out, as_json=json_progress) as progress,
    ):
        try:
            vectors = open_embeddings(encoder, data / EMBEDDINGS_FILE)
            corpus = training_corpus.read_store(store, vectors, progress)
            chosen = preset_for(corpus, preset, epochs)
            if not json_progress:
                out.print(f"Training with the preset {chosen}.")
            result = train_and_publish.train(
                corpus,
                Registry(data / MODELS_FOLDER),
                vectors.encoder.name,
                preset=chosen,
                seed=seed,
                activate=activate,
                progress=progress,
                checkpoint=data / CHECKPOINT_FILE,
                processes=processes,
            )
        except HeedError as error:
            if json_progress:
                sys.stdout.write(json.dumps({"error": error.detail}) + "\n")
                raise typer.Exit(1) from None
            raise
    if not result:  # rank 0 reports it
        return
    if json_progress:
        sys.stdout.write(json.dumps({"result": result}) + "\n")
        sys.stdout.flush()
    else:
        out.print(progress_bars.training_summary(result))


def last_event_task(corpus: Any) -> Any:
    """Return the evaluation task of a corpus. Raises `ModelRejected` if it has no cases."""
    from models.evaluation.protocols import protocol_a
    from service.domain.errors import ModelRejected

    try:
        return protocol_a(corpus.log)
    except ValueError as error:
        raise ModelRejected(str(error)) from error


def preset_for(corpus: Any, name: str | None, epochs: int | None) -> Any:
    """Return the preset of a name, or the default for the number of events."""
    from models.training.presets import choose_preset

    return choose_preset(len(corpus.log), corpus.log.n_items, name, epochs=epochs)
