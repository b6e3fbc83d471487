"""Calls of a store: what is read and written over a connection of one namespace's database.

What a request waits for is given up after a part of a second; other reads, and writes, may take
long. A read whose idle connection was lost is tried once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar, TypeVarTuple, Unpack

import psycopg
from psycopg import AsyncConnection, Connection

from service.domain.errors import StoreUnreachable, Unavailable
from service.domain.records import check_id
from service.stores.postgres.database.connections import LONG_TIMEOUT, Connections
from service.stores.postgres.database.distributed.workers import NOWHERE, Workers
from service.stores.postgres.database.faults import is_lost
from service.stores.postgres.database.transaction import (
    QUOTA,
    NamespaceTransaction,
    Transactions,
)
from service.stores.postgres.events import tallies
from service.stores.quota import StoreQuota

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Job = Callable[[NamespaceTransaction], Awaitable[T]]

QUICK_TIMEOUT = 0.5  # seconds


class Calls:
    """Reads and writes of one namespace, until they are closed.

    Args:
        connections: to the database.
        transactions: of the namespace.
        quota: bounds what `add` may add to the namespace.
        patience: seconds that what a request waits for may take, before `StoreUnreachable`.
    """

    def __init__(
        self,
        connections: Connections,
        transactions: Transactions,
        quota: StoreQuota | None,
        patience: float,
    ) -> None:
        self.is_closed = False
        self._connections = connections
        self._transactions = transactions
        self._quota = quota if quota and any(quota) else None
        self._patience = patience

    @property
    def writing(self) -> int:
        """Number of writes that run or wait for a connection."""
        return self._transactions.running

    @property
    def commits(self) -> int:
        """Number of writes that were committed."""
        return self._transactions.commits

    @property
    def workers(self) -> Workers:
        """Workers of a distributed database."""
        return self._connections.workers

    async def add(
        self,
        job: Job[T],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
        workers: frozenset[int] = NOWHERE,
    ) -> T:
        """Write what adds to the store, within its quota."""
        quota = self._quota
        if quota is None:
            return await self.write(job, prepare, alone=alone, workers=workers)

        async def bounded(transaction: NamespaceTransaction) -> T:
            before = await tallies.usage(transaction)
            result = await job(transaction)
            quota.check(before, await tallies.usage(transaction))  # which rolls the job back
            return result

        alone = tuple(sorted((*alone, QUOTA)))
        return await self.write(bounded, prepare, alone=alone, workers=self.workers.everywhere)

    async def write(
        self,
        job: Job[T],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
        patience: float = LONG_TIMEOUT,
        workers: frozenset[int] = NOWHERE,
    ) -> T:
        """Run a job as `Transactions.run` does."""
        self.check_open()
        return await self._transactions.run(
            job, prepare=prepare, alone=alone, patience=patience, workers=workers
        )

    async def ask(
        self,
        question: Callable[[AsyncConnection, Unpack[Ts]], Awaitable[T]],
        *args: *Ts,
        workers: frozenset[int] = NOWHERE,
    ) -> T:
        """Read what a request waits for."""
        return await self._run(question, args, workers, self._patience)

    async def ask_user(
        self,
        question: Callable[[AsyncConnection, str, Unpack[Ts]], Awaitable[T]],
        user_id: str,
        *args: *Ts,
    ) -> T:
        """Read what a request waits for of one user."""
        workers = self.workers.of([check_id(user_id, "/user_id")])
        return await self._run(question, (user_id, *args), workers, self._patience, only_reads=True)

    async def read(
        self,
        question: Callable[[AsyncConnection, Unpack[Ts]], Awaitable[T]],
        *args: *Ts,
        workers: frozenset[int] = NOWHERE,
        patience: float = LONG_TIMEOUT,
    ) -> T:
        """Read what may take long, and what no request waits for."""
        return await self._run(question, args, workers, patience)

    async def _run(
        self,
        question: Callable[[AsyncConnection, Unpack[Ts]], Awaitable[T]],
        args: tuple[*Ts],
        workers: frozenset[int],
        patience: float,
        *,
        only_reads: bool = False,
    ) -> T:
        self.check_open()
        lend = self._connections.connection
        try:
            async with lend(patience, workers, only_reads=only_reads) as connection:
                return await question(connection, *args)
        except StoreUnreachable as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.Error) or not is_lost(cause):
                raise
        # An idle connection may have been lost. Where a new one was, the breaker is open by now.
        async with lend(patience, workers, only_reads=only_reads) as connection:
            return await question(connection, *args)

    def scan(self, answers: Callable[[Connection], Iterator[T]]) -> Iterator[T]:
        """Read all in one transaction over a connection of its own."""
        self.check_open()
        with self._connections.snapshot() as connection:
            yield from answers(connection)

    def check_open(self) -> None:
        """Raise `Unavailable` after `close`."""
        if self.is_closed:
            raise Unavailable("the store is closed")

    async def close(self) -> None:
        """Refuse later calls, and wait for the writes of this event loop."""
        self.is_closed = True
        await self._transactions.finish()
