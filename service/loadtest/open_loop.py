"""The open loop: requests are sent on schedule, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import numpy as np

from service.loadtest.options import Slo
from service.loadtest.results import Ended, Recording
from service.loadtest.schedule import Schedule
from service.loadtest.target import Target

_LEAD = 0.05  # seconds until the start, so that the first request is not late
_TICK = 0.1  # seconds between two checks of whether to end
_GRACE = 2.0  # seconds for requests in flight after an interrupt
_DETAIL = 300  # characters kept of the first response of each kind and error


class OpenLoop:
    """One load on one server; runs once.

    Args:
        target: the server.
        schedule: the requests.
        request: path and body by kind and pick, from `Requests.encode`.
        connections: requests in flight at most; further ones wait, which counts as latency.
        timeout: seconds after its due time at which a request fails.
        silence: seconds without any response after which the load ends.
        slo: ends the load as soon as this objective cannot be met any more.
    """

    def __init__(
        self,
        target: Target,
        schedule: Schedule,
        request: Callable[[int, int], tuple[str, bytes]],
        *,
        connections: int = 500,
        timeout: float = 10.0,
        silence: float = 10.0,
        slo: Slo | None = None,
    ) -> None:
        self.recording = Recording.empty(schedule)
        self._schedule, self._target, self._request = schedule, target, request
        self._timeout, self._silence, self._slo = timeout, silence, slo
        self._misses_left = slo.allowed(int(schedule.counted.sum())) if slo else 0
        self._slots = asyncio.Semaphore(connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        self._started = 0.0
        self._unanswered_since: float | None = None
        self.answered = self.failed = 0

    @property
    def in_flight(self) -> int:
        """Requests that are due and not finished."""
        return len(self._tasks)

    @property
    def now(self) -> float:
        """Seconds after the start."""
        return time.perf_counter() - self._started

    def stop(self, why: Ended = "stopped") -> None:
        """Send no more requests, and end soon."""
        if not self._stop.is_set():
            self.recording.ended = why
            self._stop.set()

    async def run(self, on_tick: Callable[[], None] = lambda: None) -> Recording:
        """Send all requests, wait for the responses, and return their times.

        Args:
            on_tick: called ten times a second; its own time delays requests.
        """
        all_due = asyncio.Event()
        loop = asyncio.get_running_loop()
        pacer = threading.Thread(target=self._pace, args=(loop, all_due), daemon=True)
        async with self._target.open(self._on_connect) as self._session:
            with _without_collections():
                self._started = time.perf_counter() + _LEAD
                pacer.start()
                try:
                    while (self._tasks or not all_due.is_set()) and not self._stop.is_set():
                        await asyncio.sleep(_TICK)
                        since = self._unanswered_since
                        if since is not None and self.now - since > self._silence:
                            self.stop("silent")
                        on_tick()
                    # Requests in flight may write: those events must be known to be removed.
                    grace = {"stopped": _GRACE, "objective missed": self._timeout}
                    if self._tasks and (seconds := grace.get(self.recording.ended)):
                        await asyncio.wait(set(self._tasks), timeout=seconds)
                finally:
                    self._stop.set()
                    await all_due.wait()
                    for task in self._tasks:
                        task.cancel()
                    await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.recording

    # ------------------------------------------------------------------ the parts

    def _pace(self, loop: asyncio.AbstractEventLoop, all_due: asyncio.Event) -> None:
        """Hand requests to the loop when they are due.

        On a thread, which sleeps to the microsecond; timers of the loop count milliseconds.
        """
        due, at = self._schedule.due, 0
        while at < len(due) and not self._stop.is_set():
            wait = float(due[at]) - self.now
            if wait > 0:
                time.sleep(min(wait, _TICK))
                continue
            until = int(np.searchsorted(due, self.now, side="right"))
            loop.call_soon_threadsafe(self._start, at, until)
            at = until
        loop.call_soon_threadsafe(all_due.set)

    def _start(self, first: int, until: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(first, until):
            self.recording.woke[number] = self.now
            task = loop.create_task(self._one(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._unanswered_since is None:
            self._unanswered_since = self.now

    async def _one(self, number: int) -> None:
        recording, error = self.recording, ""
        try:
            left = float(self._schedule.due[number]) + self._timeout - self.now
            async with asyncio.timeout(left), self._slots:
                body = await self._send(number)
        except TimeoutError:
            error = "timeout"
        except aiohttp.ClientConnectorError as caught:
            refused = isinstance(caught.os_error, ConnectionRefusedError)
            error = "refused" if refused else caught.strerror or type(caught.os_error).__name__
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError):
            error = "hung up"
        except aiohttp.ClientResponseError:
            error = "no HTTP"
        except OSError as caught:
            error = caught.strerror or type(caught).__name__
        if error:
            recording.done[number] = self.now
            recording.failures[number] = error
        else:
            self._unanswered_since = None
            self.answered += 1
            if not recording.succeeded(number):
                key = recording.kind_of(number), str(recording.status[number])
                text = body[:_DETAIL].decode("utf-8", "replace")
                recording.details.setdefault(key, text)
        self._judge(number)

    async def _send(self, number: int) -> bytes:
        recording, schedule = self.recording, self._schedule
        path, body = self._request(int(schedule.kind[number]), int(schedule.pick[number]))
        recording.sent[number] = self.now
        async with self._session.post(self._target.url + path, data=body) as response:
            received = await response.read()
        recording.done[number] = self.now
        recording.status[number] = response.status
        timing = response.headers.get("server-timing", "")
        recording.server_timing[number] = timing.encode("latin-1", "replace")
        return received

    def _on_connect(self) -> None:
        self.recording.connections += 1

    def _judge(self, number: int) -> None:
        succeeded = self.recording.succeeded(number)
        self.failed += not succeeded
        due = self._schedule.due[number]
        if self._slo is None or due < self._schedule.warmup:
            return
        if not succeeded or self.recording.done[number] - due > self._slo.seconds:
            self._misses_left -= 1
            if self._misses_left < 0:
                self.stop("objective missed")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Exclude the many objects that exist already from garbage collections, which are pauses."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
