"""Commands of the studies of quality of `make bench`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    JsonFile,
    open_embeddings,
    open_store,
    out,
    set_threads,
    use_all_cores,
    write_json,
)
from service.cli.lab import Name, source, tasks
from service.cli.training import Chosen, Epochs
from service.runtime.data_layout import SEARCH_FILE

Seed = Annotated[int, typer.Option(min=0, help="Seed of the training.")]


def cold_start(
    dataset: Annotated[
        Name, typer.Argument(help="MovieLens is downloaded; the others are read from PATH.")
    ],
    path: Annotated[Path | None, typer.Argument(help="Folder of the data set.")] = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Rank items that training never saw, and rank for users of whom few events are shown.

    A tenth of the items is hidden from a training of its own. The whole catalogue is ranked, then
    the hidden items alone; beside Heed stand the baselines, and the model that trained on all.
    """
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.lab import comparison
    from service.training import training_corpus
    from tests.benchmarks.studies import cold_start as study
    from tests.benchmarks.studies import cold_start_report

    with out.status(f"reading {dataset}"):
        corpus = training_corpus.read_dataset(
            source(dataset, path, data), open_embeddings(encoder, data)
        )
    reports = []
    for task in tasks(dataset, "leave-one-out", corpus.log):
        chosen = choose_preset(len(task.train), task.train.n_items, preset, epochs=epochs)
        content = corpus.content[task.items]
        with progress_bars.stage_bars(out) as told:
            table = comparison.compare(task, content, chosen, first_seed=seed, progress=told)
            found = study.measure(task, content, chosen, table, seed=seed, told=told)
        out.print(cold_start_report.shown(task, found))
        reports.append({"task": task.name, **cold_start_report.as_json(found)})
    write_json(json_file, {"data": dataset, "tasks": reports})


def small_shops(
    dataset: Annotated[
        Name, typer.Argument(help="MovieLens is downloaded; the others are read from PATH.")
    ],
    path: Annotated[Path | None, typer.Argument(help="Folder of the data set.")] = None,
    customers: Annotated[
        list[int], typer.Option(min=0, help="Customers of a sample; 0 takes all. Repeatable.")
    ] = [1000, 300, 100],  # noqa: B006
    draws: Annotated[int, typer.Option(min=1, help="Samples of each size.")] = 1,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Train on samples of customers, and compare what would be served with the best baseline.

    The largest sample is drawn from the data set, smaller ones from it. The split and the choice of
    what is served are those of [bold]heed train[/]; the test is each customer's newest basket, or
    event, which neither has seen.
    """
    use_all_cores()
    from service.cli import progress_bars
    from service.training import training_corpus
    from tests.benchmarks.studies import small_shops as study

    corpus = training_corpus.read_dataset(
        source(dataset, path, data), open_embeddings(encoder, data)
    )
    found = []
    with progress_bars.stage_bars(out) as told:
        for number in range(draws):
            for size in customers:
                log = study.draw(corpus.log, max(customers), size, seed + number)
                found += study.study(log, corpus, seed, told)
    out.print(study.shown(found, dataset))
    write_json(json_file, {"data": dataset, "samples": study.as_json(found)})


def personal_search(
    data: Data = DATA,
    preset: Chosen = None,
    epochs: Epochs = None,
    seed: Seed = 0,
    encoder: Encoder = ENCODER,
    json_file: JsonFile = None,
) -> None:
    """Measure how much sooner a search for a user finds the item that the user takes next.

    Held out as by [bold]heed evaluate[/]: the last event of each user is the test case, the one
    before it the validation case, and a model is trained without both. The query is the names of
    the item's categories; the weight [bold]personal[/] is chosen on the validation cases. Items of
    the user's history are removed from both rankings, with the user and without.
    """
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.lab import comparison
    from service.lab.protocols import leave_one_out_5_core
    from service.snapshots.live_search import load_search_parameters
    from service.training import training_corpus
    from tests.benchmarks.studies import personal_search as study
    from tests.benchmarks.studies import personal_search_report

    with open_store(data) as store, progress_bars.stage_bars(out) as told:
        vectors = open_embeddings(encoder, data)
        corpus = training_corpus.read_store(store, vectors, told)
        (task,) = comparison.split(corpus.log, leave_one_out_5_core)
        chosen = choose_preset(len(corpus.log), corpus.log.n_items, preset, epochs=epochs)
        measured = study.measure(
            task,
            corpus,
            asyncio.run(store.catalogue_changes(0)).upserted,
            vectors,
            chosen,
            seed=seed,
            parameters=load_search_parameters(data / SEARCH_FILE, vectors.encoder.name),
            told=told,
        )
    personal_search_report.show(out, measured)
    write_json(json_file, personal_search_report.as_json(measured) | {"preset": str(chosen)})


def explanations(
    data: Data = DATA,
    cases: Annotated[int, typer.Option(min=1, help="Users, of each one item is explained.")] = 150,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare contributions and effects with leaving each event out of the whole model.

    The model is the one that would be served from --data. Histories of up to 1,000 events count.
    """
    set_threads(1)
    from service.cli import progress_bars
    from tests.benchmarks.studies import explanations as study

    with progress_bars.stage_bars(out) as told:
        found = study.measure(
            data, cases, seed, progress=lambda done: told("explaining", done, cases, None)
        )
    out.print(study.shown(found, data))
    write_json(json_file, found.as_dict())


def reasons(
    data: Data = DATA,
    answers: Annotated[int, typer.Option(min=1, help="Recommendations of five items.")] = 1_000,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Check the reasons that recommendations name, by leaving each out of the whole model.

    The model is the one that would be served from --data.
    """
    set_threads(1)
    from service.cli import progress_bars
    from tests.benchmarks.studies import reasons as study

    with progress_bars.stage_bars(out) as told:
        found = study.measure(
            data, answers, seed, progress=lambda done: told("recommending", done, answers, None)
        )
    out.print(study.shown(found, data))
    write_json(json_file, found.as_dict())


def finding(
    data: Data = DATA, encoder: Encoder = ENCODER, seed: Seed = 0, json_file: JsonFile = None
) -> None:
    """Search the items in --data by ids, compounds, nonsense and titles made of themselves.

    Ids must come first, compounds and titles find an item that has them, and nonsense nothing.
    """
    set_threads(1)
    from service.maintenance.search_calibration import build_snapshot
    from tests.benchmarks.studies import finding as study

    with open_store(data) as store:
        items = list(store.scan_items())
    vectors = open_embeddings(encoder, data)
    found = study.measure(build_snapshot(items, vectors), items, vectors.query, seed=seed)
    out.print(study.shown(found))
    write_json(json_file, found.as_dict())
