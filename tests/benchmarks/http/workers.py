"""Requests a second and memory of one worker and of several.

A closed loop of 16 connections, the servers asked in turns. The client needs a processor too: where
there is none beside those of the servers, it takes from theirs, and so the processor time of each
request stands beside the requests a second. It says what several workers cost more than one, and
what the client leaves them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvloop
from rich.table import Table

from service.domain.errors import Unavailable
from tests.benchmarks.harness.closed_loop import Load, closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Server, busy_seconds, pinned, serving
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios, spread
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.questions import questions

CONNECTIONS = 16
_QUIET = 0.15  # cores that other processes keep busy, at most


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to serve."""

    workers: int
    cores: frozenset[int]

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{workers} on {len(self.cores)} core{'s' * (len(self.cores) > 1)}"


class Round(NamedTuple):
    """Responses of one setup in one round, with processor seconds."""

    load: Load
    served: float  # of the server
    client: float
    others: float | None  # of all else on the machine; None where there is no /proc

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.load.answers) / self.load.seconds

    @property
    def quiet(self) -> bool:
        """Whether other processes kept the machine almost idle."""
        return self.others is not None and self.others < _QUIET * self.load.seconds


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of question, asked of every setup in each round."""

    question: str
    rounds: Mapping[str, Sequence[Round]]  # by setup

    def rate(self, setup: str) -> Spread:
        """Requests a second."""
        return spread([each.rate for each in self.rounds[setup]])

    def ratio(
        self, setup: str, reference: str, *, quiet: bool = False
    ) -> tuple[Spread, int] | None:
        """Requests a second over those of another setup, round by round, and of how many rounds.

        Args:
            setup: the one.
            reference: the other.
            quiet: only of rounds in which the machine did hardly anything else; None without any.
        """
        pairs = [
            (one.rate, other.rate)
            for one, other in zip(self.rounds[setup], self.rounds[reference], strict=True)
            if not quiet or (one.quiet and other.quiet)
        ]
        return (ratios(*zip(*pairs, strict=True)), len(pairs)) if pairs else None

    def each(self, of: str, setup: str) -> float:
        """Processor seconds of a request: `served` or `client`."""
        rounds = self.rounds[setup]
        seconds: float = sum(getattr(each, of) for each in rounds)
        return seconds / sum(len(each.load.answers) for each in rounds)

    def busy(self, of: str, setup: str) -> float:
        """Return the cores that `served`, `client` or `others` kept busy."""
        rounds = self.rounds[setup]
        seconds: float = sum(getattr(each, of) or 0.0 for each in rounds)
        return seconds / sum(each.load.seconds for each in rounds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = next(iter(self.rounds))

        def ratio(name: str, *, quiet: bool) -> dict[str, float] | None:
            found = self.ratio(name, first, quiet=quiet)
            return None if found is None else {**found[0].as_dict(), "rounds": found[1]}

        return {
            "question": self.question,
            "setups": {
                name: {
                    "requests_per_second": self.rate(name).as_dict(),
                    "ratio": ratio(name, quiet=False),
                    "ratio_of_quiet_rounds": ratio(name, quiet=True),
                    "server_seconds": self.each("served", name),
                    "client_seconds": self.each("client", name),
                    "cores": {
                        "server": self.busy("served", name),
                        "client": self.busy("client", name),
                        "others": self.busy("others", name),
                    },
                }
                for name in self.rounds
            },
        }


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
        cases = uvloop.run(_measure(ground, servers, rounds, requests, progress))
        return WorkerResults(client, cases, {name: each.shares() for name, each in servers.items()})


async def _measure(
    ground: BenchmarkData,
    servers: Mapping[str, Server],
    rounds: int,
    requests: int,
    progress: ProgressCallback,
) -> list[Case]:
    shortest = min(events for _, events in ground.askers)
    asked = {
        question.name: (question.ask, question.bodies)
        for question in questions(ground)
        if question.events in {0, shortest}
    }
    cases: list[Case] = []
    for question, (path, bodies) in asked.items():
        sent = [encode_post(f"/v1/{path}", bodies[at % len(bodies)]) for at in range(requests)]
        found: dict[str, list[Round]] = {name: [] for name in servers}
        for turn in range(-1, rounds):  # the first warms up
            progress(len(cases) * rounds + max(0, turn), len(asked) * rounds)
            names = list(servers)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                done = await _round(servers[name], sent)
                for answer in done.load.answers:
                    if answer.status != 200:
                        what = f"{answer.status}: {answer.body[:300]!r}"
                        raise Unavailable(f"{name} answered {question} with {what}")
                if turn >= 0:
                    found[name].append(done)
        cases.append(Case(question, found))
    progress(len(asked) * rounds, len(asked) * rounds)
    return cases


async def _round(server: Server, sent: Sequence[bytes]) -> Round:
    def used() -> tuple[float, float, float | None]:
        return server.cpu_seconds() or 0.0, time.process_time(), busy_seconds()

    # New each time: which worker has how many of them is another draw.
    async with connected(server.port, CONNECTIONS) as connections:
        before = used()
        load = await closed_loop(connections, sent)
        after = used()
    served, client = after[0] - before[0], after[1] - before[1]
    others = None
    if after[2] is not None and before[2] is not None:
        others = max(0.0, after[2] - before[2] - served - client)
    return Round(load, served, client, others)


def shown(found: WorkerResults) -> list[Table]:
    """Return the results as tables."""
    speed = Table(title=f"Requests a second, {CONNECTIONS} connections in a closed loop")
    for heading in (
        *("question", "served by", "a second", "ratio", "in quiet rounds", "CPU each", "cores"),
        *("client's", "others'"),
    ):
        speed.add_column(
            heading, justify="left" if heading in {"question", "served by"} else "right"
        )
    for case in found.cases:
        first = next(iter(case.rounds))
        for name in case.rounds:
            speed.add_row(
                case.question if name == first else "",
                name,
                f"{case.rate(name).median:.0f}",
                "" if name == first else _ratio(case.ratio(name, first)),
                "" if name == first else _ratio(case.ratio(name, first, quiet=True)),
                f"{1e3 * case.each('served', name):.2f} ms",
                *(f"{case.busy(of, name):.2f}" for of in ("served", "client", "others")),
            )
    speed.caption = (
        "CPU each: of the server for a request. Cores: that the server, the client (on "
        + ", ".join(map(str, sorted(found.client)))
        + f") and all else kept busy; a round is quiet where that is less than {_QUIET}."
    )
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
    return [speed, held]


def _ratio(found: tuple[Spread, int] | None) -> str:
    if found is None:
        return "none"
    (median, low, high), rounds = found
    return f"{median:.2f} ({low:.2f}–{high:.2f}; {rounds})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
