"""`python -m tests.benchmarks.peers`: Heed beside what one would pick instead, in one run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from service.datasets.movielens import LICENCE as MOVIELENS_LICENCE
from service.domain.errors import HeedError
from tests.benchmarks.harness import conditions, machine
from tests.benchmarks.harness.processes import Cores, pinned
from tests.benchmarks.harness.tables import stage
from tests.benchmarks.harness.timing import ratios, spread
from tests.benchmarks.peers import data as peer_data
from tests.benchmarks.peers import everyone, questions, recommending, report, searching
from tests.benchmarks.peers.effort import GOAL
from tests.benchmarks.peers.environments import Pythons, versions
from tests.benchmarks.peers.turns import HEED, measure

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Heed beside what one would pick instead, asked the same in turns by one client.

    `recommend`: LitServe with Heed's own model, RecTools' SASRec, implicit's ALS.
    `search`: Chroma's server, and qdrant-edge in one process with Heed's index.

    Every server has one core and the client another. Ratios are of rounds: how many times as fast
    as the other Heed answers the same. Efforts, factors and epochs are chosen on validation alone.
    Where Heed is slower, that is said last, by how much and why.
    """,
)

Peers = Annotated[Path, typer.Option(help="A Python that has the peers.")]
RecTools = Annotated[Path, typer.Option(help="A Python that has RecTools.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few rounds: to see that it works.")]
Unpinned = Annotated[
    bool, typer.Option("--unpinned", help="Servers and client on whatever core is free.")
]
JSON = Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns that each takes.")]

_PEERS, _RECTOOLS = Path(".venv-peers/bin/python"), Path(".venv-rectools/bin/python")


