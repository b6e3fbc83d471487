"""The open loop, which sends requests on schedule whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import aiohttp
import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Invalid
from service.lab.load_options import Options, Slo, parse_mix

Floats = NDArray[np.float64]

PREPARED = 1_000  # requests of each kind, which are sent again and again
MAX_REQUESTS = 20_000_000  # of one schedule: each takes some hundred bytes of memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests of a load, in the order in which they are sent."""

    kinds: Sequence[str]  # of the mix
    due: Floats  # [N] seconds after the start, ascending
    kind: NDArray[np.int8]  # [N] indexes into `kinds`
    pick: NDArray[np.int64]  # [N] which of the prepared requests of that kind
    warmup: float = 0.0  # seconds; requests due earlier are excluded from all statistics

    @property
    def counted(self) -> NDArray[np.bool_]:
        """[N] whether a request is due after the warm-up."""
        return self.due >= self.warmup


def draw_schedule(rate: float, options: Options) -> Schedule:
    """Draw the due times of a load, a kind for each by its share of the mix, and a request.

    Constant arrivals come every 1/`rate` seconds. Poisson arrivals are independent of each other,
    as those of many users are, so that the gaps are exponential.

    Raises:
        Invalid: for more than `MAX_REQUESTS` of them.
    """
    rng = np.random.default_rng(options.seed)
    seconds, shares = options.warmup + options.duration, parse_mix(options.mix)
    if rate * seconds > MAX_REQUESTS:
        raise Invalid(
            "--rate", f"{rate:g} a second for {seconds:g} s are more than {MAX_REQUESTS:,} requests"
        )
    if options.arrivals == "constant":
        due = np.arange(np.ceil(rate * seconds), dtype=np.float64) / rate
    else:
        # Given their number, the arrivals of a Poisson process are uniform and independent.
        due = np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))
    weights = np.array(list(shares.values()))
    kind = rng.choice(len(weights), size=len(due), p=weights / weights.sum()).astype(np.int8)
    pick = rng.integers(0, PREPARED, len(due))
    return Schedule(list(shares), due, kind, pick, options.warmup)


# Exact percentiles of all latencies, which are recorded anyway; "max" is the 100th.
PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9, "max": 100.0}
ALL = "all"
OUTSIDE, WAITED, REST = "network and queues", "before sending", "rest of the server"
_TOTAL = "total"  # of Server-Timing
_STAGE = re.compile(r"([\w-]+)\s*;\s*dur=(\d+\.?\d*)")  # milliseconds
_INTERVALS = 200  # of a timeline

REFUSED = (429, 503)  # the server is well, and asks clients to come later

Ended = Literal["completed", "stopped", "silent", "objective missed"]
Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Recording:
    """Times and results of the N requests of a schedule, in seconds after the start; NaN = never.

    Latency is `done` - `schedule.due`: a request that waits behind a stall has waited from the
    moment at which it was due. A closed loop, which sends the next request when the last one was
    answered, sends fewer during a stall and does not see it (coordinated omission).
    """

    schedule: Schedule
    woke: Floats  # [N] when the generator came to it: later than due is the generator's delay
    sent: Floats  # [N] when it was written; between, it waited for a connection
    done: Floats  # [N] when its response was complete, or it failed
    status: NDArray[np.int16]  # [N] HTTP status; 0 without a response
    server_timing: list[str]  # [N] headers
    failures: dict[int, str] = field(default_factory=dict)  # reason without a response, by number
    details: dict[str, str] = field(default_factory=dict)  # first body by "kind status"
    ended: Ended = "completed"

    @classmethod
    def empty(cls, schedule: Schedule) -> Recording:
        n = len(schedule.due)
        woke, sent, done = (np.full(n, np.nan) for _ in range(3))
        return cls(schedule, woke, sent, done, np.zeros(n, dtype=np.int16), [""] * n)

    def kind_of(self, number: int) -> str:
        return self.schedule.kinds[int(self.schedule.kind[number])]

    def succeeded(self, number: int) -> bool:
        return 200 <= int(self.status[number]) < 300

    def refused(self, number: int) -> bool:
        """Report whether a request was answered with a status of `REFUSED`."""
        return int(self.status[number]) in REFUSED

    def due(self, kind: str = ALL) -> Mask:
        """[N] which requests of a kind came due after the warm-up, before the load ended."""
        mask = np.isfinite(self.woke) & self.schedule.counted
        return (
            mask if kind == ALL else mask & (self.schedule.kind == self.schedule.kinds.index(kind))
        )

    def successes(self, kind: str = ALL) -> Mask:
        """[N] which of them were answered with success."""
        return self.due(kind) & (self.status >= 200) & (self.status < 300)

    def latencies(self, kind: str = ALL) -> Floats:
        """Seconds from the due time to the complete response, of the successes."""
        return (self.done - self.schedule.due)[self.successes(kind)]

    def share_within(self, slo: Slo) -> float:
        """Share of requests that met an objective; failures did not."""
        return int((self.latencies() <= slo.seconds).sum()) / max(1, int(self.due().sum()))


