"""One score over PostgreSQL beside the same over SQLite, counted in round trips to the server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from service.domain.errors import Unavailable
from service.stores.postgres.connections import Connections
from tests.benchmarks.harness.closed_loop import closed_loop, connected
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned
from tests.benchmarks.harness.tables import ms, table
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, spread
from tests.benchmarks.postgres.durable_appends import POSTGRES, SQLITE
from tests.benchmarks.postgres.growth import round_trip
from tests.benchmarks.workload.data import BenchmarkData
from tests.benchmarks.workload.questions import TARGETS, Question, questions

TARGET = 2.0  # round trips that a score over PostgreSQL takes longer, at most
SELECT = "SELECT 1"


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Latencies of each round, seconds, by store and of the plain round trip."""

    question: str
    history: int  # events of the user
    rounds: Mapping[str, Sequence[Sequence[float]]]

    def percentile(self, name: str, percent: float) -> float:
        """Return a percentile of all latencies."""
        return float(np.percentile(np.concatenate(self.rounds[name]), percent))

    @property
    def difference(self) -> Spread:
        """Round trips that the score over PostgreSQL takes longer, by the medians of a round."""
        medians = {
            name: [float(np.median(part)) for part in parts] for name, parts in self.rounds.items()
        }
        columns = (medians[POSTGRES], medians[SQLITE], medians[SELECT])
        return spread([(a - b) / c for a, b, c in zip(*columns, strict=True)])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "question": self.question,
            "history": self.history,
            "seconds": {
                name: {"p50": self.percentile(name, 50), "p99": self.percentile(name, 99)}
                for name in self.rounds
            },
            "difference_in_round_trips": self.difference.as_dict(),
        }


def measure(
    ground: BenchmarkData,
    url: str,
    services: Mapping[str, Server],
    cores: Cores,
    *,
    rounds: int,
    requests: int,
    progress: ProgressCallback = no_progress,
) -> RoundTrips:
    """Ask both services and the database in turns, one request after the other.

    Args:
        ground: whose user of least events asks.
        url: of the database.
        services: one over each store, by `POSTGRES` and `SQLITE`.
        cores: the round trip begins on the one of servers, as the service's does.
        rounds: beside one that warms up.
        requests: of each kind in each round.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when a service answers with an error.
    """
    asked = min(
        (each for each in questions(ground) if each.ask == "score"), key=lambda each: each.events
    )
    found: dict[str, list[list[float]]] = {name: [] for name in (*services, SELECT)}
    for turn in range(-1, rounds):
        progress(max(0, turn), rounds)
        names = list(found)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name == SELECT:
                with pinned(cores.server):
                    latencies = uvloop.run(_ping(url, requests))
            else:
                with pinned(cores.client):
                    latencies = uvloop.run(_ask(services[name], asked, requests))
            if turn >= 0:
                found[name].append(latencies)
    progress(rounds, rounds)
    return RoundTrips(asked.name, asked.events, found)


def shown(console: Console, found: RoundTrips) -> None:
    """Print the latencies and their difference."""
    more = found.difference
    table(
        console,
        f"One score of {TARGETS} items over a history of {found.history:,}, one at a time: ms",
        ("", "p50", "p99"),
        (
            (name, ms(found.percentile(name, 50)), ms(found.percentile(name, 99)))
            for name in found.rounds
        ),
        caption=f"Over PostgreSQL a score takes {more.median:.2f} ({more.low:.2f}–{more.high:.2f}) "
        f"round trips longer than over SQLite; wanted are {TARGET:g} at most. A round trip is "
        f"{SELECT} by the service's own driver, in a process on its core.",
    )


async def _ask(server: Server, asked: Question, count: int) -> list[float]:
    bodies = asked.bodies
    sent = [encode_post(f"/v1/{asked.ask}", bodies[at % len(bodies)]) for at in range(count)]
    async with connected(server.port, 1) as connections:
        load = await closed_loop(connections, sent)
    for answer in load.answers:
        if answer.status != 200:
            raise Unavailable(f"a score was answered with {answer.status}: {answer.body[:300]!r}")
    return load.latencies


async def _ping(url: str, count: int) -> list[float]:
    connections = Connections(url)
    try:
        await round_trip(connections)  # which opens one
        latencies = []
        for _ in range(count):
            started = time.perf_counter()
            await round_trip(connections)
            latencies.append(time.perf_counter() - started)
        return latencies
    finally:
        await connections.close()