@app.command()
def recommend(
    dataset: Annotated[
        Literal["ml-100k", "ml-1m"], typer.Argument(help="It is fetched.")
    ] = "ml-100k",
    data: Annotated[
        Path, typer.Option("--data", envvar="HEED_DATA", help="Where caches and models are kept.")
    ] = Path("./data"),
    peers: Peers = _PEERS,
    rectools: RecTools = _RECTOOLS,
    preset: Annotated[
        Literal["quick", "best"] | None, typer.Option(help="Of Heed's training.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of Heed's training at most.")] = None,
    sasrec_epochs: Annotated[
        int, typer.Option(min=1, help="Of SASRec's at most; validation chooses.")
    ] = 100,
    users: Annotated[int, typer.Option(min=1, help="Users whose questions are timed.")] = 64,
    rounds: Rounds = 7,
    requests: Annotated[int, typer.Option(min=1, help="To each in each round.")] = 128,
    quick: Quick = False,
    unpinned: Unpinned = False,
    json_file: JSON = None,
) -> None:
    """Heed beside LitServe, SASRec and ALS: score 100 targets, recommend 20 items.

    Heed and SASRec are trained once, and kept in the data directory under `peers`: remove that
    folder to train anew. SASRec takes half an hour on ml-100k; on ml-1m both take hours.
    """
    if quick:
        rounds, requests, users = 2, 32, min(users, 32)
        sasrec_epochs = min(sasrec_epochs, 3)
    out, err, cores = _started(unpinned)
    pythons = Pythons(peers, rectools)
    versions(pythons)  # before anything takes long
    err.print(MOVIELENS_LICENCE, style="dim", highlight=False, soft_wrap=True)
    where = peer_data.prepare_data(dataset, data, preset, epochs, out)
    test = where.task.test
    asking = test.users[:: max(1, len(test) // users)][:users].tolist()
    judged = range(0, len(test), 4 if quick else 1)
    with recommending.running(
        where, pythons, cores, asking, epochs=sasrec_epochs, console=out
    ) as found:
        with pinned(cores.client):
            apart = questions.same_model(found, where)
            good = {}
            for peer in found:
                with stage(out, f"judging {peer.name}") as progress:
                    good[peer.name] = questions.judged(peer, where, judged, progress)
            with stage(out, "asking in turns") as progress:
                cases = measure(found, (1, 16), rounds=rounds, requests=requests, progress=progress)
        at_once = [peer for peer in found if peer.name in (questions.SASREC, questions.ALS)]
        with stage(out, "lists of all users") as progress:
            rates = everyone.measure(where, at_once, cores, min(rounds, 5), progress)
    stated = {peer.name: peer.settings for peer in found}
    report.settings(out, f"{dataset}: who is asked ({cores})", stated)
    report.quality(out, "How good the lists are", good)
    caption = (
        f"{len(asking)} users ask in turn. Milliseconds. LitServe's client sends the whole "
        f"history, padded to a multiple of {questions.PADDING} events; its scores differ from "
        f"Heed's by {apart:.0e} at most. The others keep histories in memory."
    )
    title = f"Closed loop over HTTP: {questions.TARGETS} targets, {questions.LIMIT} items"
    report.cases(out, title, cases, caption)
    report.everyone(out, rates)
    lost = report.lost(cases, found, good)
    for name, own in rates.items():
        times = ratios(own, rates[HEED])
        if name != HEED and times.low > 1:
            lost.append(
                f"lists of all users: {name} is {times.median:.2f} times as fast. It answers "
                "users in batches out of memory; Heed one after the other, out of its store."
            )
    report.slower(out, lost)
    _written(
        json_file,
        data,
        cores,
        {
            "data": dataset,
            "quick": quick,
            "settings": stated,
            "scores_apart": apart,
            "quality": {name: asdict(each) for name, each in good.items()},
            "http": [case.as_dict() for case in cases],
            "users_a_second": {name: spread(own).as_dict() for name, own in rates.items()},
            "slower": lost,
        },
    )


@app.command()
def search(
    data: Annotated[
        Path,
        typer.Argument(envvar="HEED_DATA", help="Data directory with a catalogue; only read."),
    ],
    items: Annotated[
        int | None,
        typer.Option(min=1, help="Search so many perturbed copies of its items instead."),
    ] = None,
    peers: Peers = _PEERS,
    rectools: RecTools = _RECTOOLS,
    goal: Annotated[
        float, typer.Option(min=0.1, max=1, help="Recall@10 that each must reach.")
    ] = GOAL,
    queries: Annotated[
        int, typer.Option(min=4, help="Half of them choose efforts, half are timed.")
    ] = 200,
    rounds: Rounds = 7,
    requests: Annotated[int, typer.Option(min=1, help="To each in each round.")] = 100,
    quick: Quick = False,
    unpinned: Unpinned = False,
    json_file: JSON = None,
) -> None:
    """Heed beside Chroma over HTTP, and beside qdrant-edge in one process, on one catalogue.

    Each is given the least effort that finds enough of the exact ten nearest keys.
    """
    if quick:
        rounds, requests, queries = 2, 32, min(queries, 64)
    out, _, cores = _started(unpinned)
    version = versions(Pythons(peers, rectools))
    with ExitStack() as stack:
        with stage(out, "storing items") as progress:
            where = searching.catalogue(data, items, queries, progress)
            searched = stack.enter_context(where)
        size = f"{searched.items:,} items, {len(searched.keys):,} keys of {searched.keys.shape[1]}"
        indexes = searching.in_process(
            searched, peers, cores, goal=goal, rounds=rounds, console=out
        )
        with pinned(cores.client), stage(out, "asking in turns") as progress:
            served = searching.over_http(
                searched,
                Pythons(peers, rectools),
                cores,
                version["chromadb"],
                goal=goal,
                rounds=rounds,
                requests=requests,
                console=out,
                progress=progress,
            )
    edge = f"qdrant-edge-py {version['qdrant-edge-py']}"
    report.indexes(out, f"In one process, {edge}: {size}", indexes)
    stated = {peer.name: peer.settings for peer in served.peers}
    report.settings(out, f"Who is asked over HTTP ({cores})", stated)
    report.recalls(out, served.recalls)
    report.cases(out, f"Closed loop over HTTP: {size}", served.cases, "Milliseconds.")
    lost = report.lost(served.cases, served.peers, served.recalls)
    lost += [
        f"in one process: {name} is {1 / each['heed_times_as_fast']['median']:.2f} times as fast, "
        f"with recall@10 {each['recall']:.3f}. A graph compares fewer keys than clusters do, and "
        f"takes {each['build_seconds']:,.0f} s to build."
        for name, each in indexes.items()
        if each["heed_times_as_fast"]["q75"] < 1
    ]
    report.slower(out, lost)
    _written(
        json_file,
        data,
        cores,
        {
            "items": searched.items,
            "keys": len(searched.keys),
            "goal": goal,
            "quick": quick,
            "settings": {**stated, "qdrant-edge": edge},
            "in_process": indexes,
            "recall": served.recalls,
            "http": [case.as_dict() for case in served.cases],
            "slower": lost,
        },
    )


def _started(unpinned: bool) -> tuple[Console, Console, Cores]:
    torch.set_num_threads(1)
    # Into a pipe or a file, the tables keep the width they need.
    out = Console(width=None if sys.stdout.isatty() else 150)
    cores = Cores(None, None) if unpinned else Cores.choose()
    return out, Console(stderr=True), cores


def _written(path: Path | None, data: Path, cores: Cores, found: Mapping[str, Any]) -> None:
    if path is not None:
        described = {"machine": machine.describe_machine(data, cores)}
        path.write_text(json.dumps({**found, **described}, indent=1) + "\n")


def main(run: Callable[[], None] = app) -> None:
    """Errors of the domain and of files are said in a line."""
    try:
        with conditions.exit_on_sigterm():
            run()
    except (HeedError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
