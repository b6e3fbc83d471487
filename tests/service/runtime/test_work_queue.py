"""The queue of work that computes, in time that the tests set; and threads that it stops."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec

import pytest

from models.compute.checkpoint import checkpoint, holding, watched
from service.domain.errors import DeadlineExceeded, Overloaded
from service.runtime.work_queue import MOST_LONG, QUANTUM, Turn, WorkQueue, place_left

PATIENCE = 60.0  # seconds of the machine's clock, after which a test fails


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Work:
    """Requests of one test: each runs until it is ended."""

    def __init__(self, places: int = 1, of_one_key: int = 100) -> None:
        self.clock = Clock()
        self.queue = WorkQueue(places, of_one_key, clock=self.clock)
        self.bulk = WorkQueue(places, of_one_key, after=self.queue, clock=self.clock)
        self.started: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(
        self, name: str, *, key: str = "", seconds: float = math.inf, bulk: bool = False
    ) -> asyncio.Task[None]:
        """Begin a request with a number of seconds until its deadline."""
        self._ends[name] = asyncio.Event()
        queue = self.bulk if bulk else self.queue

        async def run() -> None:
            async with queue.turn(key, self.clock.now + seconds):
                self.started.append(name)
                await self._ends[name].wait()

        task = asyncio.create_task(run())
        await settle()
        return task

    async def end(self, *names: str, after: float = 0.0) -> None:
        """End requests one after the other, each some seconds after the one before."""
        for name in names:
            self.clock.now += after
            self._ends[name].set()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test in an event loop, for at most `PATIENCE` seconds."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE))

    return run


async def measured(work: Work) -> None:
    """Let the queue learn that a request takes one second, and be empty again."""
    await work.begin("first")
    await work.begin("second")
    await work.begin("third")
    await work.end("first")
    await work.end("second", "third", after=1.0)
    work.started.clear()


@in_loop
async def test_any_number_waits_while_the_deadline_can_be_met() -> None:
    """Requests that end by their deadline wait; the next is refused, with the time it needs."""
    work = Work()
    await measured(work)
    tasks = [await work.begin(str(number), seconds=10.0) for number in range(10)]
    assert not any(task.done() for task in tasks)
    refused = await work.begin("refused", seconds=10.0)
    with pytest.raises(Overloaded, match="9 requests wait, and one is done each") as caught:
        await refused
    assert caught.value.retry_after == pytest.approx(11.0)
    await work.end(*map(str, range(10)), after=1.0)
    assert work.started == [str(number) for number in range(10)]


@in_loop
async def test_nothing_is_refused_before_anything_is_measured() -> None:
    """Before any request has ended its time is unknown: all wait."""
    work = Work()
    tasks = [await work.begin(str(number), seconds=0.001) for number in range(1_000)]
    assert not any(task.done() for task in tasks)


@in_loop
async def test_a_request_that_is_refused_leaves_its_key_to_those_that_came_meanwhile() -> None:
    """The key of a request that does not know yet that it is refused is no other one's."""
    work = Work(places=2, of_one_key=1)
    await measured(work)
    await work.begin("ends", key="k")
    refused = await work.begin("refused", key="k", seconds=5.0)
    work.clock.now += 4.5
    # In the round of the event loop in which one ends and the other is refused.
    await asyncio.gather(work.end("ends"), work.begin("runs", key="k"))
    assert isinstance(refused.exception(), Overloaded)
    waits = [await work.begin(f"waits {number}", key="k") for number in range(3)]
    assert work.started == ["ends", "runs"]
    waits[0].cancel()
    await work.end("runs", "waits 1", "waits 2")
    assert work.started == ["ends", "runs", "waits 1", "waits 2"]


@in_loop
async def test_keys_take_turns() -> None:
    """A key whose one request comes after a hundred of another waits for one of these."""
    work = Work()
    await work.begin("runs", key="many")
    for number in range(100):
        await work.begin(str(number), key="many")
    await work.begin("one", key="few")
    await work.end("runs", "0")
    assert work.started == ["runs", "0", "one"]


@in_loop
async def test_the_queue_of_one_key_refuses_nobody_else() -> None:
    """A key that is refused itself leaves room to another key with the same deadline."""
    work = Work()
    await measured(work)
    for number in range(10):
        await work.begin(str(number), key="many", seconds=10.0)
    with pytest.raises(Overloaded):
        await (await work.begin("refused", key="many", seconds=10.0))
    assert not (await work.begin("waits", key="few", seconds=10.0)).done()


