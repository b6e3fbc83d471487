"""The open loop: requests are sent on schedule, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import aiohttp
import numpy as np

from service.loadtest.options import Options, Slo
from service.loadtest.results import Ended, Recording
from service.loadtest.schedule import Schedule

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
        """Requests that are due and not finished."""
        return len(self._tasks)

    @property
    def now(self) -> float:
        """Seconds after the start."""
        return time.perf_counter() - self._started

    def stop(self, why: Ended = "stopped") -> None:
        """Send no more requests, and end soon."""
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
            headers=[("content-type", "application/json"), *self._options.headers],
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
        async with self._session.post(self._options.url + path, data=body) as response:
            received = await response.read()
        recording.done[number] = self.now
        recording.status[number] = response.status
        recording.server_timing[number] = response.headers.get("server-timing", "")
        return received
