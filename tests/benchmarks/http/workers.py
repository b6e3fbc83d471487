"""Requests a second and memory of one worker and of several.

The processor time of each request says what several workers cost more than one, and what the client
leaves them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import uvloop
from rich.table import Table

from tests.benchmarks.harness.processes import pinned, serving
from tests.benchmarks.harness.timing import ProgressCallback, no_progress
from tests.benchmarks.http.rounds import CONNECTIONS, Case, Served, ask_in_turns, speed_table
from tests.benchmarks.workload.data import BenchmarkData


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve."""

    workers: int
    cores: frozenset[int]

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{workers} on {len(self.cores)} core{'s' * (len(self.cores) > 1)}"


@dataclass(frozen=True, slots=True)
class WorkerResults:
    """Cases, and memory of each process, of all setups."""

    client: frozenset[int]  # the cores that it could use
    cases: Sequence[Case]
    memory: Mapping[str, Sequence[Mapping[str, int]]]  # by setup, of each of its processes

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "connections": CONNECTIONS,
            "client_cores": sorted(self.client),
            "cases": [case.as_dict() for case in self.cases],
            "memory": {name: [*map(dict, each)] for name, each in self.memory.items()},
        }


def setups(workers: int) -> tuple[list[Setup], frozenset[int]]:
    """One worker on one core, several on as many, one on those; and the cores of the client.

    Args:
        workers: how many are several.
    """
    allowed = sorted(os.sched_getaffinity(0))
    few = frozenset(allowed[:workers])
    client = frozenset(allowed[workers:]) or frozenset(allowed)
    # The first is what the others are compared with.
    found = [Setup(1, frozenset(allowed[:1])), Setup(workers, few)]
    if len(few) > 1:
        found.append(Setup(1, few))
    return found, client


def measure(
    ground: BenchmarkData,
    workers: int,
    *,
    rounds: int,
    requests: int,
    environment: Mapping[str, str],
    progress: ProgressCallback = no_progress,
) -> WorkerResults:
    """Serve with one worker and with several, and ask in turns.

    Args:
        ground: whose users ask about whose items.
        workers: how many are several; at least 2.
        rounds: of each question.
        requests: to each server in each round.
        environment: of the servers, their HEED_* variables.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when a server does not start or does not answer.
    """
    ways, client = setups(workers)
    arguments = ["-m", "service.cli", "serve", "--data", str(ground.data), "--port", "0"]
    with ExitStack() as stack:
        servers = {
            str(way): stack.enter_context(
                serving(
                    [*arguments, "--workers", str(way.workers)],
                    core=way.cores,
                    environment=environment,
                )
            )
            for way in ways
        }
        stack.enter_context(pinned(client))
        served = {name: Served([server]) for name, server in servers.items()}
        cases = uvloop.run(ask_in_turns(ground, served, rounds, requests, progress))
        return WorkerResults(client, cases, {name: each.shares() for name, each in servers.items()})


def shown(found: WorkerResults) -> list[Table]:
    """Return the results as tables."""
    held = Table(title="Memory, pages that several processes share counted once")
    for heading in ("served by", "in all", "of each process alone", "shared by each"):
        held.add_column(heading, justify="left" if heading == "served by" else "right")
    for name, processes in found.memory.items():
        held.add_row(
            name,
            _mib(sum(each["proportional"] for each in processes)),
            ", ".join(_mib(each["private"]) for each in processes),
            ", ".join(_mib(each["shared"]) for each in processes),
        )
    return [speed_table(found.cases, found.client), held]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