def summarize(recording: Recording) -> dict[str, Any]:
    """Return all statistics of one load as plain values for JSON; times in seconds."""
    schedule, due = recording.schedule, recording.due()
    span = float(schedule.due[due].max() - schedule.warmup) if due.any() else 0.0
    waited = (recording.sent - recording.woke)[due]
    return {
        "seconds": span,
        "ended": recording.ended,
        "requests_per_second": int(due.sum()) / span if span else 0.0,
        "successes_per_second": int(recording.successes().sum()) / span if span else 0.0,
        "kinds": {name: _kind(recording, name) for name in (ALL, *schedule.kinds)},
        "details": recording.details,
        "generator": {
            "late": percentiles((recording.woke - schedule.due)[due]),
            "waited_for_a_connection": percentiles(waited[np.isfinite(waited)]),
        },
        "stages": {name: stages for name in schedule.kinds if (stages := _stages(recording, name))},
        "timeline": _timeline(recording, span),
    }


def percentiles(seconds: Floats) -> dict[str, float | None]:
    if not len(seconds):
        return dict.fromkeys(PERCENTILES)
    return dict(
        zip(PERCENTILES, np.percentile(seconds, list(PERCENTILES.values())).tolist(), strict=True)
    )


def parse_server_timing(header: str) -> dict[str, float]:
    """Return seconds by stage of a Server-Timing header; stages without a duration are left out."""
    return {name: float(duration) / 1e3 for name, duration in _STAGE.findall(header)}


# ------------------------------------------------------------------------------ the parts


def _kind(recording: Recording, name: str) -> dict[str, Any]:
    due, successes = recording.due(name), recording.successes(name)
    finished = np.isfinite(recording.done)
    # A request in flight when the load ended is neither an error nor a success.
    refused, errors = Counter[str](), Counter[str]()
    for number in np.flatnonzero(due & finished & ~successes).tolist():
        why = recording.failures.get(number) or str(recording.status[number])
        (refused if recording.refused(number) else errors)[why] += 1
    return {
        "requests": int(due.sum()),
        "successes": int(successes.sum()),
        "refused": dict(refused.most_common()),
        "errors": dict(errors.most_common()),
        "unfinished": int((due & ~finished).sum()),
        "latency": percentiles(recording.latencies(name)),
    }


