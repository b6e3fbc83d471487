"""Servers that are asked the same questions in turns, in a closed loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import uvloop

from tests.benchmarks.harness.client import Load, closed_loop, connected
from tests.benchmarks.harness.servers import Server
from tests.benchmarks.harness.tables import ms, rate, ratio, rounds_of, table
from tests.benchmarks.harness.timing import Spread, ratios, rotated, spread


class Subject(NamedTuple):
    """Servers that are asked as one, and what they are asked."""

    name: str
    servers: Sequence[Server]
    requests: Mapping[str, Sequence[bytes]]  # by question, of `encode_post`
    behind: Sequence[Server] = ()  # what works for them: a database

    def cpu_seconds(self) -> float:
        """Processor time of all of them so far."""
        return sum(each.cpu_seconds() for each in (*self.servers, *self.behind))


@dataclass(slots=True)
class Case:
    """One question at one number of connections: loads of each subject, round by round."""

    question: str
    connections: int
    loads: dict[str, list[Load]]
    processor: dict[str, list[float]] = field(default_factory=dict)  # seconds of each round

    def percentile(self, name: str, percent: float) -> float:
        """Seconds, over the requests of all rounds."""
        latencies = np.concatenate([load.latencies for load in self.loads[name]])
        return float(np.percentile(latencies, percent))

    def medians(self, name: str) -> list[float]:
        """Median latency of each round, in seconds."""
        return [float(np.median(load.latencies)) for load in self.loads[name]]

    def rates(self, name: str) -> list[float]:
        """Requests a second in each round."""
        return [len(load.answers) / load.seconds for load in self.loads[name]]

    def times_as_fast(self, name: str, reference: str) -> Spread:
        """Requests a second over those of the reference, round by round."""
        return ratios(self.rates(name), self.rates(reference))

    def cpu(self, name: str) -> float:
        """Processor seconds of a request."""
        return sum(self.processor[name]) / sum(len(load.answers) for load in self.loads[name])


def ask_in_turns(
    subjects: Sequence[Subject],
    *,
    connections: Sequence[int] = (1, 16),
    rounds: int,
    requests: int,
    also: Callable[[str], None] | None = None,
) -> list[Case]:
    """Ask all subjects in every round, in an order that turns round by round.

    A round to warm up goes before the first one of each question.

    Args:
        subjects: the first is what the others are compared with; a question that one of them does
            not have is not asked there.
        connections: of each subject, one number after the other.
        rounds: of each question.
        requests: to each subject in each round.
        also: called with the question after each round.

    Raises:
        Unavailable: when a question is not answered with 200.
    """
    return uvloop.run(_ask(subjects, connections, rounds, requests, also))


def print_cases(title: str, cases: Sequence[Case], *, caption: str = "") -> None:
    """Print latency, rate and processor time, and how many times as fast as the first each is."""
    first = next(iter(cases[0].loads))
    table(
        title,
        ("question", "at once", "", "p50 ms", "p99 ms", "a second", "CPU ms", "times as fast"),
        (
            (
                case.question,
                f"{case.connections}",
                name,
                ms(case.percentile(name, 50)),
                ms(case.percentile(name, 99)),
                rate(spread(case.rates(name))),
                ms(case.cpu(name)),
                "" if name == first else ratio(case.times_as_fast(name, first)),
            )
            for case in cases
            for name in case.loads
        ),
        left=3,
        caption=caption or f"Times as fast: requests a second over those of {first}.",
    )


async def _ask(
    subjects: Sequence[Subject],
    connections: Sequence[int],
    rounds: int,
    requests: int,
    also: Callable[[str], None] | None,
) -> list[Case]:
    cases: list[Case] = []
    for question in dict.fromkeys(name for each in subjects for name in each.requests):
        asked = [each for each in subjects if question in each.requests]
        for count in connections:
            names = [each.name for each in asked]
            case = Case(question, count, {n: [] for n in names}, {n: [] for n in names})
            for turn in rounds_of(rounds, f"{question}, {count} at once", first=-1):
                for subject in rotated(asked, turn):
                    own = subject.requests[question]
                    # The same questions for all, and others in the next round.
                    sent = [own[(turn * requests + at) % len(own)] for at in range(requests)]
                    load, used = await _turn(subject, sent, count)
                    if turn >= 0:
                        case.loads[subject.name].append(load)
                        case.processor[subject.name].append(used)
                if also is not None and turn >= 0:
                    also(question)
            cases.append(case)
    return cases


async def _turn(subject: Subject, sent: Sequence[bytes], connections: int) -> tuple[Load, float]:
    # New connections each time: servers hang up on a client that is silent for some seconds, and
    # which worker gets how many of them is another draw.
    async with AsyncExitStack() as stack:
        each = max(1, connections // len(subject.servers))
        opened = [
            connection
            for server in subject.servers
            for connection in await stack.enter_async_context(connected(server.port, each))
        ]
        before = subject.cpu_seconds()
        load = await closed_loop(opened, sent)
        used = subject.cpu_seconds() - before
    load.check(subject.name)
    return load, used
