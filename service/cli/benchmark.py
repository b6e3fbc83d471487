"""Command `heed benchmark`: a public data set, its protocol, the baselines and Heed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from service.cli.console import (
    DATA,
    ENCODER,
    Data,
    Encoder,
    err,
    open_embeddings,
    out,
    use_all_cores,
)
from service.domain.errors import Invalid, ModelRejected
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE

Name = Literal["ml-100k", "ml-1m", "online-retail"]


def benchmark(
    dataset: Annotated[
        Name, typer.Argument(help="MovieLens is fetched; online-retail needs PATH.")
    ],
    path: Annotated[
        Path | None, typer.Argument(help="The folder of online-retail, or purchases.csv.xz in it.")
    ] = None,
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    protocol: Annotated[
        Literal["A", "B"],
        typer.Option(
            help="Of MovieLens. A: users and items with five events or more; test on the last "
            "event, validate on the one before. B: train on all but the last event, with a fixed "
            "number of epochs."
        ),
    ] = "A",
    preset: Annotated[
        Literal["quick", "best"] | None, typer.Option(help="As in [bold]heed train[/].")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the preset's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings to take the mean of.")] = 1,
    ablate: Annotated[
        bool,
        typer.Option("--ablate", help="Also train without each part; seven times as long."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw a PNG here.")] = None,
) -> None:
    """Measure recommendation quality on a public data set, with baselines and published figures.

    The whole catalogue is ranked; ties count against the model. Metrics are given with and
    without the request time. Nothing is tuned on the test cases.

    Half of the consecutive events of MovieLens 1M share the same second, so that a model partly
    learns the order of the file. online-retail, with real order, has two tasks: the next basket,
    and the items new to a customer in the next basket that has any.
    """
    if plot is not None:
        _need_matplotlib()
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.evaluation import compare_models, comparison_report
    from service.training import training_corpus

    with out.status(f"reading {dataset}"):
        corpus = training_corpus.read_dataset(
            source(dataset, path, data), open_embeddings(encoder, data / EMBEDDINGS_FILE)
        )
    reports = []
    for task in tasks(dataset, protocol, corpus.log):
        chosen = choose_preset(len(task.train), task.train.n_items, preset, epochs=epochs)
        out.print(f"Task {task.name}, preset {chosen}.")
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
        reports.append(comparison_report.to_json(task, table, str(chosen)))
        if plot is not None:
            named = plot if len(reports) == 1 else plot.with_stem(f"{plot.stem}-{len(reports)}")
            comparison_report.draw_plot(task, table, named, dataset)
            out.print(f"{named} drawn.")
    if json_file is not None:
        json_file.write_text(json.dumps({"data": dataset, "tasks": reports}, indent=1) + "\n")


def source(dataset: Name, path: Path | None, data: Path) -> Any:
    """Open a public data set; MovieLens is downloaded into the cache of `data` first."""
    from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
    from service.datasets.movielens import fetch as fetch_movielens
    from service.datasets.online_retail import OnlineRetail

    if dataset == "online-retail":
        if path is None:
            raise Invalid("", "online-retail is read from a folder: give its PATH")
        return OnlineRetail(path)
    err.print(MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
    return fetch_movielens(dataset, data / CACHE_FOLDER)


def tasks(dataset: Name, protocol: Literal["A", "B"], log: Any) -> list[Any]:
    """Split a log of events into the evaluation tasks of its data set."""
    from models.evaluation import protocols

    try:
        if dataset == "online-retail":
            return [protocols.next_basket(log), protocols.next_new_item(log)]
        return [protocols.protocol_a(log) if protocol == "A" else protocols.protocol_b(log)]
    except ValueError as error:
        raise ModelRejected(str(error)) from error


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise Invalid("", "--plot needs matplotlib: pip install 'heed[plots]'") from None
