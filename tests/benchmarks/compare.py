"""Two checkouts of Heed beside each other: an old commit and this one, in turns.

Each serves a copy of the same data directory, with its own interpreter.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.benchmarks.harness.data import describe, questions
from tests.benchmarks.harness.options import Requests, Rounds
from tests.benchmarks.harness.servers import ROOT, Cores, Server, heed, pinned
from tests.benchmarks.harness.tables import mib, print_machine, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import ratios, rotated, spread
from tests.benchmarks.harness.turns import Subject, ask_in_turns, print_cases
from tests.benchmarks.ingest import BATCH, CONNECTIONS, batches, send
from tests.benchmarks.ready import until_ready

_BATCHES = 5  # requests of events to each in a round


def compare(
    old: Annotated[Path, typer.Argument(help="Checkout of the old commit, with its .venv.")],
    data: Annotated[Path, typer.Option("--data", help="A data directory that both can open.")],
    rounds: Rounds = 9,
    requests: Requests = 96,
    starts: Annotated[int, typer.Option(min=0, help="Starts of each, beside the first.")] = 3,
    cached: Annotated[
        bool, typer.Option(help="Keep memories of users; otherwise each question reads one.")
    ] = True,
) -> None:
    """Measure an old commit and this one in turns: questions, ingestion, starts and memory."""
    cores = Cores.choose()
    print_machine(cores)
    roots = {"old": old.resolve(), "new": ROOT}
    settings: dict[str, Any] = {} if cached else {"history_cache_bytes": 0}
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as folder, ExitStack() as stack:
        copies = {name: Path(folder) / name for name in roots}
        for copy in copies.values():
            shutil.copytree(data, copy, ignore=shutil.ignore_patterns("staging", "lock"))

        def serve(name: str) -> Server:
            return stack.enter_context(
                heed(
                    copies[name], core=cores.server, python=_python(roots[name]),
                    root=roots[name], **settings,
                )
            )  # fmt: skip

        servers = {name: serve(name) for name in roots}
        ground = describe(copies["new"])  # opened by its own version before
        asked = {each.name: each.requests() for each in questions(ground)}
        for server in servers.values():
            until_ready(server)
        with pinned(cores.client):
            subjects = [Subject(name, [server], asked) for name, server in servers.items()]
            print_cases("Questions", ask_in_turns(subjects, rounds=rounds, requests=requests))
            _ingest(servers, ground.item_ids, rounds)
        stack.close()
        if starts:
            _starts(copies, roots, starts, cores)


def _python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def _ingest(servers: dict[str, Server], item_ids: tuple[str, ...], rounds: int) -> None:
    made = batches(item_ids, (1 + rounds) * _BATCHES)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for turn in rounds_of(rounds, "ingestion", first=-1):
        part = made[(turn + 1) * _BATCHES :][:_BATCHES]
        for name in rotated(list(servers), turn):
            seconds = send(servers[name], part)
            if turn >= 0:
                rates[name].append(BATCH * _BATCHES / seconds)
    table(
        f"Durable events a second, {BATCH:,} a request, {CONNECTIONS} connections",
        ("", "a second", "times old"),
        (
            (name, rate(spread(own)), "" if name == "old" else ratio(ratios(own, rates["old"])))
            for name, own in rates.items()
        ),
    )


def _starts(copies: dict[str, Path], roots: dict[str, Path], starts: int, cores: Cores) -> None:
    taken: dict[str, list[float]] = {name: [] for name in roots}
    held: dict[str, list[float]] = {name: [] for name in roots}
    for turn in rounds_of(starts, "starts"):
        for name in rotated(list(roots), turn):
            began = time.monotonic()
            with heed(
                copies[name], core=cores.server, python=_python(roots[name]), root=roots[name]
            ) as server:
                until_ready(server)
                taken[name].append(time.monotonic() - began)
                held[name].append(server.resident())
    table(
        "Starts over a directory that was served before",
        ("", "seconds until ready", "times old", "memory when ready", "times old"),
        (
            (
                name,
                f"{spread(taken[name]).median:.2f}",
                ratio(ratios(taken[name], taken["old"])),
                mib(spread(held[name]).median),
                ratio(ratios(held[name], held["old"])),
            )
            for name in roots
        ),
    )