def _stages(recording: Recording, name: str) -> dict[str, dict[str, float]]:
    """Median and p99 of each stage of the server, of the rest of its total, and of the time around.

    A stage that a request did not come to took it 0 s.
    """
    numbers = np.flatnonzero(recording.successes(name)).tolist()
    every = {number: parse_server_timing(recording.server_timing[number]) for number in numbers}
    timings = {number: each for number, each in every.items() if _TOTAL in each}
    if not timings:
        return {}
    rows = list(timings)
    table = {
        stage: np.array([each.get(stage, 0.0) for each in timings.values()])
        for stage in dict.fromkeys(stage for each in timings.values() for stage in each)
    }
    total = table.pop(_TOTAL)
    # Stages that nest count twice.
    table[REST] = np.maximum(total - sum(table.values()), 0.0)
    table[OUTSIDE] = np.maximum((recording.done - recording.sent)[rows] - total, 0.0)
    table[WAITED] = (recording.sent - recording.schedule.due)[rows]
    return {
        stage: dict(zip(("p50", "p99"), np.percentile(took, (50, 99)).tolist(), strict=True))
        for stage, took in table.items()
    }


def _timeline(recording: Recording, span: float) -> list[dict[str, Any]]:
    """Statistics of equal intervals of about a second or more, by when requests were due."""
    schedule, due, successes = recording.schedule, recording.due(), recording.successes()
    latency = recording.done - schedule.due
    refused = due & np.isin(recording.status, REFUSED)
    failed = due & np.isfinite(recording.done) & ~successes & ~refused
    edges = np.linspace(0.0, span, min(max(round(span), 1), _INTERVALS) + 1)
    ends = np.searchsorted(schedule.due, schedule.warmup + edges)
    ends[-1] = len(due)
    return [
        {
            "at": float(at),
            "requests": int(due[first:end].sum()),
            "refusals": int(refused[first:end].sum()),
            "failures": int(failed[first:end].sum()),
            "latency": percentiles(latency[first:end][successes[first:end]]),
        }
        for at, (first, end) in zip(edges, pairwise(ends), strict=False)
    ]


# uvicorn closes a connection after 5 s without a request.
_KEEP_ALIVE = 2.0  # seconds
_LEAD = 0.05  # seconds until the start, so that the first request is not late
_TICK = 0.1  # seconds between two checks of whether to end
_GRACE = 2.0  # seconds for requests in flight after an interrupt
_DETAIL = 300  # characters kept of the first response of each kind and error


