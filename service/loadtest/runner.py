"""The course of a load test: sample the service, load it, remove what was written, report."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson
import uvloop
from rich.console import Console

from service import __version__
from service.domain.errors import Unavailable
from service.domain.timestamps import to_rfc3339
from service.loadtest.memory import MemorySampler
from service.loadtest.open_loop import OpenLoop
from service.loadtest.options import Options, Slo, parse_mix
from service.loadtest.ramp import find_highest_rate
from service.loadtest.report import content, terminal
from service.loadtest.results import ALL, Recording, percentiles, summarize
from service.loadtest.schedule import arrival_times, draw_schedule
from service.loadtest.target import Target
from service.loadtest.workload import PREPARED, Requests, delete_all, draw_sample, open_http

_READINGS = 60  # of the server's memory


def run(console: Console, options: Options) -> dict[str, Any]:
    """Load a service, remove what was written, print the report and return it as plain values.

    SIGINT and SIGTERM end the load early; what was measured until then is reported.

    Raises:
        Invalid: for options that make no sense.
        NotFound: when the service has no items or no users.
        Unavailable: when it does not answer, or refuses a request of the mix, before the load.
    """
    target, shares = Target.parse(options.url, options.headers), parse_mix(options.mix)
    with open_http(options) as http:
        with terminal.progress(console, "reading users and histories") as progress:
            sample = draw_sample(http, options.users, options.seed, progress)
        requests = Requests(list(shares), sample, options)
        report: dict[str, Any] = {
            "started": to_rfc3339(int(time.time() * 1e6)),
            "options": options.as_dict(),
            "mix": shares,
            "distinct_requests": PREPARED,
            "machine": {
                "system": platform.platform(),
                "cores": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "python": platform.python_version(),
                "heed": __version__,
            },
            "data": sample.as_dict(),
        }
        try:
            report["data"]["model"] = uvloop.run(_try_each_kind(target, requests, options))
            terminal.print_table(console, content.setup(report))
            load = _Load(console, options, shares, requests, target)
            interval = max(1.0, options.duration / _READINGS)
            with MemorySampler(open_http(options), interval) as memory:
                report |= uvloop.run(load.ramp() if options.ramp else load.at_rate())
            report["memory"] = memory.as_dict()
        finally:
            report["cleaning"] = _clean(console, http, requests, keep=options.keep)
    report["warnings"] = content.warnings(report)
    terminal.show(console, report)
    return report


@dataclass(frozen=True, slots=True)
class _Load:
    console: Console
    options: Options
    shares: Mapping[str, float]
    requests: Requests
    target: Target

    async def at_rate(self) -> dict[str, Any]:
        """Load at one rate."""
        recording = await self._send("load", self.options.rate)
        summary = summarize(recording)
        if (slo := self.options.slo) is not None:
            within = recording.share_within(slo)
            summary["slo"] = {"slo": str(slo), "within": within, "held": slo.is_met(within)}
        return {"ended": recording.ended, "load": summary}

    async def ramp(self) -> dict[str, Any]:
        """Find the highest rate that meets the objective, then load at half of it.

        The statistics are those of that rate; where none met it, of the lowest that was tried.
        """
        slo = self.options.slo or Slo(99.0, 0.05)
        steps: list[dict[str, Any]] = []
        loads: dict[float, dict[str, Any]] = {}
        ended = "completed"

        async def attempt(rate: float) -> bool | None:
            nonlocal ended
            recording = await self._send(f"load: {rate:,.0f} a second", rate, slo)
            loads[rate] = summary = summarize(recording)
            if recording.ended != "objective missed":
                ended = recording.ended
            within = recording.share_within(slo)
            held = slo.is_met(within) and ended == "completed"
            step = {
                "rate": rate,
                "held": held,
                "within": within,
                **{name: summary[name] for name in ("ended", "requests_per_second")},
                **{name: summary["kinds"][ALL][name] for name in ("requests", "latency", "errors")},
                "late": summary["generator"]["late"],
            }
            steps.append(step)
            terminal.show_step(self.console, step, slo)
            return held if ended == "completed" else None

        held, broke = await find_highest_rate(self.options.rate, self.options.most, attempt)
        half = None
        if held is not None and ended == "completed":
            recording = await self._send("load: half of that", held / 2)
            ended, half = recording.ended, _tails(recording, held / 2)
        ramp = {
            "slo": str(slo),
            "slo_seconds": slo.seconds,
            "slo_percentile": slo.percentile,
            "held": held,
            "broke": broke,
            "steps": steps,
            "half": half,
        }
        return {"ended": ended, "load": loads[held or min(loads)], "ramp": ramp}

    async def _send(self, label: str, rate: float, slo: Slo | None = None) -> Recording:
        options, rng = self.options, np.random.default_rng(self.options.seed)
        seconds = options.warmup + options.duration
        due = arrival_times(rate, seconds, options.arrivals, rng)
        schedule = draw_schedule(due, self.shares, PREPARED, rng, warmup=options.warmup)
        loop = OpenLoop(
            self.target,
            schedule,
            self.requests.encode(),
            connections=options.connections,
            timeout=options.timeout,
            silence=options.silence,
            slo=slo,
        )
        with terminal.progress(self.console, label) as progress, _on_signals(loop.stop):

            def on_tick() -> None:
                note = f"{loop.in_flight:,} in flight, {loop.answered:,} answered"
                note += f", [red]{loop.failed:,} failed[/]" if loop.failed else ""
                progress(min(loop.now, seconds), seconds, note)

            return await loop.run(on_tick)


# ------------------------------------------------------------------------------ the parts


async def _try_each_kind(target: Target, requests: Requests, options: Options) -> str | None:
    """Send one request of each kind; returns the version of the model that answered.

    Raises `Unavailable` where one is refused.
    """
    model, request = None, requests.encode()
    async with target.open() as session:
        for number in range(len(requests.kinds)):
            path, body = request(number, 0)
            url = target.url + path
            try:
                async with asyncio.timeout(options.timeout), session.post(url, data=body) as answer:
                    text = await answer.text(errors="replace")
            except TimeoutError:
                raise Unavailable(
                    f"{options.url} did not answer one request in {options.timeout:g} s (--timeout)"
                ) from None
            except (OSError, aiohttp.ClientError) as error:
                raise Unavailable(f"{options.url} does not answer: {error}") from None
            if not answer.ok:
                raise Unavailable(f"POST {path} was answered with {answer.status}: {text[:300]}")
            model = model or orjson.loads(text).get("model_version")
    return model


def _tails(recording: Recording, rate: float) -> dict[str, Any]:
    """Latency of each kind at a rate, and p99 as a multiple of p50."""
    kinds = {kind: percentiles(recording.latencies(kind)) for kind in recording.schedule.kinds}
    ratios = {
        kind: each["p99"] / each["p50"] if each["p50"] and each["p99"] else None
        for kind, each in kinds.items()
    }
    return {"rate": rate, "kinds": kinds, "p99_over_p50": ratios}


def _clean(console: Console, http: httpx.Client, requests: Requests, *, keep: bool) -> Any:
    """Remove what was written, unless it is to be kept; what is left is named."""
    left = requests.written_paths()
    if not keep and left:
        with terminal.progress(console, "removing events") as progress:
            left = delete_all(http, left, progress)
    return {
        "run": requests.run,
        "events": len(requests.written),
        "of": "users of the service" if requests.writes_to_users else "users of its own",
        "kept": keep,
        "left": left,
    }


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM; only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
