"""Calls to the workers of a distributed database: none waits for a worker that it does not need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from service.domain.errors import StoreUnreachable
from service.stores.postgres.database.distributed.placement import build_placement
from service.stores.postgres.database.distributed.workers import Workers
from service.stores.postgres.database.lending import breaker

pytestmark = pytest.mark.anyio
ONE, TWO, BOTH = frozenset({1}), frozenset({2}), frozenset({1, 2})
CONNECTIONS = 8


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def workers() -> Workers:
    """Two workers."""
    placement = build_placement(
        [
            (is_users, last, worker)
            for is_users in (True, False)
            for worker, last in ((1, 0), (2, 9))
        ]
    )
    return Workers(placement, CONNECTIONS)


@asynccontextmanager
async def stuck(workers: Workers, needs: frozenset[int], only_reads: bool) -> AsyncIterator[int]:
    """Hold as many calls as a part of the connections lets through; yield their number."""
    async with AsyncExitStack() as calls:
        held = 0
        with suppress(StoreUnreachable):
            while held < CONNECTIONS:
                call = workers.call(needs, 0.01, only_reads=only_reads)
                await calls.enter_async_context(call)
                held += 1
        yield held


async def test_connections_are_left_for_other_workers(workers: Workers) -> None:
    """With all parts of one worker and of several in use, two connections remain for others."""
    async with (
        stuck(workers, ONE, True) as reads,
        stuck(workers, ONE, False) as writes,
        stuck(workers, BOTH, False) as several,
    ):
        assert min(reads, writes, several) >= 1
        assert reads + writes + several <= CONNECTIONS - 2
        with pytest.raises(StoreUnreachable, match="same workers"):
            async with workers.call(ONE, 0.01, only_reads=True):
                pass
        async with workers.call(TWO, 0.01, only_reads=True):
            pass


async def fail(workers: Workers, needs: frozenset[int], only_reads: bool = True) -> None:
    """A call that does not reach its workers."""
    with pytest.raises(StoreUnreachable):
        async with workers.call(needs, 1, only_reads=only_reads):
            raise StoreUnreachable("nobody answers")


async def test_a_worker_that_does_not_answer_is_not_asked_again_at_once(workers: Workers) -> None:
    """After a failed reading, calls that need its worker fail at once, and others go on."""
    await fail(workers, ONE)
    for needs in (ONE, BOTH):
        with pytest.raises(StoreUnreachable, match="a worker of PostgreSQL does not answer"):
            async with workers.call(needs, 1):
                pytest.fail("the worker was asked")
    async with workers.call(TWO, 1):
        pass


async def test_a_worker_that_answers_again_is_asked_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is let through after the pause, and succeeds, closes the circuit."""
    monkeypatch.setattr(breaker, "_PAUSE", 0.0)
    await fail(workers, ONE)
    async with workers.call(ONE, 1, only_reads=True):
        pass
    monkeypatch.setattr(breaker, "_PAUSE", 3600.0)
    for _ in range(3):
        async with workers.call(ONE, 1, only_reads=True):
            pass


async def test_calls_that_wait_for_a_worker_that_stops_answering_are_refused(
    workers: Workers,
) -> None:
    """A call that waited for its part of the connections while the circuit opened fails."""

    async def wait() -> None:
        async with workers.call(ONE, 60, only_reads=True):
            pytest.fail("the worker was asked")

    with suppress(StoreUnreachable):
        async with stuck(workers, ONE, True):
            waiting = asyncio.ensure_future(wait())
            await asyncio.sleep(0)
            raise StoreUnreachable("it hangs")
    with pytest.raises(StoreUnreachable, match="it hangs"):
        await waiting


@pytest.mark.parametrize(("needs", "only_reads"), [(ONE, False), (BOTH, True)])
async def test_calls_that_may_have_waited_for_something_else_accuse_no_worker(
    workers: Workers, needs: frozenset[int], only_reads: bool
) -> None:
    """A write may have waited for a lock, and a call to several workers for any of them."""
    await fail(workers, needs, only_reads)
    async with workers.call(ONE, 1), workers.call(TWO, 1):
        pass
