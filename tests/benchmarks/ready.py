"""Time from the start of `heed serve` to the first 200 of /health/ready, over stores of many sizes.

Each store is started three times: as it was filled, when texts are encoded and indexes built;
again, from what that start kept; and after a kill -9. The stages are those that the server logs;
`process` is the rest, mostly importing libraries.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from service.domain.errors import Unavailable
from tests.benchmarks.harness.data import generate, user_lengths
from tests.benchmarks.harness.servers import Cores, Server, heed
from tests.benchmarks.harness.tables import OUT, print_machine, table

STARTS = ("first", "again", "killed")
_PATIENCE = 1_800.0  # seconds until a server must be ready
_LOGGED = re.compile(r"^heed_logged_events\S* ([\d.e+]+)", re.MULTILINE)
_STAGES = re.compile(r"loaded: (.*)")
_STAGE = re.compile(r"(\w+) ([\d.]+) s")


class Start(NamedTuple):
    """One start of a server."""

    events: int
    start: str  # of `STARTS`
    seconds: float  # until it was ready
    cpu_seconds: float  # of its processes until then
    stages: dict[str, float]  # seconds
    resident: int  # bytes when it was ready
    log_seconds: float | None  # until the event log was in memory too, on the last start
    log_resident: int | None  # bytes then


def ready(
    events: Annotated[list[int] | None, typer.Option(min=1_000, help="Of each store.")] = None,
    more: Annotated[list[int] | None, typer.Argument(help="Of more stores.")] = None,
    items: Annotated[int, typer.Option(min=100, help="Of the catalogue.")] = 100_000,
    users: Annotated[int, typer.Option(min=10, help="Of the log.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that serve.")] = 1,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep the stores here, and use those that are.")
    ] = None,
) -> None:
    """Measure the time from the start of a server until it is ready, by the number of events.

    By default of 100,000, a million and ten million, which takes a quarter of an hour, 2 GB of disk
    and 4 GB of memory.
    """
    sizes = [*(events or ()), *(more or ())] or [100_000, 1_000_000, 10_000_000]
    print_machine(Cores.choose())
    found: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="heed-ready-") as temporary, OUT.status("") as status:
        for size in sizes:
            data = (keep or Path(temporary)) / f"{items}-{size}"
            if not data.exists():
                status.update(f"generating {size:,} events")
                generate(data, items=items, lengths=user_lengths(size, users))
            for start in STARTS:
                status.update(f"{size:,} events: {start} start")
                found.append(_start(data, size, start, workers))
    _print(found)
    for name in STARTS:
        of_largest, of_smallest = (
            next(each.cpu_seconds for each in found if (each.events, each.start) == (size, name))
            for size in (max(sizes), min(sizes))
        )
        OUT.print(
            f"{name}: {max(sizes):,} events take {of_largest / of_smallest:.2f} times "
            f"the processor time of {min(sizes):,}"
        )


def until_ready(server: Server) -> None:
    """Wait until a server is ready."""
    _wait(lambda: server.get("/health/ready") is not None)


def _start(data: Path, events: int, start: str, workers: int) -> Start:
    log = data.with_name(data.name + ".log")
    log_seconds = log_resident = None
    began = time.monotonic()
    with heed(
        data, core=Cores.choose().server, patience=_PATIENCE, log=log, log_level="info",
        workers=workers,
    ) as server:  # fmt: skip
        until_ready(server)
        seconds, used, resident = time.monotonic() - began, server.cpu_seconds(), server.resident()
        if start == STARTS[-1]:
            _wait(lambda: _logged(server, workers) >= events)
            log_seconds, log_resident = time.monotonic() - began, server.resident()
        if start == "again":
            for pid in server.processes():
                os.kill(pid, signal.SIGKILL)
    stated = _STAGES.search(log.read_text("utf-8", "replace"))
    stages = {name: float(value) for name, value in _STAGE.findall(stated[1] if stated else "")}
    stages = {"process": seconds - sum(stages.values()), **stages}
    return Start(
        events=events,
        start=start,
        seconds=seconds,
        cpu_seconds=used,
        stages=stages,
        resident=resident,
        log_seconds=log_seconds,
        log_resident=log_resident,
    )


def _print(found: list[Start]) -> None:
    names = list(dict.fromkeys(name for each in found for name in each.stages))
    table(
        "Seconds until ready",
        ("events", "start", "ready", "processor", *names, "MB", "log after", "MB with log"),
        (
            (
                f"{each.events:,}",
                each.start,
                f"{each.seconds:.1f}",
                f"{each.cpu_seconds:.1f}",
                *(f"{each.stages.get(name, 0.0):.2f}" for name in names),
                f"{each.resident / 1e6:,.0f}",
                "" if each.log_seconds is None else f"{each.log_seconds:.1f}",
                "" if each.log_resident is None else f"{each.log_resident / 1e6:,.0f}",
            )
            for each in found
        ),
        left=2,
    )


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not is_done():
        if time.monotonic() > deadline:
            raise Unavailable(f"the server was not ready within {_PATIENCE:.0f} s")
        time.sleep(0.02)


def _logged(server: Server, workers: int) -> float:
    """Return the number of events in the log of every worker, from the metrics."""
    found = _LOGGED.findall(server.get("/metrics") or "")
    return min(map(float, found)) if len(found) == workers else 0.0
