"""Queue of work that computes: a few requests at once, API keys in turns, long requests aside.

The cost of a request is not estimated. All begin alike; one that has computed for `QUANTUM` is long
from then on. A long request leaves its place to the next. The long requests of a key compute one at
a time, in the order in which they became long, and wait for short requests at their checkpoints.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from select import select
from typing import TypeVar

from service.domain.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")

QUANTUM = 0.02  # seconds of processor time after which a request is long
MOST_ASIDE = 16  # long requests without places, each of which holds a thread
MOST_LONG = 4  # long requests of one key that leave their places
_BESIDE = 4.0  # longest wait of a long request for short ones, in times of what it has computed
_LOOK = 0.001  # seconds between two looks of a long request that waits
_WEIGHT = 0.05  # weight of a new measurement in the mean
_MAX_JUMP = 4.0  # most that one measurement counts, in times of the mean
_OVERLOAD = 1.0  # seconds after a refusal in which `_PATIENCE` applies
_PATIENCE = 0.5  # share of a deadline that may pass in the queue then
_DOUBT = 1.5  # times the time left, from which a request that waits is refused

# The turn of the request that this task works for.
current_turn: ContextVar[Turn | None] = ContextVar("current_turn", default=None)


@dataclass(slots=True, eq=False)
class _Key:
    """The requests of one key: those that wait, and the numbers of places and of those set aside.

    Attributes:
        turns: requests that have not ended, those that were just refused among them.
        interval: mean seconds from one end to the next while others of the key waited.
        ended: when its last request left a place, if others have waited since.
    """

    name: str
    interval: float
    ended: float | None = None
    turns: int = 0
    waiting: deque[Turn] = field(default_factory=deque)
    places: int = 0
    aside: int = 0


class Turn:
    """Turn of one request to compute.

    Attributes:
        key: whose request it is; keys take turns.
        deadline: time by the queue's clock at which its work ends; inf = never.
        is_long: it has computed for `QUANTUM`.
        is_aside: it is long and has no place.
        is_over: nobody waits for its work.
        is_computing: a thread works for it; else it waits for the store, or for its client.
    """

    def __init__(self, queue: WorkQueue, key: _Key, deadline: float) -> None:
        self.key, self.deadline = key, deadline
        self.is_long = self.is_aside = self.is_over = self.is_computing = False
        self.ready: asyncio.Future[None] | None = None  # done when the wait ends
        self.queue, self._loop = queue, asyncio.get_running_loop()
        self._seconds = 0.0  # processor time that it has used
        self._began = 0.0  # by the clock of the computing thread
        self._resumed = 0.0
        self._asked = -math.inf  # when it asked to be set aside

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as computed in this thread."""
        self._began, self._resumed = time.thread_time(), self.queue.clock()
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False
            self._seconds += time.thread_time() - self._began
            self.is_long = self.is_long or self._seconds > QUANTUM
            if self.is_over:
                self.give_way()

    async def run(self, executor: Executor | None, work: Callable[[], T]) -> T:
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
        """End work that nobody waits for, and make long work wait. The computing thread calls it.

        With `waits`, the work waits for a lock, which another long request of its key may hold.

        Raises:
            DeadlineExceeded: the request has ended, or its deadline has passed.
        """
        self._check()
        if waits:
            self.give_way()
            return
        if self._seconds + time.thread_time() - self._began < QUANTUM:
            return
        self.is_long, clock = True, self.queue.clock
        if not self.is_aside and clock() > self._asked + QUANTUM:
            self._asked = clock()
            self._loop.call_soon_threadsafe(self.queue.set_aside, self)
        if self not in self.queue.long:
            self.queue.long.append(self)
        while not self.queue.may_compute(self):
            _pause()
            self._check()
        ends = clock() + _BESIDE * (clock() - self._resumed)
        while self.queue.has_short() and clock() < ends:
            _pause()
            self._check()
        self._resumed = clock()

    def give_way(self) -> None:
        """Let the next long request compute."""
        with suppress(ValueError):
            self.queue.long.remove(self)

    def _check(self) -> None:
        if self.is_over or self.queue.clock() > self.deadline:
            raise DeadlineExceeded("Not done by the deadline (HEED_DEADLINE).")


