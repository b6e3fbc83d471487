"""Queue of work that computes: a few requests at once, API keys in turns, long requests aside.

There is no estimate of what a request will cost. Each begins as any other; one that has computed
for `QUANTUM` is long from then on. A long request leaves its place to the next, computes beside no
other long one of its key, and waits for the short ones at each of its checkpoints.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from service.domain.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

QUANTUM = 0.05  # seconds of a processor, after which a request is long
MOST_LONG = 4  # long requests of one key that leave their places to others
_BESIDE = 4.0  # times as long as it has computed, a long request waits for short ones at most
_LOOK = 0.001  # seconds between two looks of a long request that waits
_WEIGHT = 0.05  # of a new measurement in the mean
_MAX_JUMP = 4.0  # times the mean that one measurement counts at most
_OVERLOAD = 1.0  # seconds after a refusal, in which less of a deadline may pass in the queue
_PATIENCE = 0.8  # of the deadline, then: so that what is accepted is done in time

# The turn of the request that this task works for.
current_turn: ContextVar[Turn | None] = ContextVar("current_turn", default=None)


class Turn:
    """Turn of one request to compute.

    Attributes:
        key: whose request it is; keys take turns.
        deadline: seconds of the queue's clock at which its work ends; inf = never.
        is_long: it has computed for `QUANTUM`.
    """

    def __init__(self, queue: WorkQueue, key: str, deadline: float) -> None:
        self.key, self.deadline, self.is_long = key, deadline, False
        self.ready: asyncio.Future[None] | None = None  # of one that waits
        self.is_aside = self.is_over = False
        self._queue, self._loop = queue, asyncio.get_running_loop()
        self._seconds = 0.0  # of a processor, that it has computed
        self._began = 0.0  # by the processor's clock of the thread that computes
        self._resumed = 0.0
        self._holds_lock = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as computed in this thread."""
        self._began, self._resumed = time.thread_time(), self._queue.clock()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - self._began
            self.is_long = self.is_long or self._seconds > QUANTUM
            self._release()

    async def run(self, executor: Executor, work: Callable[[], T]) -> T:
        """Compute on a thread. Work that is cancelled ends at its next checkpoint."""

        def compute() -> T:
            with self.computing():
                return work()

        try:
            return await self._loop.run_in_executor(executor, compute)
        except asyncio.CancelledError:
            self.is_over = True
            raise

    def look(self, waits: bool = False) -> None:
        """End the work that nobody waits for, and make long work wait. The thread calls it.

        Args:
            waits: the work waits for a lock, which another long request of its key may hold.

        Raises:
            DeadlineExceeded: the request has ended, or its deadline has passed.
        """
        self._check()
        if waits:
            self._release()
            return
        if self._seconds + time.thread_time() - self._began < QUANTUM:
            return
        self.is_long = True
        if not self.is_aside:
            self._loop.call_soon_threadsafe(self._queue.set_aside, self)
        if not self._holds_lock:
            lock = self._queue.long[self.key]
            while not lock.acquire(timeout=_LOOK):
                self._check()
            self._holds_lock = True
        clock = self._queue.clock
        ends = clock() + _BESIDE * (clock() - self._resumed)
        while self._queue.has_short() and clock() < ends:
            time.sleep(_LOOK)
            self._check()
        self._resumed = clock()

    def _release(self) -> None:
        """Let another long request of the key compute."""
        if self._holds_lock:
            self._holds_lock = False
            self._queue.long[self.key].release()

    def _check(self) -> None:
        if self.is_over or self._queue.clock() > self.deadline:
            raise DeadlineExceeded("Not done by the deadline (HEED_DEADLINE).")