class OpenLoop:
    """One load on one server; runs once.

    Args:
        options: address and headers, connections, timeout and silence.
        schedule: the requests.
        request: path and body by kind and pick, such as `Requests.encode`.
        slo: ends the load as soon as this objective cannot be met any more.
    """

    def __init__(
        self,
        options: Options,
        schedule: Schedule,
        request: Callable[[str, int], tuple[str, bytes]],
        slo: Slo | None = None,
    ) -> None:
        self.recording = Recording.empty(schedule)
        self._schedule, self._options, self._request = schedule, options, request
        self._slo = slo
        self._misses_left = slo.allowed(int(schedule.counted.sum())) if slo else 0
        self._slots = asyncio.Semaphore(options.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._started = 0.0
        self._unanswered_since: float | None = None
        self.answered = self.refused = self.failed = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    @property
    def now(self) -> float:
        return time.perf_counter() - self._started

    def stop(self, why: Ended = "stopped") -> None:
        if not self._stopped:
            self.recording.ended, self._stopped = why, True

    async def run(self, on_tick: Callable[[], None] = lambda: None) -> Recording:
        """Send all requests, wait for the responses, and return their times.

        Args:
            on_tick: called ten times a second; its own time delays requests.
        """
        # Collections are pauses: those during the load leave out what exists already.
        gc.collect()
        gc.freeze()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            headers=[("content-type", "application/json"), *self._options.headers()],
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as self._session:
            self._started = time.perf_counter() + _LEAD
            loop = asyncio.get_running_loop()
            pacer = asyncio.create_task(asyncio.to_thread(self._pace, loop))
            try:
                while (self._tasks or not pacer.done()) and not self._stopped:
                    await asyncio.sleep(_TICK)
                    since = self._unanswered_since
                    if since is not None and self.now - since > self._options.silence:
                        self.stop("silent")
                    on_tick()
                # Requests in flight may write: those events must be known to be removed.
                grace = {"stopped": _GRACE, "objective missed": self._options.timeout}
                if self._tasks and (seconds := grace.get(self.recording.ended)):
                    await asyncio.wait(set(self._tasks), timeout=seconds)
            finally:
                self._stopped = True
                await pacer
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                gc.unfreeze()
        return self.recording

    # ------------------------------------------------------------------ the parts

    def _pace(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand requests to the loop when they are due.

        On a thread, which sleeps to the microsecond; timers of the loop count milliseconds.
        """
        due, at = self._schedule.due, 0
        while at < len(due) and not self._stopped:
            wait = float(due[at]) - self.now
            if wait > 0:
                time.sleep(min(wait, _TICK))
                continue
            until = int(np.searchsorted(due, self.now, side="right"))
            loop.call_soon_threadsafe(self._start, at, until)
            at = until

    def _start(self, first: int, until: int) -> None:
        for number in range(first, until):
            self.recording.woke[number] = self.now
            task = asyncio.create_task(self._one(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._unanswered_since is None:
            self._unanswered_since = self.now

    async def _one(self, number: int) -> None:
        recording, due, error = self.recording, float(self._schedule.due[number]), ""
        try:
            async with asyncio.timeout(due + self._options.timeout - self.now), self._slots:
                body = await self._send(number)
        except TimeoutError:
            error = "timeout"
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
            error = "hung up"
        except (aiohttp.ClientError, OSError) as caught:
            error = getattr(caught, "strerror", None) or type(caught).__name__
        succeeded = recording.succeeded(number)
        if error:
            recording.done[number] = self.now
            recording.failures[number] = error
        else:
            self._unanswered_since = None
            self.answered += 1
            if not succeeded:
                key = f"{recording.kind_of(number)} {recording.status[number]}"
                recording.details.setdefault(key, body[:_DETAIL].decode("utf-8", "replace"))
        self.refused += not error and recording.refused(number)
        self.failed += bool(error) or not (succeeded or recording.refused(number))
        if self._slo is not None and due >= self._schedule.warmup:
            self._misses_left -= not succeeded or recording.done[number] - due > self._slo.seconds
            if self._misses_left < 0:
                self.stop("objective missed")

    async def _send(self, number: int) -> bytes:
        recording = self.recording
        path, body = self._request(recording.kind_of(number), int(self._schedule.pick[number]))
        recording.sent[number] = self.now
        async with self._session.post(self._options.url.rstrip("/") + path, data=body) as response:
            received = await response.read()
        recording.done[number] = self.now
        recording.status[number] = response.status
        recording.server_timing[number] = response.headers.get("server-timing", "")
        return received


FACTOR = 1.5  # from one step up to the next
NEAR = 1.05  # the search ends when the lowest failing rate is so near above the highest passing one
LEAST = 1.0  # request a second


async def find_highest_rate(
    start: float, most: float, attempt: Callable[[float], Awaitable[bool | None]]
) -> tuple[float | None, float | None]:
    """Raise the rate by half until it fails, then bisect on a logarithmic scale.

    If `start` fails already, the rate is halved until it passes.

    Args:
        start: first rate, requests a second.
        most: highest rate to try.
        attempt: whether a rate passes; None ends the search.

    Returns:
        The highest rate that passed and the lowest that failed, each None where there is none.
    """
    held: float | None = None
    broke: float | None = None
    rate = min(start, most)
    while (passed := await attempt(rate)) is not None:
        if passed:
            held = rate
        else:
            broke = rate
        if held is None:
            if rate <= LEAST:
                break
            rate = max(rate / 2, LEAST)
        elif broke is None:
            if rate >= most:
                break
            rate = min(rate * FACTOR, most)
        elif broke <= held * NEAR:
            break
        else:
            rate = (held * broke) ** 0.5
    return held, broke