@in_loop
async def test_one_key_has_all_places_but_one() -> None:
    """While a key has its most places, another key begins at once."""
    work = Work(places=3, of_one_key=2)
    for name in ("a", "b", "c"):
        await work.begin(name, key="many")
    assert work.started == ["a", "b"]
    await work.begin("d", key="few")
    assert work.started == ["a", "b", "d"]
    await work.end("a")
    assert work.started == ["a", "b", "d", "c"]


@in_loop
async def test_bulk_work_waits_for_questions() -> None:
    """Bulk work that came first starts last, and then in places of its own."""
    work = Work()
    await work.begin("runs")
    await work.begin("bulk runs", bulk=True)
    await work.begin("bulk waits", bulk=True)
    await work.begin("question")
    await work.end("bulk runs")
    assert work.started == ["runs", "bulk runs"]
    await work.end("runs")
    assert work.started[2:] == ["question", "bulk waits"]


@in_loop
async def test_a_turn_that_comes_too_late_is_not_taken() -> None:
    """A request whose deadline would pass before it is done is refused, not computed in vain."""
    work = Work()
    await measured(work)
    await work.begin("runs")
    late = await work.begin("late", seconds=3.0)
    patient = await work.begin("patient", seconds=30.0)
    await work.end("runs", after=4.0)
    with pytest.raises(Overloaded):
        await late
    assert work.started == ["runs", "patient"]
    await work.end("patient")
    await patient


@in_loop
async def test_a_cancelled_request_takes_no_place() -> None:
    """Requests cancelled while they wait, or as their turn comes, leave the place to the next."""
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


@in_loop
async def test_a_request_that_waits_for_others_leaves_its_place() -> None:
    """While its place is left, the next request runs."""
    work, resume = Work(), asyncio.Event()

    async def pausing() -> None:
        async with work.queue.turn(""):
            async with place_left():
                await resume.wait()
            await work.begin("waits")
            assert work.started == ["next"]

    task = asyncio.create_task(pausing())
    await settle()
    await work.begin("next")
    assert work.started == ["next"]
    await work.end("next")
    resume.set()
    await task
    await settle()
    assert work.started == ["next", "waits"]


@in_loop
async def test_requests_come_back_one_by_one() -> None:
    """When many come back that left their places, as many compute as there are places."""
    queue, resume, computing, most = WorkQueue(3, 3), asyncio.Event(), 0, 0

    async def one() -> None:
        nonlocal computing, most
        async with queue.turn(""):
            async with place_left():
                await resume.wait()
            computing += 1
            most = max(most, computing)
            await settle()
            computing -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(one())
        await settle()
        resume.set()
    assert most == 3


@in_loop
async def test_three_times_the_capacity_is_served_at_capacity_and_in_time() -> None:
    """Under three times the capacity, requests are done at capacity, and none in vain."""
    step, service, deadline, seconds = 0.005, 0.05, 1.0, 20.0
    work = Work()
    lasted: list[float] = []
    refused = 0

    async def one() -> None:
        nonlocal refused
        came = work.clock.now
        try:
            async with work.queue.turn("", came + deadline):
                begun = work.clock.now
                while work.clock.now < begun + service:  # noqa: ASYNC110 - its own clock
                    await asyncio.sleep(0)
            lasted.append(work.clock.now - came)
        except Overloaded:
            refused += 1

    tasks, due = [], 0.0
    for number in range(int(seconds / step)):
        while due <= number * step:
            tasks.append(asyncio.create_task(one()))
            due += service / 3
        work.clock.now += step
        await settle()
    done = len(lasted)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done >= 0.8 * seconds / service
    assert refused >= seconds / service
    assert max(lasted) <= deadline + step


# ------------------------------------------------------------------------------ threads


def burn(seconds: float, steps: Callable[[], None] = checkpoint) -> None:
    """Compute for seconds of this thread's time, with checkpoints."""
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        steps()


async def compute(turn: Turn, pool: ThreadPoolExecutor, work: Callable[[], None]) -> None:
    await turn.run(pool, lambda: watched(turn.look, work))


@pytest.mark.parametrize("ending", ["cancelled", "deadline"])
@in_loop
async def test_work_that_nobody_waits_for_ends_at_its_next_checkpoint(ending: str) -> None:
    """A thread whose request is cancelled, or out of time, computes no further."""
    ended = threading.Event()

    def work() -> None:
        try:
            burn(PATIENCE)
        except DeadlineExceeded:
            ended.set()
            raise

    queue = WorkQueue(1, 1)
    with ThreadPoolExecutor(1) as pool:
        seconds = 0.05 if ending == "deadline" else math.inf
        async with queue.turn("", queue.clock() + seconds) as turn:
            task = asyncio.create_task(compute(turn, pool, work))
            await asyncio.sleep(0.05)
            if ending == "cancelled":
                task.cancel()
            with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
                await task
        assert await asyncio.to_thread(ended.wait, PATIENCE)


