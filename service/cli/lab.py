"""Commands of measurements: `heed evaluate`, `heed benchmark` and `heed loadtest`."""

from __future__ import annotations

from dataclasses import replace
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
    err,
    open_embeddings,
    open_store,
    out,
    set_threads,
    use_all_cores,
    with_options,
    write_json,
)
from service.cli.imports import open_movielens
from service.cli.training import Chosen, Epochs
from service.domain.errors import Invalid
from service.domain.timestamps import from_rfc3339
from service.lab.load_options import Options, parse_url

Name = Literal["ml-100k", "ml-1m", "online-retail", "amazon-beauty"]
Protocol = Literal["newest", "leave-one-out", "hstu", "global-time"]
Seeds = Annotated[int, typer.Option(min=1, help="Trainings to take the mean of.")]
_GLOBAL_TIME = (
    "global-time: train before a date, and test on one drawn event of each user from then on"
)


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


def evaluate(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    protocol: Annotated[
        Literal["newest", "leave-one-out", "global-time"],
        typer.Option(
            help="newest: test on the last event of each user, or on the last basket where users "
            "buy in baskets, and validate on the one before, as heed train does. leave-one-out: "
            "the last event of users with five or more, of items with five or more, as in papers. "
            f"{_GLOBAL_TIME}, so that no model learns from later events than it could when it "
            "serves."
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
    _require_global_time(date, protocol)
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.lab import comparison, comparison_report
    from service.training import training_corpus

    with open_store(data) as store, progress_bars.stage_bars(out) as progress:
        corpus = training_corpus.read_store(store, open_embeddings(encoder, data), progress)
        (task,) = comparison.split(corpus.log, protocol, date=date, seed=seed)
        chosen = choose_preset(len(corpus.log), corpus.log.n_items, preset, epochs=epochs)
        table = comparison.compare(
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


def _require_global_time(date: int | None, protocol: str) -> None:
    if date is not None and protocol != "global-time":
        raise Invalid("", "--date needs --protocol global-time")


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
            f"{_GLOBAL_TIME}."
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
    _require_global_time(date, protocol)
    use_all_cores()
    from models.training.presets import choose_preset
    from service.cli import progress_bars
    from service.lab import comparison, comparison_report
    from service.training import training_corpus

    with out.status(f"reading {dataset}"):
        corpus = training_corpus.read_dataset(
            source(dataset, path, data), open_embeddings(encoder, data)
        )
    reports = []
    for task in comparison.split(corpus.log, protocol, dataset=dataset, date=date):
        chosen = choose_preset(len(task.train), task.train.n_items, preset, epochs=epochs)
        used = chosen.as_trained(task.train, task.validation)
        out.print(f"{task.name}: preset {used}.")
        with progress_bars.stage_bars(out) as progress:
            table = comparison.compare(
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
    from service.lab.public_data import ItemSequences, OnlineRetail

    if dataset in {"ml-100k", "ml-1m"}:
        return open_movielens(dataset, data)
    if path is None:
        raise Invalid("", f"{dataset} is read from a folder: give its PATH")
    if dataset == "online-retail":
        return OnlineRetail(path)
    return ItemSequences(dataset, path, "Beauty.txt.xz")


@with_options
def loadtest(
    options: Options,
    json_file: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots here.")
    ] = None,
) -> None:
    """Load a running service over HTTP, and say how long its answers took and what failed.

    An open loop: requests leave on schedule whether or not earlier ones came back, and latency
    counts from when each was due, so that a stall of the server shows in every request it delays.

    Users, items and words of titles come from the service itself. Events are written for users
    named loadtest-…, who are forgotten at the end; with --write-to-users, for users who are there,
    and each event is deleted at the end. Ctrl-C ends the load and reports what there is.

    Ends with 1 where an objective did not hold or the server stopped answering.

    An API key needs the scopes read and write, and admin for the server's memory to be reported.

    [dim]heed loadtest --rate 100 --duration 60 --html report.html[/]
    [dim]heed loadtest --ramp --slo-ms 50 --slo-percentile 99[/]
    """
    for option, path in (("--json", json_file), ("--html", html)):
        if path is not None and not path.parent.is_dir():
            raise Invalid(option, f"there is no folder {path.parent}; make it first")
    set_threads(1)
    from service.lab.load_report import render_page
    from service.lab.load_test import run

    options = replace(options, url=parse_url(options.url))
    report = run(out, options)
    write_json(json_file, report)
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
        out.print(f"{html} written.")
    if report["ended"] == "silent":
        err.print("[bold red]error:[/] the server stopped answering")
        raise typer.Exit(1)
    if report["ended"] == "stopped":
        raise typer.Exit(130)
    objective = (
        report["ramp"]["held"]
        if "ramp" in report
        else report["load"].get("slo", {}).get("held", True)
    )
    raise typer.Exit(int(not objective))
