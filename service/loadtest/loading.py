"""One load on one server, or the ramp of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from service.loadtest.arrivals import Arrivals, arrivals, schedule
from service.loadtest.figures import ALL, Seen, Slo, figures, tails
from service.loadtest.mix import DEFAULT, DISTINCT, Requests
from service.loadtest.ramp import climb
from service.loadtest.report import terminal
from service.loadtest.sending import Record, Sending
from service.loadtest.target import Target


@dataclass(frozen=True, slots=True)
class Options:
    """How to load what; the options of the command by their names."""

    url: str
    rate: float = 50.0  # requests a second; of a ramp, the first
    duration: float = 30.0  # seconds; of a ramp, each step's
    warmup: float = 2.0  # seconds of the same load before it, which do not count
    arrivals: Arrivals = "poisson"
    mix: str = DEFAULT
    headers: Sequence[tuple[str, str]] = ()
    users: int = 200
    targets: int = 100  # of a score
    limit: int = 20  # items of a recommendation and a search
    connections: int = 500
    timeout: float = 10.0
    silence: float = 10.0
    slo: Slo | None = None
    ramp: bool = False
    most: float = 10_000.0  # requests a second that a ramp goes to
    write_to_users: bool = False
    keep: bool = False  # what was written
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """What a report says of them: of headers only the names, since their values are secrets."""
        return asdict(self) | {"headers": [name for name, _ in self.headers]}


@dataclass(frozen=True, slots=True)
class Load:
    """A load of some options on one server."""

    console: Console
    options: Options
    shares: Mapping[str, float]
    requests: Requests
    target: Target
    paths: Mapping[str, str]

    def measured(self, name: str) -> dict[str, Any]:
        """Its figures; those of a ramp too.

        A ramp begins at the options' rate, and its figures are those of the highest rate that held
        (where none did, of the lowest tried). At its end comes half of the rate that held, where a
        service does well to be.
        """
        if not self.options.ramp:
            seen = uvloop.run(self._sent(name, self.options.rate))
            return {"ended": _ended(seen.record), "load": self._figures(seen)}
        return uvloop.run(self._ramp(name))

    async def _ramp(self, name: str) -> dict[str, Any]:
        slo = self.options.slo or Slo(99.0, 0.05)
        steps: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        best_held = False
        ended = "completed"

        async def attempt(rate: float) -> bool | None:
            nonlocal best, best_held, ended
            seen = await self._sent(f"{name}: {rate:,.0f} a second", rate, slo)
            found = self._figures(seen)
            ended = _ended(seen.record)
            within = seen.within(slo)
            held = slo.held(within) and ended == "completed"
            steps.append(
                {
                    "rate": rate,
                    "held": held,
                    "within": within,
                    "requests": found["kinds"][ALL]["requests"],
                    "requests_per_second": found["requests_per_second"],
                    "latency": found["kinds"][ALL]["latency"],
                    "errors": found["kinds"][ALL]["errors"],
                    "late": found["generator"]["late"],
                    "ended": seen.record.ended,
                }
            )
            terminal.step(self.console, steps[-1], slo)
            # Rates that hold only grow.
            if best is None or held or not best_held:
                best, best_held = found, held
            return held if ended == "completed" else None

        climbed = await climb(self.options.rate, self.options.most, attempt)
        half = None
        if climbed.held is not None and ended == "completed":
            seen = await self._sent(f"{name}: half of that", climbed.held / 2)
            ended, half = _ended(seen.record), tails(seen, climbed.held / 2)
        return {
            "ended": ended,
            "load": best,
            "ramp": {
                "slo": str(slo),
                "slo_seconds": slo.seconds,
                "slo_percentile": slo.percentile,
                "held": climbed.held,
                "broke": climbed.broke,
                "steps": steps,
                "half": half,
            },
        }

    async def _sent(self, name: str, rate: float, slo: Slo | None = None) -> Seen:
        options = self.options
        rng = np.random.default_rng(options.seed)
        due = arrivals(rate, options.warmup + options.duration, options.arrivals, rng)
        planned = schedule(due, list(self.shares.values()), [DISTINCT] * len(self.shares), rng)
        sending = Sending(
            self.target,
            planned,
            self.requests.made(self.paths, self.target.authority, options.headers),
            connections=options.connections,
            timeout=options.timeout,
            silence=options.silence,
            begin=options.warmup,
            enough=slo.allowed(int((due >= options.warmup).sum())) if slo else None,
            limit=slo.seconds if slo else float("inf"),
        )
        with (
            terminal.progress(
                self.console, name, sending, options.warmup + options.duration
            ) as tick,
            _stoppable(sending.stop),
        ):
            record = await sending.run(tick)
        return Seen(record, list(self.shares), options.warmup)

    def _figures(self, seen: Seen) -> dict[str, Any]:
        slo, found = self.options.slo, figures(seen)
        if slo is not None and not self.options.ramp:
            within = seen.within(slo)
            found["slo"] = {"slo": str(slo), "within": within, "held": slo.held(within)}
        return found


# ------------------------------------------------------------------------------ the parts


def _ended(record: Record) -> str:
    return {"stopped": "stopped", "silent": "silent"}.get(record.ended, "completed")


@contextmanager
def _stoppable(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop`, where this thread may say so."""
    loop = asyncio.get_running_loop()
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, stop)
    except (ValueError, RuntimeError):  # not the main thread
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
