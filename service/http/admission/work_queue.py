"""Queue of admitted work: lanes with a number of slots each, in the order of their priority.

Each lane is modelled as one server that its running requests share equally (processor sharing).
While `n` of them run, each attains 1/n second of the lane's service in a second. The service that a
request attained is thereby its cost, whatever ran beside it, and the costs of all that is ahead of
a request add up to its wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from service.domain.errors import Overloaded
from service.runtime.work_slot import current_slot

# "Controlled delay": a queue that has not been empty for a while is no burst but an overload, and
# waiting in it serves nobody. The allowed wait then shrinks to this fraction.
OVERLOAD_PATIENCE = 0.2


@dataclass(slots=True)
class Lane:
    """A kind of work of which `slots` requests run at once; the others wait for their turn.

    yields: starts nothing while a request of an earlier lane waits.
    has_started: a request has started in this iteration of the event loop. The next one waits for
        another, since an answer that is computed on the loop delays whatever arrives meanwhile,
        and above all the refusals, which are due at once.
    """

    slots: int
    yields: bool = False
    running: list[Turn] = field(default_factory=list)
    waiting: deque[Turn] = field(default_factory=deque)
    has_started: bool = False
    service: float = 0.0  # seconds that a request which always ran would have attained so far
    advanced: float = 0.0  # when `service` was computed
    idle: float = 0.0  # when nothing waited last

    def advance(self, now: float) -> None:
        """Count the service up to now. Call it before the number of running requests changes."""
        if self.running:
            self.service += (now - self.advanced) / len(self.running)
        self.advanced = now
        if not self.waiting:
            self.idle = now

    def backlog(self) -> float:
        """Seconds that the requests of this lane are still expected to take together."""
        rest = sum(max(0.0, turn.cost - (self.service - turn.begun)) for turn in self.running)
        return rest + sum(turn.cost for turn in self.waiting)


class Turn:
    """Turn of one request in a lane; a `WorkSlot` while it runs.

    Attributes:
        cost: seconds of the lane's service that the request is expected to take.
        attained: seconds of it that it took, once it has ended.
    """

    def __init__(self, queue: WorkQueue, lane: Lane, cost: float, since: float) -> None:
        self.cost, self.since, self.attained = cost, since, 0.0
        self.begun = 0.0  # the lane's service when it started, or resumed
        self.ready: asyncio.Future[None] | None = None  # of one that waits
        self._queue, self._lane = queue, lane
        self._pauses, self._ended = 0, False

    def start(self) -> None:
        """Run. The caller has advanced the lane."""
        self.begun = self._lane.service
        self._lane.running.append(self)

    def pause(self) -> None:
        """Give the slot away, until `resume` was called as often."""
        self._pauses += 1
        if self._pauses == 1 and not self._ended:
            self._leave()

    def resume(self) -> None:
        """Run again, also beyond the lane's slots."""
        self._pauses -= 1
        if self._pauses == 0 and not self._ended:
            self._lane.advance(self._queue.clock())
            self.start()

    def end(self) -> None:
        """Free the slot for good."""
        self._ended = True
        if self._pauses == 0:
            self._leave()

    def _leave(self) -> None:
        now = self._queue.clock()
        self._lane.advance(now)
        self._lane.running.remove(self)
        self.attained += self._lane.service - self.begun
        self._queue.start_waiting(now)


class WorkQueue:
    """Starts requests lane by lane in the order of arrival, and refuses what would wait too long.

    Args:
        lanes: the first has the highest priority.
        clock: seconds, monotonic.
    """

    def __init__(
        self, lanes: Sequence[Lane], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._lanes = lanes
        now = clock()
        for lane in lanes:
            lane.advanced = lane.idle = now

    def expected_wait(self, number: int) -> float:
        """Seconds until a request of a lane that comes now would have its service for itself."""
        now, lane = self.clock(), self._lanes[number]
        lane.advance(now)
        ahead = 0.0
        if lane.yields:
            for earlier in self._lanes[:number]:
                earlier.advance(now)
                if earlier.waiting:
                    ahead += earlier.backlog()
        return ahead + lane.backlog()

    @asynccontextmanager
    async def turn(self, number: int, cost: float, patience: float) -> AsyncIterator[Turn]:
        """Wait for a slot of a lane, and hold it until the block ends.

        A request starts at once if nothing runs, whatever its cost: an estimate that is wrong could
        never be corrected otherwise.

        Args:
            number: of the lane.
            cost: seconds of the lane's service that the request is expected to take.
            patience: seconds within which it must be done; inf = it waits as long as it takes.

        Raises:
            Overloaded: at once, if the request is expected to be done later; and when its turn
                comes, if it has waited for longer than that.
        """
        lane, now = self._lanes[number], self.clock()
        turn = Turn(self, lane, cost, now)
        wait = self.expected_wait(number)
        is_overload = now - lane.idle > patience
        if wait and wait + cost > patience * (OVERLOAD_PATIENCE if is_overload else 1.0):
            raise _overloaded(wait)
        if self._may_start(number) and not lane.waiting:
            self._start(turn, lane)
        else:
            await self._wait(lane, turn)
        token = current_slot.set(turn)
        try:
            if self.clock() - now > patience:
                raise _overloaded(self.expected_wait(number))
            yield turn
        finally:
            current_slot.reset(token)
            turn.end()

    def start_waiting(self, now: float) -> None:
        """Fill the slots that are free with those that wait."""
        if not any(lane.waiting for lane in self._lanes):
            return
        for number, lane in enumerate(self._lanes):
            lane.advance(now)
            while lane.waiting and self._may_start(number):
                turn = lane.waiting.popleft()
                self._start(turn, lane)
                if turn.ready is not None and not turn.ready.done():
                    turn.ready.set_result(None)

    def _may_start(self, number: int) -> bool:
        lane = self._lanes[number]
        if lane.has_started or len(lane.running) >= lane.slots:
            return False
        return not (lane.yields and any(each.waiting for each in self._lanes[:number]))

    def _start(self, turn: Turn, lane: Lane) -> None:
        turn.start()
        lane.has_started = True
        asyncio.get_running_loop().call_soon(self._iterate, lane)

    def _iterate(self, lane: Lane) -> None:
        """Let the lane start another request, in a new iteration of the event loop."""
        lane.has_started = False
        self.start_waiting(self.clock())

    async def _wait(self, lane: Lane, turn: Turn) -> None:
        turn.ready = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        try:
            await turn.ready
        except asyncio.CancelledError:
            if turn in lane.waiting:
                lane.waiting.remove(turn)
                self.start_waiting(self.clock())  # those that yielded to it
            else:  # it was cancelled just after its turn had come
                turn.end()
            raise


def _overloaded(wait: float) -> Overloaded:
    return Overloaded(
        f"The requests ahead are expected to take {wait:.2f} s, too long for the deadline.", wait
    )