class WorkQueue:
    """Starts requests in the order of arrival, one of each key in turn, and refuses late ones.

    Args:
        places: requests that compute at once, those set aside not counted.
        of_one_key: of these, the most that are of one key.
        after: a queue that comes first: while a request waits in it, none starts here.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        places: int,
        of_one_key: int,
        *,
        after: WorkQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.long: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.interval = 0.0  # seconds from one end to the next while others waited, a mean
        self._places, self._of_one_key, self._after = places, of_one_key, after
        self._waiting: dict[str, deque[Turn]] = {}  # by key; the next key first
        self._running: set[Turn] = set()
        self._held: Counter[str] = Counter()  # places that a key has
        self._aside: Counter[str] = Counter()
        self._ended: float | None = None  # when a place was left last, if all are taken since then
        self._refused = -math.inf
        self.followers: list[WorkQueue] = []
        if after is not None:
            after.followers.append(self)

    def has_short(self) -> bool:
        """Whether a request runs that is not long."""
        return any(not turn.is_long for turn in tuple(self._running))

    def wait(self, key: str) -> float:
        """Seconds until a request of a key that comes now is expected to be done."""
        if not self._waiting and len(self._running) < self._places:
            return 0.0
        own = len(self._waiting.get(key, ()))
        others = (min(len(turns), own + 1) for name, turns in self._waiting.items() if name != key)
        return self.interval * (own + sum(others) + 1 + self._places)

    @asynccontextmanager
    async def turn(self, key: str, deadline: float = math.inf) -> AsyncIterator[Turn]:
        """Wait for a place, and hold it until the block ends.

        Raises:
            Overloaded: at once, if the deadline is expected to pass before the request is done; and
                when its turn comes, if it is then.
        """
        turn, now = Turn(self, key, deadline), self.clock()
        wait = self.wait(key)
        patience = _PATIENCE if now < self._refused + _OVERLOAD else 1.0
        if wait > patience * (deadline - now):
            self._refused = now
            raise self._overloaded(key)
        if key not in self._waiting and self._has_place(key):
            self._start(turn)
        else:
            await self._wait(turn)
        token = current_turn.set(turn)
        try:
            yield turn
        finally:
            current_turn.reset(token)
            turn.is_over = True
            self.leave(turn)
            if turn.is_aside:
                self._aside[key] -= 1

    def leave(self, turn: Turn) -> None:
        """Free the place of a request, if it has one."""
        if turn not in self._running:
            return
        now = self.clock()
        if self._ended is not None:
            taken = now - self._ended
            if self.interval:
                taken = min(taken, _MAX_JUMP * self.interval)
                self.interval += _WEIGHT * (taken - self.interval)
            else:
                self.interval = taken
        self._running.remove(turn)
        self._held[turn.key] -= 1
        self._fill()
        is_full = self._waiting and len(self._running) == self._places
        self._ended = now if is_full else None

    def enter(self, turn: Turn) -> None:
        """Take a place again, also beyond their number: the work has begun already."""
        if not turn.is_over and not turn.is_aside:
            self._start(turn)

    def set_aside(self, turn: Turn) -> None:
        """Free the place of a request that is long, unless its key has `MOST_LONG` others."""
        if turn in self._running and self._aside[turn.key] < MOST_LONG:
            turn.is_aside = True
            self._aside[turn.key] += 1
            self.leave(turn)

    def _has_place(self, key: str) -> bool:
        is_free = len(self._running) < self._places and self._held[key] < self._of_one_key
        return is_free and not (self._after is not None and self._after._waiting)  # noqa: SLF001

    def _start(self, turn: Turn) -> None:
        if turn not in self._running:
            self._running.add(turn)
            self._held[turn.key] += 1

    def _fill(self) -> None:
        """Start those that wait, while there are places."""
        while (key := next(filter(self._has_place, self._waiting), None)) is not None:
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # behind the other keys
            if turn.ready is None or turn.ready.done():  # it was cancelled
                continue
            if self.clock() + self._places * self.interval > turn.deadline:
                self._refused = self.clock()
                turn.ready.set_exception(self._overloaded(key))
                continue
            self._start(turn)
            turn.ready.set_result(None)
        if not self._waiting:
            for follower in self.followers:
                follower._fill()  # noqa: SLF001

    async def _wait(self, turn: Turn) -> None:
        turn.ready = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(turn.key, deque()).append(turn)
        try:
            await turn.ready
        except asyncio.CancelledError:
            turn.is_over = True
            turns = self._waiting.get(turn.key)
            if turns is not None and turn in turns:
                turns.remove(turn)
                if not turns:
                    del self._waiting[turn.key]
                self._fill()  # what yielded to it
            self.leave(turn)  # it was cancelled just after its turn had come
            raise

    def _overloaded(self, key: str) -> Overloaded:
        waiting, wait = sum(map(len, self._waiting.values())), self.wait(key)
        return Overloaded(
            f"{waiting} requests wait, and one is done each {1e3 * self.interval:.3g} ms: this one "
            f"would take {wait:.2f} s, longer than its deadline allows (HEED_DEADLINE).",
            wait,
        )


@contextmanager
def place_left() -> Iterator[None]:
    """Leave the place of the current request to the next, if it has one, until the block ends."""
    turn = current_turn.get()
    if turn is None:
        yield
        return
    queue = turn._queue  # noqa: SLF001
    queue.leave(turn)
    try:
        yield
    finally:
        queue.enter(turn)
