"""The open loop: each request leaves when it is due, whether or not earlier ones came back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import httptools
import numpy as np
from numpy.typing import NDArray

from service.loadtest.arrivals import Floats, Schedule
from service.loadtest.client import Answer, Connection
from service.loadtest.target import Target

Ended = Literal["all sent", "stopped", "silent", "enough"]

_IDLE = 2.0  # seconds: a server hangs up on whoever is silent for longer, uvicorn after 5
_LEAD = 0.05  # seconds until the first request, so that it is not late
_NAP = 0.1  # seconds between two looks at whether it is to end
_GRACE = 2.0  # seconds that what is under way gets when it is stopped
_DETAIL = 300  # characters of the first answer of each kind that was no success


@dataclass(frozen=True, slots=True)
class Record:
    """What came of each request of a schedule. Times are seconds after the start; NaN = never."""

    schedule: Schedule
    woke: Floats  # when the generator came to it: what this is after `due` is the generator's
    sent: Floats  # when it was written; between, it waited for a connection
    done: Floats  # when its answer was whole, or it failed
    status: NDArray[np.int16]  # of HTTP; 0 without an answer
    timing: Sequence[bytes]  # Server-Timing
    failures: Mapping[int, str]  # why there was no answer
    details: Mapping[tuple[int, str], str]  # of each kind and error, what the first answer said
    ended: Ended
    connections: int  # that were opened

    @property
    def count(self) -> int:
        """How many requests left."""
        return int(np.isfinite(self.woke).sum())


class Sending:
    """One load on one server, which runs once.

    Args:
        target: the server.
        schedule: what is sent when.
        request: the bytes of a kind's request; from `Requests.made`.
        connections: at most so many requests are with the server at once; others wait, and their
            latency counts all the same.
        timeout: seconds after it was due when a request has failed.
        silence: seconds without any answer to what was sent, after which it ends.
        enough: of the requests due from `begin` on, how many may fail or take longer than `limit`
            seconds; one more ends it. None = any number.
        begin: see `enough`; seconds after the start.
        limit: see `enough`; seconds.
    """

    def __init__(
        self,
        target: Target,
        schedule: Schedule,
        request: Callable[[int, int], bytes],
        *,
        connections: int = 500,
        timeout: float = 10.0,
        silence: float = 10.0,
        enough: int | None = None,
        begin: float = 0.0,
        limit: float = float("inf"),
    ) -> None:
        n = len(schedule)
        self._schedule, self._target, self._request = schedule, target, request
        self._timeout, self._silence = timeout, silence
        self._enough, self._begin, self._limit = enough, begin, limit
        self._woke, self._sent, self._done = (np.full(n, np.nan) for _ in range(3))
        self._status = np.zeros(n, dtype=np.int16)
        self._timing = [b""] * n
        self._failures: dict[int, str] = {}
        self._details: dict[tuple[int, str], str] = {}
        self._room = asyncio.Semaphore(connections)
        self._idle: list[tuple[float, Connection]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: Ended = "all sent"
        self._stop = threading.Event()
        self._started = 0.0
        self._unheard: float | None = None  # since when what was sent has no answer
        self._opened = self._over = 0
        self.answered = self.failed = 0  # so far

    @property
    def in_flight(self) -> int:
        """Requests that left and are not over."""
        return len(self._tasks)

    @property
    def now(self) -> float:
        """Seconds after the start."""
        return time.perf_counter() - self._started

    def stop(self, why: Ended = "stopped") -> None:
        """Send no more, and soon wait no more for what is under way."""
        if not self._stop.is_set():
            self._ended = why
            self._stop.set()

    async def run(self, tick: Callable[[], None] = lambda: None) -> Record:
        """Send everything, wait for the answers, and tell what came of it.

        Args:
            tick: called ten times a second meanwhile; what it takes makes requests late.
        """
        paced = asyncio.Event()
        loop = asyncio.get_running_loop()
        pacer = threading.Thread(target=self._pace, args=(loop, paced), daemon=True)
        with _few_pauses():
            self._started = time.perf_counter() + _LEAD
            pacer.start()
            try:
                while (self._tasks or not paced.is_set()) and not self._stop.is_set():
                    await asyncio.sleep(_NAP)
                    if self._unheard is not None and self.now - self._unheard > self._silence:
                        self.stop("silent")
                    tick()
                await self._settle()
            finally:
                self._stop.set()
                await paced.wait()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                for _, connection in self._idle:
                    connection.close()
        return Record(
            self._schedule,
            self._woke,
            self._sent,
            self._done,
            self._status,
            self._timing,
            self._failures,
            self._details,
            self._ended,
            self._opened,
        )

    # ------------------------------------------------------------------ the parts

    async def _settle(self) -> None:
        """What is under way gets some time, for what it writes is to be found and removed."""
        grace = {"all sent": 0.0, "stopped": _GRACE, "silent": 0.0, "enough": self._timeout}
        if self._tasks and grace[self._ended]:
            await asyncio.wait(set(self._tasks), timeout=grace[self._ended])

    def _pace(self, loop: asyncio.AbstractEventLoop, paced: asyncio.Event) -> None:
        """In a thread, which sleeps to the microsecond where the loop's timers count milliseconds.

        What is due is handed to the loop at once, however much is under way.
        """
        due = self._schedule.due
        at = 0
        while at < len(due) and not self._stop.is_set():
            wait = float(due[at]) - self.now
            if wait > 0:
                time.sleep(min(wait, _NAP))
                continue
            until = int(np.searchsorted(due, self.now, side="right"))
            loop.call_soon_threadsafe(self._fire, at, until)
            at = until
        loop.call_soon_threadsafe(paced.set)

    def _fire(self, first: int, until: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(first, until):
            self._woke[number] = self.now
            task = loop.create_task(self._one(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._unheard is None:
            self._unheard = self.now

    async def _one(self, number: int) -> None:
        left = float(self._schedule.due[number]) + self._timeout - self.now
        try:
            async with asyncio.timeout(left), self._room:
                answer = await self._asked(number)
        except TimeoutError:
            self._fails(number, "timeout")
        except ConnectionRefusedError:
            self._fails(number, "refused")
        except ConnectionError:
            self._fails(number, "hung up")
        except httptools.HttpParserError:
            self._fails(number, "no HTTP")
        except OSError as error:
            self._fails(number, error.strerror or type(error).__name__)
        else:
            self._hears(number, answer)

    async def _asked(self, number: int) -> Answer:
        connection = None
        while self._idle and connection is None:
            since, found = self._idle.pop()  # the latest: what is not needed grows old and is left
            if found.open and self.now - since < _IDLE:
                connection = found
            else:
                found.close()
        if connection is None:
            connection = await self._target.connect()
            self._opened += 1
        kind, pick = int(self._schedule.kinds[number]), int(self._schedule.picks[number])
        request = self._request(kind, pick)
        self._sent[number] = self.now
        try:
            answer = await connection.ask(request)
        except BaseException:
            connection.close()  # its answer may still come, and is nobody's
            raise
        self._done[number] = self.now
        if connection.open:
            self._idle.append((self.now, connection))
        return answer

    def _hears(self, number: int, answer: Answer) -> None:
        self._unheard = None
        self.answered += 1
        self._status[number] = answer.status
        self._timing[number] = answer.timing
        if not is_success(answer.status):
            kind = int(self._schedule.kinds[number])
            said = answer.body[:_DETAIL].decode("utf-8", "replace")
            self._details.setdefault((kind, str(answer.status)), said)
        self._counts(number, well=is_success(answer.status))

    def _fails(self, number: int, why: str) -> None:
        self._done[number] = self.now
        self._failures[number] = why
        self._counts(number, well=False)

    def _counts(self, number: int, *, well: bool) -> None:
        self.failed += not well
        due = self._schedule.due[number]
        if due >= self._begin and not (well and self._done[number] - due <= self._limit):
            self._over += 1
            if self._enough is not None and self._over > self._enough:
                self.stop("enough")


def is_success(status: int) -> bool:
    """Whether a request was done; 0 is none."""
    return 200 <= status < 300


@contextmanager
def _few_pauses() -> Iterator[None]:
    """Let the garbage collector pass over all that is there already, which is much."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
