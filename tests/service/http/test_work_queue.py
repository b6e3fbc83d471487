"""The queue of admitted work, in time that the tests set."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine

import pytest

from service.domain.errors import Overloaded
from service.http.admission.work_queue import Lane, WorkQueue
from service.runtime.work_slot import slot_released

URGENT, BULK = 0, 1


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Requests of one test: each runs until it is ended."""

    def __init__(self, slots: int = 1) -> None:
        self.clock = Clock()
        self.queue = WorkQueue([Lane(slots), Lane(slots, yields=True)], clock=self.clock)
        self.started: list[str] = []
        self.attained: dict[str, float] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(
        self, name: str, *, lane: int = URGENT, cost: float = 1.0, patience: float = 10.0
    ) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.queue.turn(lane, cost, patience) as turn:
                self.started.append(name)
                await self._ends[name].wait()
            self.attained[name] = turn.attained

        task = asyncio.create_task(run())
        await settle()
        return task

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


Test = Callable[[], Coroutine[None, None, None]]


def run(test: Test) -> None:
    asyncio.run(test())


def test_running_requests_share_the_service() -> None:
    """What a request attained is its share of the time, whatever ran beside it."""

    async def test() -> None:
        work = Work(slots=2)
        await work.begin("a")
        work.clock.now += 1.0  # alone
        await work.begin("b")
        work.clock.now += 1.0  # half each
        await work.end("a")
        work.clock.now += 1.0  # alone
        await work.end("b")
        assert work.attained == pytest.approx({"a": 1.5, "b": 1.5})

    run(test)


def test_what_would_wait_too_long_is_refused_at_once() -> None:
    """A request is refused by the costs of all that is ahead, which are its Retry-After."""

    async def test() -> None:
        work = Work()
        await work.begin("runs", cost=2.0)
        work.clock.now += 0.5
        await work.begin("waits", cost=3.0)
        fits = await work.begin("fits", cost=5.0, patience=9.6)
        refused = await work.begin("refused", cost=0.2, patience=9.6)
        assert not fits.done()
        with pytest.raises(Overloaded) as caught:
            await refused
        assert caught.value.retry_after == pytest.approx(1.5 + 3.0 + 5.0)
        assert work.started == ["runs"]

    run(test)


def test_refusals_wait_for_one_start_at_most() -> None:
    """Of the requests that may start, one does in each iteration of the event loop."""

    async def test() -> None:
        queue = WorkQueue([Lane(8)], clock=Clock())
        happened: list[str] = []

        async def request(name: str, patience: float) -> None:
            try:
                async with queue.turn(URGENT, 1.0, patience):
                    happened.append(f"{name} computes")
            except Overloaded:
                happened.append(f"{name} refused")

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(request(name, math.inf))
            group.create_task(request("d", 1.0))
        computed = [f"{name} computes" for name in "abc"]
        assert happened == [computed[0], "d refused", *computed[1:]]

    run(test)


def test_the_only_request_starts_whatever_its_cost() -> None:
    """An estimate beyond all patience starts where nothing runs, so that it is corrected."""

    async def test() -> None:
        work = Work()
        await work.begin("dear", cost=1e9, patience=0.1)
        assert work.started == ["dear"]

    run(test)


def test_requests_that_would_make_each_other_late_do_not_run_together() -> None:
    """A free slot is refused to a request that would end too late beside those that run."""

    async def test() -> None:
        work = Work(slots=2)
        await work.begin("first", cost=0.6, patience=1.0)
        second = await work.begin("second", cost=0.6, patience=1.0)
        with pytest.raises(Overloaded):
            await second
        await work.begin("small", cost=0.3, patience=1.0)
        assert work.started == ["first", "small"]

    run(test)


