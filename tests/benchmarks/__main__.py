"""The command line of the benchmarks, `make bench`: speed as ratios of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.console import DATA, ENCODER, Data, Encoder, open_store, out, set_threads
from service.domain.errors import Invalid
from tests.benchmarks.http.load_commands import interference, largest, overload
from tests.benchmarks.postgres.commands import postgres
from tests.benchmarks.studies.commands import (
    cold_start,
    explanations,
    finding,
    personal_search,
    reasons,
    small_shops,
)

app = typer.Typer(invoke_without_command=True)
app.command("cold-start")(cold_start)
app.command("personal-search")(personal_search)
app.command("explanations")(explanations)
app.command("reasons")(reasons)
app.command("small-shops")(small_shops)
app.command("finding")(finding)
app.command("overload")(overload)
app.command("interference")(interference)
app.command("largest")(largest)
app.command("postgres")(postgres)

_FEW = 100  # items, with fewer of which there is nothing to copy

Copied = Annotated[
    Path | None, typer.Option("--data", help="Use the model and data here, not generated ones.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")]


@app.callback()
def bench(
    context: typer.Context,
    data: Copied = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure kernels, ingestion and HTTP against their references, as ratios taken in one run.

    attention, recommend, search, filters, rules, service, workers, ready and postgres measure more
    of one thing each: see their --help.
    """
    if context.invoked_subcommand is not None:
        return
    set_threads(1)
    from tests.benchmarks import suite as benches

    report = benches.run(out, data=data, quick=quick)
    _write(json_file, report)


