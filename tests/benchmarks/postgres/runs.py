"""The benchmark of the PostgreSQL store: its parts, on one server, printed one after the other."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from service.domain.errors import Unavailable
from tests.benchmarks import report
from tests.benchmarks.harness import machine
from tests.benchmarks.harness.conditions import exit_on_sigterm, one_thread, serve_directory
from tests.benchmarks.harness.processes import Cores
from tests.benchmarks.harness.tables import stage
from tests.benchmarks.postgres import (
    durable_appends,
    growth,
    growth_report,
    replicas,
    round_trips,
)
from tests.benchmarks.postgres.durable_appends import POSTGRES, SQLITE
from tests.benchmarks.postgres.filling import count_events, load
from tests.benchmarks.postgres.measured_server import MeasuredServer, measured_server
from tests.benchmarks.postgres.shared_data import share_data
from tests.benchmarks.workload.data import BenchmarkData, count_stored, prepare_data

Part = Literal["growth", "score", "appends", "replicas"]
PARTS: tuple[Part, ...] = ("growth", "score", "appends", "replicas")


@dataclass(frozen=True, slots=True)
class Effort:
    """Sizes and repeats of a run."""

    events: tuple[int, ...] = (100_000, 10_000_000)
    items: int = 20_000  # of the databases that grow
    mean: int = 100  # events of their users
    growth_rounds: int = 10
    reads: int = 200  # of each kind in a round
    batches: int = 4  # likewise
    catalogue: int = 4_000  # of the data that is served
    users: int = 500
    score_rounds: int = 15
    scores: int = 100
    append_rounds: int = 9
    appends: int = 20
    replica_rounds: int = 9
    requests: int = 320


def run(
    console: Console,
    effort: Effort,
    *,
    store: str | None = None,
    data: Path | None = None,
    parts: Sequence[Part] = PARTS,
) -> dict[str, Any]:
    """Measure the parts, print each, and return them as plain values.

    Args:
        console: for progress and tables.
        effort: sizes and repeats.
        store: URL of a running server; None starts one.
        data: a data directory that is copied, served and asked; None generates one.
        parts: which.

    Raises:
        FileNotFoundError: no PostgreSQL is installed, and none is named.
        Unavailable: a service does not start or answer, or anything acknowledged is not stored.
    """
    cores = Cores.choose()
    sizes = {"items": effort.catalogue, "users": effort.users}
    with (
        exit_on_sigterm(),
        one_thread(),
        prepare_data(data, **sizes) as ground,
        measured_server(store, cores) as server,
    ):
        described = machine.describe_machine(server.folder or ground.data, cores)
        server_rows = [("PostgreSQL", server.version), ("its settings", server.settings)]
        report.machine(console, described, ground, server_rows)
        found: dict[str, Any] = {
            "machine": described,
            "data": ground.as_dict(),
            "postgres": {"version": server.version, "settings": server.settings},
        }
        if "growth" in parts:
            found["growth"] = _grow(console, server, effort)
        if {"score", "appends", "replicas"} & set(parts):
            found |= _serve(console, ground, server, cores, effort, parts)
    return found


def _grow(console: Console, server: MeasuredServer, effort: Effort) -> dict[str, Any]:
    async def measured() -> growth.Growth:
        databases = []
        for events in sorted(effort.events):
            with stage(console, f"loading {events:,} events") as progress:
                databases.append(
                    await load(
                        server,
                        events,
                        items=effort.items,
                        mean=effort.mean,
                        progress=progress,
                    )
                )
        with stage(console, "reads and appends") as progress:
            return await growth.measure(
                server,
                databases,
                rounds=effort.growth_rounds,
                reads=effort.reads,
                batches=effort.batches,
                progress=progress,
            )

    found = asyncio.run(measured())
    growth_report.shown(console, found)
    for each in found.sizes:
        _check("the store", each.expected, each.counted)
    return found.as_dict()


def _serve(
    console: Console,
    ground: BenchmarkData,
    server: MeasuredServer,
    cores: Cores,
    effort: Effort,
    parts: Sequence[Part],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    url = share_data(ground, server)
    with tempfile.TemporaryDirectory(prefix="heed-bench-") as name:
        folder = Path(name)
        if "score" in parts:
            with ExitStack() as stack, stage(console, "scores") as progress:
                places = {POSTGRES: (folder / "score", url), SQLITE: (ground.data, "")}
                services = {
                    name: stack.enter_context(serve_directory(data, cores.server, store=place))
                    for name, (data, place) in places.items()
                }
                scores = round_trips.measure(
                    *(ground, url, services, cores),
                    rounds=effort.score_rounds,
                    requests=effort.scores,
                    progress=progress,
                )
            round_trips.shown(console, scores)
            found["score"] = scores.as_dict()
        if "replicas" in parts:
            with stage(console, "replicas") as progress:
                answers = replicas.measure(
                    *(ground, server, url, folder),
                    rounds=effort.replica_rounds,
                    requests=effort.requests,
                    progress=progress,
                )
            replicas.shown(console, answers)
            found["replicas"] = answers.as_dict()
        if "appends" in parts:  # the last, for it changes the data
            both = frozenset(sorted(os.sched_getaffinity(0))[:2])
            with ExitStack() as stack, stage(console, "appends") as progress:
                places = {POSTGRES: (folder / "appends", url), SQLITE: (ground.data, "")}
                services = {
                    name: stack.enter_context(serve_directory(data, both, store=place))
                    for name, (data, place) in places.items()
                }
                sent = durable_appends.measure(
                    *(ground, server, services, both),
                    rounds=effort.append_rounds,
                    batches_a_round=effort.appends,
                    progress=progress,
                )
            counted = {POSTGRES: count_events(url), SQLITE: count_stored(ground)}
            sent = replace(sent, stored=counted)
            durable_appends.shown(console, sent)
            for place, count in counted.items():
                _check(place, sent.expected, count)
            found["appends"] = sent.as_dict()
    return found


def _check(store: str, expected: int, counted: int) -> None:
    if counted != expected:
        raise Unavailable(f"{store} has {counted:,} events of {expected:,} acknowledged ones")