def test_bulk_work_waits_for_all_that_is_urgent() -> None:
    """Bulk work that came first starts last, and then in its own slots."""

    async def test() -> None:
        work = Work()
        await work.begin("runs")
        await work.begin("bulk runs", lane=BULK, patience=math.inf)
        await work.begin("bulk waits", lane=BULK, patience=math.inf)
        await work.begin("first")
        await work.begin("second")
        await work.end("bulk runs")
        assert work.started == ["runs", "bulk runs"]
        await work.end("runs")
        assert work.started[2:] == ["first"]
        await work.end("first")
        assert work.started[3:] == ["second", "bulk waits"]

    run(test)


def test_a_lasting_queue_shortens_the_wait_that_is_allowed() -> None:
    """A queue that has not been empty for long is an overload: only short waits are accepted."""

    async def test() -> None:
        work = Work()
        for name in ("runs", "waits"):
            await work.begin(name, cost=2.0, patience=10.0)
        burst = await work.begin("in a burst", cost=2.0, patience=10.0)
        assert not burst.done()
        work.clock.now += 11.0  # the estimates were wrong
        overload = await work.begin("in an overload", cost=2.0, patience=10.0)
        with pytest.raises(Overloaded):
            await overload

    run(test)


def test_a_turn_that_comes_too_late_is_not_taken() -> None:
    """A request whose patience ended while it waited is refused, not computed in vain."""

    async def test() -> None:
        work = Work()
        await work.begin("runs", cost=1.0)
        late = await work.begin("late", cost=1.0, patience=3.0)
        patient = await work.begin("patient", cost=1.0, patience=30.0)
        work.clock.now += 4.0
        await work.end("runs")
        with pytest.raises(Overloaded):
            await late
        assert work.started == ["runs", "patient"]
        await work.end("patient")
        await patient

    run(test)


def test_a_cancelled_request_takes_no_slot() -> None:
    """Requests cancelled while they wait, or as their turn comes, leave the slot to the next."""

    async def test() -> None:
        work = Work()
        await work.begin("runs")
        waits = await work.begin("waits")
        comes = await work.begin("comes")
        await work.begin("next")
        waits.cancel()
        await settle()
        work._ends["runs"].set()
        comes.cancel()
        await settle()
        assert work.started == ["runs", "next"]

    run(test)


def test_a_request_that_waits_for_others_gives_its_slot_away() -> None:
    """While its slot is released, the next request runs, and the time counts for that one alone."""

    async def test() -> None:
        work, resume = Work(), asyncio.Event()

        async def pausing() -> float:
            async with work.queue.turn(URGENT, 1.0, 10.0) as turn:
                work.clock.now += 1.0
                with slot_released():
                    await resume.wait()
                work.clock.now += 2.0
            return turn.attained

        task = asyncio.create_task(pausing())
        await settle()
        await work.begin("next")
        assert work.started == ["next"]
        work.clock.now += 5.0
        await work.end("next")
        resume.set()
        assert await task == pytest.approx(3.0)
        assert work.attained == pytest.approx({"next": 5.0})

    run(test)


def test_three_times_the_capacity_is_served_at_capacity_and_in_time() -> None:
    """Of three times what can be done, all that can be done is, and none of it in vain."""
    step, cost, patience, seconds = 0.005, 0.05, 0.5, 20.0

    async def test() -> None:
        work = Work(slots=3)
        lasted: list[float] = []
        refused = 0

        async def one() -> None:
            nonlocal refused
            came = work.clock.now
            try:
                async with work.queue.turn(URGENT, cost, patience) as turn:
                    lane = turn._lane
                    while lane.service - turn.begun < cost:
                        await asyncio.sleep(0)
                        lane.advance(work.clock.now)
                lasted.append(work.clock.now - came)
            except Overloaded:
                refused += 1

        tasks, due = [], 0.0
        for number in range(int(seconds / step)):
            while due <= number * step:
                tasks.append(asyncio.create_task(one()))
                due += cost / 3
            work.clock.now += step
            await settle()
        done = len(lasted)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done >= 0.9 * seconds / cost
        assert refused >= seconds / cost
        assert max(lasted) <= patience + 3 * (cost + step)

    run(test)
