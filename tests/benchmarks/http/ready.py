"""Time from the start of `heed serve` to the first 200 of /health/ready, over stores of many sizes.

The server runs on one core. Each store is started three times: as it was filled, when texts are
encoded and indexes built; again, from what that start kept; and after a kill -9. The stages are
those that the server logs; `process` is what is left, mostly importing libraries.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from service.domain.errors import Unavailable
from tests.benchmarks.harness.processes import Cores, pinned, share_of
from tests.benchmarks.workload.many_events import generate

STARTS = ("first", "again", "killed")
_PATIENCE = 1_800.0  # seconds until a server must be ready
_STOP = 300.0  # seconds to finish reading a part of the event log
_POLL = 0.02  # seconds between two looks
_STAGES = re.compile(r"loaded: (.*)")
_LOGGED = re.compile(r"^heed_logged_events\S* ([\d.e+]+)", re.MULTILINE)
_STAGE = re.compile(r"(\w+) ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server."""

    events: int
    start: str  # of `STARTS`
    seconds: float  # until it was ready
    cpu_seconds: float  # of its processes until then
    stages: dict[str, float]  # seconds
    resident: int  # bytes when it was ready, of several processes what they share counted once
    log_seconds: float | None  # until the event log was in memory too, where that was waited for
    log_resident: int | None  # bytes then


def measure(
    sizes: Sequence[int],
    *,
    items: int = 100_000,
    users: int = 100_000,
    starts: Sequence[str] = STARTS,
    workers: int = 1,
    keep: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Start]:
    """Measure the starts over a store of each number of events.

    Args:
        sizes: numbers of events.
        items: in the catalogue.
        users: in the log.
        starts: the last of them goes on until the event log is in memory.
        workers: processes that serve.
        keep: a folder for the stores, of which those that are there are used; otherwise they are
            generated and removed.
        progress: is called with what begins.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="heed-ready-") as temporary:
        for events in sizes:
            data = (keep or Path(temporary)) / f"{items}-{events}"
            if not data.exists():
                progress(f"generating {events:,} events")
                generate(data, events, items=items, users=users)
            for start in starts:
                progress(f"{events:,} events: {start} start")
                found.append(_start(data, events, start, workers, whole=start == starts[-1]))
    return found


def shown(found: Sequence[Start]) -> Table:
    """Return the starts as a table."""
    names = list(dict.fromkeys(name for each in found for name in each.stages))
    table = Table(title="seconds to ready")
    columns = ("events", "start", "ready", "processor", *names, "MB", "log after", "MB with log")
    for column in columns:
        table.add_column(column, justify="left" if column == "start" else "right")
    for each in found:
        table.add_row(
            f"{each.events:,}",
            each.start,
            f"{each.seconds:.1f}",
            f"{each.cpu_seconds:.1f}",
            *(f"{each.stages.get(name, 0.0):.2f}" for name in names),
            f"{each.resident / 1e6:,.0f}",
            "" if each.log_seconds is None else f"{each.log_seconds:.1f}",
            "" if each.log_resident is None else f"{each.log_resident / 1e6:,.0f}",
        )
    return table


def ratios(found: Sequence[Start]) -> dict[str, float]:
    """Return the processor time to ready of the largest store over the smallest, by start."""
    sizes = [each.events for each in found]
    return {
        start: _of(found, max(sizes), start).cpu_seconds / _of(found, min(sizes), start).cpu_seconds
        for start in dict.fromkeys(each.start for each in found)
    }


def as_dict(found: Sequence[Start]) -> dict[str, Any]:
    """Return plain values for JSON."""
    return {"starts": [asdict(each) for each in found], "ratios": ratios(found)}


def _of(found: Sequence[Start], events: int, start: str) -> Start:
    return next(each for each in found if (each.events, each.start) == (events, start))


def _start(data: Path, events: int, start: str, workers: int, *, whole: bool) -> Start:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name[:5] != "HEED_"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    arguments = ["serve", "--data", str(data), "--port", str(port)]
    arguments += ["--workers", str(workers)]
    with tempfile.TemporaryFile() as log, pinned(Cores.choose().server):
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _wait(process, lambda: _answers(port, "/health/ready") is not None)
            seconds, used = time.monotonic() - began, _cpu_seconds(process.pid)
            resident = _memory(process.pid)
            log_seconds = log_resident = None
            if whole:
                _wait(process, lambda: _logged(port, workers) >= events)
                log_seconds = time.monotonic() - began
                log_resident = _memory(process.pid)
            process.send_signal(signal.SIGKILL if start == "again" else signal.SIGTERM)
            process.wait(_STOP)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        stated = _STAGES.search(log.read().decode(errors="replace"))
    stages = {name: float(value) for name, value in _STAGE.findall(stated[1] if stated else "")}
    stages = {"process": seconds - sum(stages.values()), **stages}
    return Start(*(events, start, seconds, used, stages, resident, log_seconds, log_resident))


def _wait(process: subprocess.Popen[bytes], is_done: Callable[[], bool]) -> None:
    """Wait until something is so. Raises `Unavailable` where the server ends or takes too long."""
    deadline = time.monotonic() + _PATIENCE
    while not is_done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"the server was not ready within {_PATIENCE:.0f} s, or ended")
        time.sleep(_POLL)


def _answers(port: int, path: str) -> str | None:
    """Return the text of a 200, None for anything else."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, OSError):
        return None


def _logged(port: int, workers: int) -> float:
    """Return the number of events in the log of every worker, from the metrics."""
    found = _LOGGED.findall(_answers(port, "/metrics") or "")
    return min(map(float, found)) if len(found) == workers else 0.0


def _processes(pid: int) -> list[int]:
    """Return a server's process and the workers that it forked."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def _cpu_seconds(pid: int) -> float:
    ticks = 0
    for each in _processes(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> int:
    """Return the bytes that a server's processes hold."""
    return sum(share_of(each)["proportional"] for each in _processes(pid))
