"""`heed train` and `heed evaluate`: on everything stored."""

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
    embeddings,
    one_store,
    out,
    training_threads,
)
from service.domain.errors import HeedError
from service.runtime.data_layout import CHECKPOINT_FILE, EMBEDDINGS_FILE, MODELS_FOLDER

Chosen = Annotated[
    Literal["quick", "best"] | None,
    typer.Option(
        "--preset",
        help="quick takes minutes; best takes longer and ranks better where there are many "
        "events. By default quick up to 300,000 events, best beyond.",
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

    A model reads the vectors of the text encoder that it was trained with, and is served with no
    other.

    A training that was killed goes on where it stopped, if the events are still the same.

    On several machines that see the same data: [bold]torchrun … --no-python heed train[/bold].
    """
    run_training(
        data,
        encoder,
        preset,
        epochs,
        seed,
        activate=activate,
        tell_json=json_progress,
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
    training_threads()
    from service.cli import progress_bars
    from service.evaluation import compare_models, comparison_report
    from service.training import training_corpus

    with one_store(data) as store, progress_bars.bars(out) as told:
        corpus = training_corpus.read(store, embeddings(encoder, data / EMBEDDINGS_FILE), told)
        task = last_held_out(corpus)
        chosen = preset_for(corpus, preset, epochs)
        table = compare_models.compare(
            task, corpus.content[task.items], chosen, first_seed=seed, told=told
        )
    out.print(comparison_report.shown(task, table))
    if json_file is not None:
        report = comparison_report.as_json(task, table, str(chosen))
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def run_training(
    data: Path,
    encoder: str,
    preset: str | None = None,
    epochs: int | None = None,
    seed: int = 0,
    *,
    activate: bool = True,
    tell_json: bool = False,
    processes: int | None = None,
) -> None:
    """What `heed train` does with its options."""
    training_threads()
    from service.cli import progress_bars
    from service.snapshots.registry import Registry
    from service.training import process_group, train_and_publish, training_corpus

    if not process_group.leads():
        out.quiet, tell_json = True, False
    # In a job, stdout belongs to the messages.
    with one_store(data) as store, progress_bars.told(out, as_json=tell_json) as told:
        try:
            vectors = embeddings(encoder, data / EMBEDDINGS_FILE)
            corpus = training_corpus.read(store, vectors, told)
            chosen = preset_for(corpus, preset, epochs)
            if not tell_json:
                out.print(f"Training with the preset {chosen}.")
            result = train_and_publish.train(
                corpus,
                Registry(data / MODELS_FOLDER),
                vectors.name,
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
        out.print(progress_bars.trained(result))


def last_held_out(corpus: Any) -> Any:
    """The task that a corpus is judged by. Raises `ModelRejected` where nothing is left of it."""
    from models.evaluation.protocols import protocol_a
    from service.domain.errors import ModelRejected

    try:
        return protocol_a(corpus.log)
    except ValueError as error:
        raise ModelRejected(str(error)) from error


def preset_for(corpus: Any, name: str | None, epochs: int | None) -> Any:
    """The preset of that name, or the one that so many events ask for."""
    from models.training.presets import choose_preset

    return choose_preset(len(corpus.log), corpus.log.n_items, name, epochs=epochs)
