"""Command `heed benchmark`: a public data set, its protocol, the baselines and Heed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    JsonFile,
    open_embeddings,
    out,
    use_all_cores,
    write_json,
)
from service.cli.training import (
    Chosen,
    Date,
    Epochs,
    Protocol,
    Seeds,
    require_global_time,
    split_log,
)
from service.cli.transfer.imports import open_movielens
from service.domain.errors import Invalid

Name = Literal["ml-100k", "ml-1m", "online-retail", "amazon-beauty"]


def benchmark(
    dataset: Annotated[
        Name, typer.Argument(help="MovieLens is fetched; the others are read from PATH.")
    ],
    path: Annotated[
        Path | None,
        typer.Argument(help="The folder, or in it purchases.csv.xz or Beauty.txt.xz."),
    ] = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    protocol: Annotated[
        Protocol,
        typer.Option(
            help="Of all but online-retail; global-time, of all with times. leave-one-out: users "
            "and items with five events or more; test on the last event, validate on the one "
            "before. hstu: train on all but the last event, with a fixed number of epochs. "
            "global-time: train before a date, and test on one drawn event of each user from then "
            "on."
        ),
    ] = "leave-one-out",
    date: Date = None,
    preset: Chosen = None,
    epochs: Epochs = None,
    seeds: Seeds = 1,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Also train without each part; seven times as long."),
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw a PNG here.")] = None,
) -> None:
    """Measure recommendation quality on a public data set, with baselines and published figures.

    The whole catalogue is ranked; ties count against the model. Metrics are given with and
    without the request time. Nothing is tuned on the test cases.

    Half of the consecutive events of MovieLens 1M share the same second, so that a model partly
    learns the order of the file. online-retail, with real order, has two tasks unless the protocol
    is global-time: the next basket, and the items new to a customer in the next basket that has
    any. amazon-beauty has 8.9 events a user, no times and no texts, as logs of small shops do.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise Invalid("", "--plot needs matplotlib: pip install 'heed[plots]'")
    require_global_time(date, protocol)
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.evaluation import compare_models, comparison_report
    from service.training import training_corpus

    with out.status(f"reading {dataset}"):
        corpus = training_corpus.read_dataset(
            source(dataset, path, data), open_embeddings(encoder, data)
        )
    reports = []
    for task in tasks(dataset, protocol, corpus.log, date):
        chosen = choose_preset(len(task.train), task.train.n_items, preset, epochs=epochs)
        used = chosen.as_trained(task.train, task.validation)
        out.print(f"{task.name}: preset {used}.")
        with progress_bars.stage_bars(out) as progress:
            table = compare_models.compare(
                task,
                corpus.content[task.items],
                chosen,
                seeds=seeds,
                ablate=ablate,
                progress=progress,
            )
        out.print(comparison_report.render_table(task, table, dataset))
        reports.append(comparison_report.to_json(task, table, str(used)))
        if plot is not None:
            named = plot if len(reports) == 1 else plot.with_stem(f"{plot.stem}-{len(reports)}")
            comparison_report.draw_plot(task, table, named, dataset)
            out.print(f"{named} drawn.")
    write_json(json_file, {"data": dataset, "tasks": reports})


def source(dataset: Name, path: Path | None, data: Path) -> Any:
    """Open a public data set; MovieLens is downloaded into the cache of `data` first."""
    from service.datasets.public.item_sequences import ItemSequences
    from service.datasets.public.online_retail import OnlineRetail

    if dataset in {"ml-100k", "ml-1m"}:
        return open_movielens(dataset, data)
    if path is None:
        raise Invalid("", f"{dataset} is read from a folder: give its PATH")
    if dataset == "online-retail":
        return OnlineRetail(path)
    return ItemSequences(dataset, path, "Beauty.txt.xz")


def tasks(dataset: Name, protocol: Protocol, log: Any, date: int | None = None) -> list[Any]:
    """Split a log of events into the evaluation tasks of its data set, or at a date."""
    from models.evaluation import splits
    from service.evaluation.compare_models import split

    if dataset == "online-retail" and protocol != "global-time":
        return split(log, splits.next_basket, splits.next_new_item)
    return split_log(log, protocol, date)