def _pause() -> None:
    # `time.sleep` waits for a point in time, and fails where a library sets the clock meanwhile.
    select([], [], [], _LOOK)


class WorkQueue:
    """Starts requests in the order of arrival, one of each key in turn, and refuses late ones.

    Args:
        places: requests that compute at once, those set aside not counted.
        of_one_key: most places of one key.
        after: queue with priority: while a request waits in it, none starts here.
        clock: seconds, monotonic.

    Attributes:
        json: held to read or write JSON on a thread. Both keep Python's lock for milliseconds, and
            several such threads would keep the event loop from it for the sum of theirs.
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
        self._places, self._of_one_key, self._after = places, of_one_key, after
        self._keys: dict[str, _Key] = {}
        self.waiting: dict[str, _Key] = {}  # keys with waiting requests, the next one first
        self._running: set[Turn] = set()
        self._aside = 0
        self.long: list[Turn] = []  # in the order in which they became long
        self._interval = 0.0  # last interval of any key; 0 before the first measurement
        self._refused = -math.inf
        self.followers: list[WorkQueue] = []
        self.json: asyncio.Lock = asyncio.Lock() if after is None else after.json
        if after is not None:
            after.followers.append(self)

    def has_short(self) -> bool:
        """Report whether a request runs that is not long."""
        return any(not turn.is_long for turn in tuple(self._running))

    def may_compute(self, turn: Turn) -> bool:
        """Report whether a long request computes: the first of its key, of the first few keys."""
        keys = set[_Key]()
        for other in (*self.long, turn):
            if other is turn:
                return turn.key not in keys and len(keys) < max(1, self._places - 2)
            if other.is_computing:
                keys.add(other.key)
        return False

    def wait(self, name: str) -> float:
        """Seconds until a request of a key that comes now is expected to be done."""
        key = self._keys.get(name)
        if key is None or not key.waiting:
            return 0.0
        return key.interval * (len(key.waiting) + key.places + 1)

    @asynccontextmanager
    async def turn(self, name: str, deadline: float = math.inf) -> AsyncIterator[Turn]:
        """Wait for a place for a request of a key, and hold it until the block ends.

        Raises:
            Overloaded: at once, or when its turn comes, if the request is then expected to miss its
                deadline.
        """
        now = self.clock()
        patience = _PATIENCE if now < self._refused + _OVERLOAD else 1.0
        wait, left = self.wait(name), patience * (deadline - now)
        key = self._keys.get(name) or _Key(name, self._interval)
        if wait > left:
            self._refused = now
            raise _overloaded(key, wait, left)
        self._keys[name] = key
        key.turns += 1
        turn = Turn(self, key, deadline)
        token = current_turn.set(turn)
        try:
            if key.waiting or not self._has_place(key):
                await self._wait(turn)
            else:
                self.enter(turn)
            yield turn
        finally:
            current_turn.reset(token)
            turn.is_over = True
            turn.give_way()
            self.leave(turn)
            key.aside -= turn.is_aside
            self._aside -= turn.is_aside
            key.turns -= 1
            if not key.turns:  # else another key of this name would stand beside it
                del self._keys[name]

    def enter(self, turn: Turn) -> None:
        self._running.add(turn)
        turn.key.places += 1

    def leave(self, turn: Turn, *, has_ended: bool = True) -> None:
        """Free the place of a request, if it has one."""
        if turn not in self._running:
            return
        now, key = self.clock(), turn.key
        if has_ended and key.ended is not None:
            taken = now - key.ended
            if key.interval:
                taken = min(taken, _MAX_JUMP * key.interval)
                key.interval += _WEIGHT * (taken - key.interval)
            else:
                key.interval = taken
            self._interval = key.interval
        self._running.remove(turn)
        key.places -= 1
        self._refuse_last(key)
        self.fill()
        key.ended = now if key.waiting else None

    async def come_back(self, turn: Turn) -> None:
        """Wait for a place, as the first of the key, for a request that left its own.

        Raises:
            Overloaded: as `turn`, when its turn comes.
        """
        if turn.is_over or turn.is_aside or turn in self._running:
            return
        if turn.key.waiting or not self._has_place(turn.key):
            await self._wait(turn, is_first=True)
        else:
            self.enter(turn)

    def set_aside(self, turn: Turn) -> None:
        """Free the place of a request that is long, unless too many others are set aside."""
        has_room = turn.key.aside < MOST_LONG and self._aside < MOST_ASIDE
        if turn in self._running and has_room:
            turn.is_aside = True
            turn.key.aside += 1
            self._aside += 1
            self.leave(turn)

    def fill(self) -> None:
        """Start waiting requests while there are places."""
        while (key := next(filter(self._has_place, self.waiting.values()), None)) is not None:
            turn = key.waiting.popleft()
            del self.waiting[key.name]
            if key.waiting:
                self.waiting[key.name] = key  # behind the other keys
            if turn.ready is None or turn.ready.done():  # it was cancelled
                continue
            if self._is_late(turn, (key.places + 1) * key.interval):
                continue
            self.enter(turn)
            turn.ready.set_result(None)
        if not self.waiting:
            for follower in self.followers:
                follower.fill()

    def _refuse_last(self, key: _Key) -> None:
        """Refuse the requests that came last while they are expected to miss their deadlines."""
        while key.waiting:
            turn = key.waiting[-1]
            # The first of them takes the free place.
            wait = key.interval * (len(key.waiting) + key.places) / _DOUBT
            if turn.ready is not None and not (turn.ready.done() or self._is_late(turn, wait)):
                return
            self._remove(turn)

    def _is_late(self, turn: Turn, wait: float) -> bool:
        """Refuse a request that waits, if its deadline passes before it is done."""
        left = turn.deadline - self.clock()
        if wait <= left or turn.ready is None:
            return False
        self._refused = self.clock()
        turn.ready.set_exception(_overloaded(turn.key, wait, left))
        return True

    def _remove(self, turn: Turn) -> None:
        turn.key.waiting.remove(turn)
        if not turn.key.waiting:
            del self.waiting[turn.key.name]

    def _has_place(self, key: _Key) -> bool:
        is_free = len(self._running) < self._places and key.places < self._of_one_key
        return is_free and not (self._after is not None and self._after.waiting)

    async def _wait(self, turn: Turn, *, is_first: bool = False) -> None:
        turn.ready = asyncio.get_running_loop().create_future()
        (turn.key.waiting.appendleft if is_first else turn.key.waiting.append)(turn)
        self.waiting.setdefault(turn.key.name, turn.key)
        try:
            await turn.ready
        except asyncio.CancelledError:
            if turn in turn.key.waiting:
                self._remove(turn)
                self.fill()  # requests that waited behind it
            raise


def _overloaded(key: _Key, wait: float, left: float) -> Overloaded:
    return Overloaded(
        f"{len(key.waiting)} requests wait, and one is done each {1e3 * key.interval:.3g} ms: this "
        f"one needs {wait:.2f} s, and has {max(0.0, left):.2f} s (HEED_DEADLINE).",
        wait,
    )


@asynccontextmanager
async def place_left() -> AsyncIterator[None]:
    """Leave the place of the current request to the next, if it has one, until the block ends.

    Raises:
        Overloaded: as `WorkQueue.come_back`.
    """
    turn = current_turn.get()
    if turn is None:
        yield
        return
    turn.queue.leave(turn, has_ended=False)
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception:
        await turn.queue.come_back(turn)
        raise
    await turn.queue.come_back(turn)
