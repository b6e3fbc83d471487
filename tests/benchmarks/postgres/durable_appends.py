"""Durable events a second over HTTP: Heed over PostgreSQL beside Heed over SQLite, in turns.

The service, the database and the client share two cores, and each one's processor time stands
beside the events a second: the dearest of them is what bounds these.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tests.benchmarks.harness.processes import Server, pinned
from tests.benchmarks.harness.tables import rate, ratio, table
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios, spread
from tests.benchmarks.http import ingest
from tests.benchmarks.http.ingest import BATCH, CONNECTIONS, Batch, batches, send_batches
from tests.benchmarks.postgres.measured_server import MeasuredServer
from tests.benchmarks.workload.data import BenchmarkData

TARGET = 20_000  # events a second over PostgreSQL
POSTGRES, SQLITE = "PostgreSQL", "SQLite"


@dataclass(frozen=True, slots=True)
class Sent:
    """Seconds for each event of one round."""

    wall: float
    service: float  # of the processor, as the next two
    database: float
    client: float


@dataclass(frozen=True, slots=True)
class DurableAppends:
    """Rounds of both stores, and what they hold in the end."""

    rounds: Mapping[str, Sequence[Sent]]
    expected: int  # events in each store: those it began with, and those that were acknowledged
    stored: Mapping[str, int]  # counted one by one, once the services have stopped

    def rate(self, store: str) -> Spread:
        """Events a second."""
        return ingest.rate([each.wall for each in self.rounds[store]])

    def processor(self, store: str, of: str) -> Spread:
        """Processor seconds of an event: `service`, `database` or `client`."""
        return spread([getattr(each, of) for each in self.rounds[store]])

    @property
    def ratio(self) -> Spread:
        """PostgreSQL's time over SQLite's."""
        times = [[each.wall for each in self.rounds[name]] for name in (POSTGRES, SQLITE)]
        return ratios(*times)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch": BATCH,
            "connections": CONNECTIONS,
            "stores": {
                name: {
                    "events_per_second": self.rate(name).as_dict(),
                    "cpu_seconds_an_event": {
                        of: self.processor(name, of).as_dict()
                        for of in ("service", "database", "client")
                    },
                    "events": self.stored[name],
                }
                for name in self.rounds
            },
            "ratio": self.ratio.as_dict(),
            "events_expected": self.expected,
        }


def measure(
    ground: BenchmarkData,
    server: MeasuredServer,
    services: Mapping[str, Server],
    cores: frozenset[int] | None,
    *,
    rounds: int,
    batches_a_round: int,
    progress: ProgressCallback = no_progress,
) -> DurableAppends:
    """Send the same batches to both services, in turns.

    Args:
        ground: whose store is the one of SQLite, and was copied into the database of the other.
        server: of that database.
        services: one over each store, by `POSTGRES` and `SQLITE`.
        cores: of the client.
        rounds: beside one that warms up.
        batches_a_round: requests to each service in each round.
        progress: called with the number of rounds that are done.

    Raises:
        Unavailable: when a service did not store exactly what it was sent.
    """
    made = batches(ground, (1 + rounds) * batches_a_round)
    found: dict[str, list[Sent]] = {name: [] for name in services}
    for turn in range(-1, rounds):
        progress(max(0, turn), rounds)
        part = made[(turn + 1) * batches_a_round :][:batches_a_round]
        names = list(services)
        for name in names if turn % 2 else names[::-1]:
            with pinned(cores):
                sent = _send(services[name], server, part)
            if turn >= 0:
                found[name].append(sent)
    progress(rounds, rounds)
    return DurableAppends(found, ground.events + BATCH * len(made), {})


def shown(console: Console, found: DurableAppends) -> None:
    """Print the rates and where the processor's time goes."""
    table(
        console,
        f"Durable events a second over HTTP, {BATCH:,} a request, {CONNECTIONS} connections",
        ("store", "a second", "service", "database", "client", "all", "events stored"),
        (
            (
                name,
                rate(found.rate(name)),
                *(
                    f"{1e6 * found.processor(name, of).median:.1f}"
                    for of in ("service", "database", "client")
                ),
                f"{1e6 * sum(_all(found, name)):.1f}",
                f"{found.stored[name]:,}",
            )
            for name in found.rounds
        ),
        caption="Service, database, client: µs of the processor for an event; all three share the "
        "cores. PostgreSQL takes "
        f"{ratio(found.ratio)} times SQLite's time; wanted are {TARGET:,} a second. "
        f"{found.expected:,} events were to be stored.",
    )


def _all(found: DurableAppends, name: str) -> list[float]:
    return [found.processor(name, of).median for of in ("service", "database", "client")]


def _send(service: Server, server: MeasuredServer, part: Sequence[Batch]) -> Sent:
    def used() -> tuple[float, float, float]:
        return service.cpu_seconds() or 0.0, server.cpu_seconds(), time.process_time()

    events = BATCH * len(part)
    before = used()
    wall = send_batches(service, part)
    spent = [(after - start) / events for after, start in zip(used(), before, strict=True)]
    return Sent(wall / events, *spent)