@in_loop
async def test_long_work_leaves_its_place_and_computes_alone() -> None:
    """Requests that compute for long leave their places; of one key, one of them computes."""
    queue, computing, most = WorkQueue(1, 1), 0, 0
    lock = threading.Lock()

    def step() -> None:
        nonlocal computing, most
        checkpoint()
        with lock:
            computing += 1
            most = max(most, computing)
        with lock:
            computing -= 1

    def work() -> None:
        burn(2 * QUANTUM)
        burn(2 * QUANTUM, step)

    async def long() -> None:
        async with queue.turn("", math.inf) as turn:
            await compute(turn, pool, work)
            assert turn.is_long
            assert turn.is_aside

    with ThreadPoolExecutor(MOST_LONG) as pool:
        await asyncio.gather(*(long() for _ in range(MOST_LONG)))
    assert most == 1


@in_loop
async def test_long_work_that_waits_for_a_lock_lets_others_compute() -> None:
    """A long request that holds a lock ends, though another of its key waits for that lock."""
    lock, held = threading.Lock(), threading.Event()

    def holder() -> None:
        with lock:
            held.set()
            burn(4 * QUANTUM)

    def waiter() -> None:
        burn(2 * QUANTUM)  # it is long before it waits
        held.wait(PATIENCE)
        with holding(lock):
            checkpoint()

    queue = WorkQueue(2, 2)

    async def ask(work: Callable[[], None]) -> None:
        async with queue.turn("") as turn:
            await compute(turn, pool, work)

    with ThreadPoolExecutor(2) as pool:
        await asyncio.gather(ask(waiter), ask(holder))


@in_loop
async def test_long_work_does_not_wait_for_what_computes_nothing() -> None:
    """While a long request waits for the store or its client, the next of its key computes."""
    queue = WorkQueue(2, 2)
    with ThreadPoolExecutor(2) as pool:
        async with queue.turn("") as first, queue.turn("", math.inf) as second:
            await compute(first, pool, lambda: burn(2 * QUANTUM))
            assert first.is_long
            await compute(second, pool, lambda: burn(2 * QUANTUM))


@in_loop
async def test_few_keys_compute_long_requests_at_once() -> None:
    """With four places, long requests of two keys compute at once."""
    queue, ends, most = WorkQueue(4, 3), threading.Event(), 0
    steps = [0] * 6

    async def long(number: int) -> None:
        def step() -> None:
            checkpoint()
            steps[number] += 1

        def work() -> None:
            burn(2 * QUANTUM, lambda: None)
            while not ends.is_set():
                step()

        async with queue.turn(str(number)) as turn:
            await compute(turn, pool, work)

    with ThreadPoolExecutor(6) as pool:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(long(number))
            while not any(steps):  # noqa: ASYNC110 - of threads
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            before = list(steps)
            await asyncio.sleep(0.05)
            most = sum(a != b for a, b in zip(before, steps, strict=True))
            ends.set()
    assert most <= 2


@in_loop
async def test_one_key_has_few_long_requests() -> None:
    """Beyond `MOST_LONG` of them, a long request keeps its place."""
    queue = WorkQueue(MOST_LONG + 1, MOST_LONG + 1)
    ends = asyncio.Event()

    async def request(turns: list[Turn]) -> None:
        async with queue.turn("") as turn:
            turns.append(turn)
            queue.set_aside(turn)
            await ends.wait()

    turns: list[Turn] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(MOST_LONG + 1):
            group.create_task(request(turns))
        await settle()
        assert sum(turn.is_aside for turn in turns) == MOST_LONG
        ends.set()


@in_loop
async def test_long_work_waits_for_short_work_at_its_checkpoints() -> None:
    """Beside a short request, long work waits four times as long as it has computed."""
    clock, burnt, look = Clock(), threading.Event(), threading.Event()
    queue = WorkQueue(2, 2, clock=clock)

    def work() -> None:
        burn(2 * QUANTUM, lambda: None)
        burnt.set()
        look.wait(PATIENCE)
        checkpoint()

    with ThreadPoolExecutor(1) as pool:
        async with queue.turn("") as turn, queue.turn(""):
            waited = asyncio.create_task(compute(turn, pool, work))
            await asyncio.to_thread(burnt.wait, PATIENCE)
            clock.now += 0.1  # that it has computed
            look.set()
            for _ in range(20):
                await asyncio.sleep(0.002)
                clock.now += 0.01
                assert not waited.done()
            clock.now += 0.4
            await waited
