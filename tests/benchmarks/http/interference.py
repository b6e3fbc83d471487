"""Latency of questions beside background work, over their latency without it, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop

from service.datasets.rows import to_json_lines
from service.domain.records import Event
from service.lab.load_options import Options, parse_mix
from service.lab.open_loop import Recording
from service.lab.workload import Requests, draw_sample, open_http
from tests.benchmarks.harness.http_client import encode_post
from tests.benchmarks.harness.processes import Cores, Server, pinned
from tests.benchmarks.harness.timing import ProgressCallback, Spread, no_progress, ratios
from tests.benchmarks.http.overload import send
from tests.benchmarks.workload.data import BenchmarkData

ALONE = "alone"
_BATCH = 1_000  # events of a bulk request
_IMPORTED = 1_000_000  # events of the file; the load ends before the import does
_SETTLED = 1.0  # seconds after which the work beside is in full swing
_ACTIVE = ("queued", "running")  # states of a job
_PATIENCE = 60.0  # seconds for a training to begin, and to be cancelled

Beside = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class InterferenceResults:
    """Percentiles of the latency of questions, round by round, by the work beside them."""

    rate: float
    p50: dict[str, list[float]]  # seconds
    p99: dict[str, list[float]]
    failed: dict[str, int]  # requests that were not answered with success in time

    def ratio(self, name: str) -> Spread:
        """The p99 beside this work over the one without, of the same round."""
        return ratios(self.p99[name], self.p99[ALONE])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rate": self.rate,
            "beside": {
                name: {
                    "p50": float(np.median(self.p50[name])),
                    "p99": float(np.median(self.p99[name])),
                    "p99_ratio": self.ratio(name).as_dict(),
                    "failed": self.failed[name],
                }
                for name in self.p99
            },
        }

    def rows(self) -> list[list[str]]:
        """The lines of a table."""
        found = {name: self.ratio(name) for name in self.p99}
        return [
            [
                name,
                f"{1e3 * np.median(self.p50[name]):.1f}",
                f"{1e3 * np.median(self.p99[name]):.1f}",
                "" if name == ALONE else f"{each.median:.2f} ({each.low:.2f}–{each.high:.2f})",
                f"{self.failed[name]}",
            ]
            for name, each in found.items()
        ]


COLUMNS = ("questions beside", "p50, ms", "p99, ms", "p99 over alone", "failed")


def measure(
    ground: BenchmarkData,
    server: Server,
    cores: Cores,
    *,
    rate: float,
    mix: str,
    rounds: int,
    seconds: float,
    deadline: float,
    progress: ProgressCallback = no_progress,
) -> InterferenceResults:
    """Send questions at a rate: alone, and beside each kind of work, round by round.

    Args:
        ground: the data that is served; what is imported is written to it.
        server: Heed.
        cores: of server and client. A training or an import may use both, as it would elsewhere.
        rate: requests a second.
        mix: shares by kind of request, as `heed loadtest` takes them.
        rounds: repeats of everything.
        seconds: of each load.
        deadline: HEED_DEADLINE of the server, in seconds.
        progress: called with the number of loads that are done, and of all.

    Raises:
        NotFound: when the service has no items, or no users.
        Unavailable: when it does not answer.
    """
    url = f"http://127.0.0.1:{server.port}"
    options = Options(url, duration=seconds, warmup=min(1.0, seconds / 4), mix=mix)
    log = ground.data.parent / f"{ground.data.name}-events.jsonl"
    works: dict[str, Beside] = {
        ALONE: _nothing,
        "batches of events": lambda: _batches(url, ground.item_ids),
        "heed import": lambda: _import(log, ground.data),
        "a training": lambda: _training(url),
    }
    results = InterferenceResults(
        rate, {name: [] for name in works}, {name: [] for name in works}, dict.fromkeys(works, 0)
    )
    try:
        with open_http(options) as http, pinned(cores.client):
            sample = draw_sample(http, options.users, options.seed)
            requests = Requests(parse_mix(mix), sample, options)
            for number, (name, beside) in itertools.product(range(rounds), works.items()):
                progress(number * len(works) + len(results.p99[name]), rounds * len(works))
                if name == "heed import":  # new events each time, since it skips the stored ones
                    _write_log(log, ground.item_ids, number)
                recording = uvloop.run(_load(options, requests, rate, beside))
                latencies = recording.latencies()
                for percentile, found in ((50, results.p50), (99, results.p99)):
                    found[name].append(float(np.percentile(latencies, percentile)))
                in_time = int((latencies <= deadline).sum())
                results.failed[name] += int(recording.due().sum()) - in_time
    finally:
        log.unlink(missing_ok=True)
    return results


# ------------------------------------------------------------------------------ the parts


async def _load(options: Options, requests: Requests, rate: float, beside: Beside) -> Recording:
    async with beside():
        return await send(options, requests, rate)


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


@contextlib.asynccontextmanager
async def _batches(url: str, items: Sequence[str]) -> AsyncIterator[None]:
    """Send large batches of events, two at a time, again and again."""
    body = [
        {"user_id": f"visitor-{n % 97}", "item_id": items[n % len(items)]} for n in range(_BATCH)
    ]
    content = encode_post("", {"events": body}).partition(b"\r\n\r\n")[2]
    headers = {"content-type": "application/json"}

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:

        async def importing() -> None:
            while True:
                answer = await http.post("/v1/events", content=content, headers=headers)
                if answer.status_code != 200:
                    await asyncio.sleep(int(answer.headers.get("retry-after", 1)))

        tasks = [asyncio.create_task(importing()) for _ in range(2)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _import(log: Path, data: Path) -> AsyncIterator[None]:
    """Run `heed import events` on the served store, on any core, until the block ends."""
    command = ["import", "events", str(log), "--data", str(data)]
    with pinned(_all_cores()):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.cli", *command),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    try:
        await asyncio.sleep(5 * _SETTLED)  # it reads a sample of the file first
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def _training(url: str) -> AsyncIterator[None]:
    """Have the service train until the block ends."""
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        started = await http.post("/v1/models/train", json={"options": {"preset": "best"}})
        job = f"/v1/jobs/{started.raise_for_status().json()['job_id']}"
        async with asyncio.timeout(_PATIENCE):
            while not (await http.get(job)).json().get("progress"):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(_SETTLED)
        try:
            yield
        finally:
            await http.post(f"{job}/cancel", json={})
            async with asyncio.timeout(_PATIENCE):
                while (await http.get(job)).json()["state"] in _ACTIVE:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)


def _write_log(log: Path, items: Sequence[str], number: int) -> None:
    events = (
        Event(f"visitor-{n % 9_973}", items[n % len(items)], f"{number}-{n}", timestamp=n + 1)
        for n in range(_IMPORTED)
    )
    with log.open("wb") as file:
        file.writelines(to_json_lines(events))


def _all_cores() -> frozenset[int] | None:
    return frozenset(range(os.cpu_count() or 1)) if hasattr(os, "sched_setaffinity") else None