@app.command("attention")
def bench_attention(
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    random: Annotated[
        bool, typer.Option("--random", help="Drawn keys alone: no model is needed.")
    ] = False,
    most: Annotated[int, typer.Option(min=1_000, help="Events of the longest memory.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Of each timing, in turns.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure attention over memories of a thousand to a million events.

    Every row, lists and a softmax over the k rows that FAISS finds, beside torch's fused kernel
    over every event; errors against float64. The keys are those of the model in --data: items that
    its longest users took, as often as they did, and mixed so that no two rows are alike; then
    drawn ones. A million events take a few minutes on one core and 3 GB of memory.
    """
    set_threads(1)
    from tests.benchmarks.attention import long_report

    cases = long_report.run(out, None if random else data, encoder, most=most, rounds=rounds)
    _write(json_file, [each.as_dict() for each in cases])


@app.command("histories")
def bench_histories(
    data: Copied = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each question, users in turns.")] = 15,
    requests: Annotated[int, typer.Option(min=1, help="Of each in a round.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure score and recommend over HTTP for users of a thousand to 100,000 events."""
    from tests.benchmarks.http import long_histories

    found = long_histories.run(
        out, data, lengths=long_histories.LENGTHS, rounds=rounds, requests=requests
    )
    _write(json_file, [each.as_dict() for each in found])


@app.command("recommend")
def bench_recommend(
    items: Annotated[int, typer.Option(min=20_000, help="Of the catalogue, at least.")] = 1_000_000,
    data: Copied = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure recommending from a large catalogue over HTTP, beside the bare index that it asks.

    The items are near copies of those that the model in --data was trained on: as many of each as
    make the catalogue large enough.
    """
    set_threads(1)
    from tests.benchmarks import suite as benches

    report = benches.run_recommending(out, items, data=data, quick=quick)
    _write(json_file, report)


@app.command("search")
def bench_search(
    items: Annotated[int, typer.Option(min=10_000, help="Of the catalogue that is searched.")] = (
        1_000_000
    ),
    data: Data = DATA,
    encoder: Encoder = ENCODER,
    json_file: JsonFile = None,
) -> None:
    """Measure search over a large catalogue, beside the bare index that it asks.

    Its items are those stored in --data, then copies of them in which one word in seven is another.
    Each has two keys, its title and its description. A million of them take twenty minutes on one
    core and 12 GB of memory.
    """
    set_threads(1)
    from service.cli import progress_bars
    from service.snapshots.text_embeddings import open_encoder
    from tests.benchmarks.catalogue import large_search

    with open_store(data) as store, out.status("reading the items"):
        source = [
            (item.title, item.description or ", ".join(item.tags))
            for item in store.scan_items()
            if item.title
        ]
    if len(source) < _FEW:
        raise Invalid("", f"{data} has {len(source)} items with a title; import a catalogue first")
    with progress_bars.stage_bars(out) as progress:
        found = large_search.measure(
            source,
            items,
            open_encoder(encoder),
            progress=lambda what, done, whole: progress(what, done, whole, None),
        )
    out.print(large_search.shown(found))
    _write(json_file, found.as_dict())


@app.command("filters")
def bench_filters(
    items: Annotated[int, typer.Option(min=1_000, help="Of the catalogue.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Of each timing, in turns.")] = 11,
    json_file: JsonFile = None,
) -> None:
    """Measure filters, facets and sorted pages over a large catalogue.

    Beside NumPy over plain arrays of the same values, row by row. A million items take two minutes
    on one core and 3 GB of memory.
    """
    set_threads(1)
    from tests.benchmarks.catalogue import filtering
    from tests.benchmarks.harness.tables import stage

    with stage(out, "filters") as progress:
        found = filtering.measure(items, rounds, progress=progress)
    out.print(filtering.shown(found))
    _write(json_file, found.as_dict())


@app.command("rules")
def bench_rules(
    items: Annotated[list[int] | None, typer.Option(min=1_000, help="Of the catalogue.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each timing, in turns.")] = 31,
    json_file: JsonFile = None,
) -> None:
    """Measure recommending with a filter, three rules and a quota, beside the same without.

    Over drawn catalogues with a drawn model, in one process and without HTTP: by default of 4,000
    items, which are compared one by one, and of 60,000, which are indexed.
    """
    set_threads(1)
    from tests.benchmarks.catalogue import ruling
    from tests.benchmarks.harness.tables import stage

    results = []
    for count in items or (4_000, 60_000):
        with stage(out, "rules") as progress:
            results.append(ruling.measure(count, rounds, progress=progress))
        out.print(ruling.shown(results[-1]))
    _write(json_file, [found.as_dict() for found in results])


@app.command("service")
def bench_service(
    data: Copied = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer requests.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure what HTTP adds to the job: score, recommend and search, one and 16 at once.

    Beside a bare FastAPI app that answers the same bytes, and the same jobs without a service.
    """
    set_threads(1)
    from tests.benchmarks import suite as benches

    report = benches.run_service(out, data=data, quick=quick)
    _write(json_file, report)


@app.command("workers")
def bench_workers(
    workers: Annotated[int, typer.Option(min=2, help="How many to compare with one.")] = 2,
    data: Copied = None,
    items: Annotated[int, typer.Option(min=100, help="Of a generated catalogue.")] = 4_000,
    rounds: Annotated[int, typer.Option(min=1, help="Of each question, the servers in turns.")] = 9,
    requests: Annotated[int, typer.Option(min=16, help="To each server in each round.")] = 320,
    json_file: JsonFile = None,
) -> None:
    """Measure what several workers answer and hold beside one, over HTTP.

    The client shares the cores of the servers where there are none beside them, and takes from
    what they could do: the table says how much.
    """
    set_threads(1)
    from tests.benchmarks import suite as benches

    report = benches.run_workers(
        out, workers, data=data, items=items, rounds=rounds, requests=requests
    )
    _write(json_file, report)


@app.command("ready")
def bench_ready(
    events: Annotated[list[int] | None, typer.Option(min=1_000, help="Of each store.")] = None,
    more: Annotated[list[int] | None, typer.Argument(help="Of more stores.")] = None,
    items: Annotated[int, typer.Option(min=100, help="Of the catalogue.")] = 100_000,
    users: Annotated[int, typer.Option(min=10, help="Of the log.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that serve.")] = 1,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep the stores here, and use those that are.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the time from the start of a server until it is ready, by the number of events.

    By default of 100,000, a million and ten million, which takes a quarter of an hour, 2 GB of disk
    and 4 GB of memory.
    """
    set_threads(1)
    from tests.benchmarks.http import ready

    sizes = [*(events or ()), *(more or ())] or [100_000, 1_000_000, 10_000_000]
    with out.status("ready") as status:
        found = ready.measure(
            sizes, items=items, users=users, workers=workers, keep=keep, progress=status.update
        )
    out.print(ready.shown(found))
    for start, ratio in ready.ratios(found).items():
        out.print(f"{start}: {max(sizes):,} events take {ratio:.2f} times {min(sizes):,}'s seconds")
    _write(json_file, ready.as_dict(found))


def _write(path: Path | None, report: Any) -> None:
    """JSON where it is wanted."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app()
