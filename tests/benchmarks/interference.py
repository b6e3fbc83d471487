"""Latency of questions beside background work, over their latency without it, in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import orjson
import typer
import uvloop

from service.lab.load_options import Options, parse_mix
from service.lab.open_loop import Recording
from service.lab.workload import Requests, draw_sample, open_http
from tests.benchmarks.harness.data import prepare_data
from tests.benchmarks.harness.options import Data, Rounds, Seconds
from tests.benchmarks.harness.servers import Cores, heed, pinned
from tests.benchmarks.harness.tables import print_machine, ratio, rounds_of, table
from tests.benchmarks.harness.timing import ratios
from tests.benchmarks.overload import load_options, send

QUESTIONS = "score=4,recommend=2,search=3"  # the default mix of `heed loadtest` without its writes
ALONE = "alone"
_BATCH = 1_000  # events of a bulk request
_IMPORTED = 1_000_000  # events of the file; the load ends before the import does
_SETTLED = 5.0  # seconds after which an import writes: it reads a sample of the file first
_PATIENCE = 60.0  # seconds for a training to begin, and to be cancelled

Beside = Callable[[], AbstractAsyncContextManager[None]]


def interference(
    data: Data = None,
    mix: Annotated[str, typer.Option(help="Shares by kind of request.")] = QUESTIONS,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 60.0,
    deadline: Annotated[float, typer.Option(min=0.05, help="HEED_DEADLINE, seconds.")] = 1.0,
    rounds: Rounds = 3,
    seconds: Seconds = 8.0,
) -> None:
    """Measure questions beside bulk requests, an import and a training, over questions alone."""
    cores = Cores.choose()
    print_machine(cores)
    with (
        prepare_data(data) as ground,
        heed(ground.data, core=cores.server, deadline=deadline) as server,
    ):
        options = load_options(server, seconds, mix)
        log = ground.data.parent / "events.jsonl"
        works: dict[str, Beside] = {
            ALONE: contextlib.nullcontext,
            "batches of events": lambda: _batches(options.url, ground.item_ids),
            "heed import": lambda: _import(log, ground.data),
            "a training": lambda: _training(options.url),
        }
        p50: dict[str, list[float]] = {name: [] for name in works}
        p99: dict[str, list[float]] = {name: [] for name in works}
        failed = dict.fromkeys(works, 0)
        with open_http(options) as http, pinned(cores.client):
            sample = draw_sample(http, options.users, options.seed)
            requests = Requests(parse_mix(mix), sample, options)
            for number in rounds_of(rounds, "interference"):
                _write_log(log, ground.item_ids, number)
                for name, beside in works.items():
                    recording = uvloop.run(_load(options, requests, rate, beside))
                    latencies = recording.latencies()
                    p50[name].append(float(np.percentile(latencies, 50)))
                    p99[name].append(float(np.percentile(latencies, 99)))
                    in_time = int((latencies <= deadline).sum())
                    failed[name] += int(recording.due().sum()) - in_time
    table(
        f"{rate:g} questions a second beside other work",
        ("questions beside", "p50, ms", "p99, ms", "p99 over alone", "failed"),
        (
            (
                name,
                f"{1e3 * np.median(p50[name]):.1f}",
                f"{1e3 * np.median(p99[name]):.1f}",
                "" if name == ALONE else ratio(ratios(p99[name], p99[ALONE])),
                f"{failed[name]}",
            )
            for name in works
        ),
    )


async def _load(options: Options, requests: Requests, rate: float, beside: Beside) -> Recording:
    async with beside():
        return await send(options, requests, rate)


@contextlib.asynccontextmanager
async def _batches(url: str, items: Sequence[str]) -> AsyncIterator[None]:
    """Send large batches of events, two at a time, again and again."""
    events = [
        {"user_id": f"visitor-{n % 97}", "item_id": items[n % len(items)]} for n in range(_BATCH)
    ]
    content, headers = orjson.dumps({"events": events}), {"content-type": "application/json"}

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:

        async def write() -> None:
            while True:
                answer = await http.post("/v1/events", content=content, headers=headers)
                if answer.status_code != 200:
                    await asyncio.sleep(int(answer.headers.get("retry-after", 1)))

        tasks = [asyncio.create_task(write()) for _ in range(2)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _import(log: Path, data: Path) -> AsyncIterator[None]:
    """Run `heed import events` on the served store, on any core, until the block ends."""
    with pinned(frozenset(range(os.cpu_count() or 1))):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.cli", "import", "events", log, "--data", data),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    try:
        await asyncio.sleep(_SETTLED)
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
                await asyncio.sleep(1)
        try:
            yield
        finally:
            await http.post(f"{job}/cancel", json={})
            async with asyncio.timeout(_PATIENCE):
                while (await http.get(job)).json()["state"] in ("queued", "running"):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)


def _write_log(log: Path, items: Sequence[str], number: int) -> None:
    """Write new events each time, since an import skips the stored ones."""
    with log.open("wb") as file:
        for n in range(_IMPORTED):
            file.write(
                b'{"user_id":"visitor-%d","item_id":%b,"event_id":"%d-%d","timestamp":%d}\n'
                % (n % 9_973, orjson.dumps(items[n % len(items)]), number, n, 1_700_000_000 + n)
            )
