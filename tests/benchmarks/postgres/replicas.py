"""Questions a second of two replicas over one database beside those of one, in a closed loop.

A replica is one process on a core of its own. The database and the client take from both, and have
no core of their own where there are only two: what each one takes stands beside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from tests.benchmarks.harness.conditions import serve_directory
from tests.benchmarks.harness.tables import table
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.http.rounds import Case, Served, ask_in_turns, speed_table
from tests.benchmarks.postgres.measured_server import MeasuredServer
from tests.benchmarks.workload.data import BenchmarkData

TARGET = 1.6  # times the questions of one replica
ONE, TWO = "one replica", "two replicas"


@dataclass(frozen=True, slots=True)
class ReplicaResults:
    """Rounds of each question."""

    cases: Sequence[Case]
    cores: frozenset[int]  # of the client and the database

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"cases": [case.as_dict() for case in self.cases]}


def measure(
    ground: BenchmarkData,
    server: MeasuredServer,
    url: str,
    folder: Path,
    *,
    rounds: int,
    requests: int,
    progress: ProgressCallback = no_progress,
) -> ReplicaResults:
    """Serve with two replicas, and ask one of them and both in turns.

    Args:
        ground: whose users ask about whose items; its store and model are in the database.
        server: of the database.
        url: of the database.
        folder: of the replicas' data directories, which are made.
        rounds: of each question.
        requests: to each setup in each round.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when a replica does not start or does not answer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                serve_directory(
                    folder / f"replica-{number}", allowed[number % len(allowed)], store=url
                )
            )
            for number in range(2)
        ]
        behind = [] if server.process is None else [server.process]
        setups = {ONE: Served(replicas[:1], behind), TWO: Served(replicas, behind)}
        cases = uvloop.run(ask_in_turns(ground, setups, rounds, requests, progress))
    return ReplicaResults(cases, frozenset(allowed))


def shown(console: Console, found: ReplicaResults) -> None:
    """Print the questions a second."""
    console.print(speed_table(found.cases, found.cores))
    rows = []
    for case in found.cases:
        ratio = case.ratio(TWO, ONE)
        assert ratio is not None  # of every round
        (median, low, high), _ = ratio
        rows.append((case.question, f"{median:.2f} ({low:.2f}–{high:.2f})", f"{TARGET:g}"))
    table(
        console,
        "Two replicas over one database: times the questions of one",
        ("question", "ratio", "wanted"),
        rows,
        caption="A replica is one process on one core. CPU each and the server's cores above are "
        "of replicas and database together.",
    )
