"""Access to a PostgreSQL store in bulk: reads on threads, writes as transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from psycopg import Connection

from service.domain.errors import Conflict
from service.stores.bulk_access import BulkAccess
from service.stores.jobs import CATALOGUE, FOLDING, KEYS, SCENARIOS
from service.stores.postgres.bulk import copy_record, item_writes, record_reads
from service.stores.postgres.bulk.user_writes import PostgresUserWrites
from service.stores.postgres.database.connections import Connections
from service.stores.postgres.database.transaction import PostgresTransaction
from service.stores.postgres.events import tallies
from service.stores.postgres.events.names import InternedNames
from service.stores.postgres.forgetting import add_entries
from service.stores.postgres.imports import ledger
from service.stores.records import keys, scenarios
from service.stores.values import CopyRecord, Registers, StoredItem, StoredUser

# Until the server has looked at so many new rows, it joins whole tables row by row.
_ANALYZE = b"ANALYZE heed.users, heed.events, heed.event_ids, heed.vectors, heed.items, heed.types"
_PATIENCE = 3_600.0  # seconds of one write, of a user with very many events
T = TypeVar("T")
P = ParamSpec("P")
Job = Callable[[PostgresTransaction], Awaitable[T]]


class RunTransaction(Protocol):
    """Function that runs a job in a transaction, maybe several times."""

    def __call__(
        self,
        job: Job[T],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
        patience: float = 0,
    ) -> Awaitable[T]: ...


class PostgresBulk(BulkAccess):
    """Bulk access to a namespace, by the connections and writes of its store."""

    def __init__(
        self,
        connections: Connections,
        namespace_no: int,
        names: tuple[InternedNames, InternedNames],
        write: RunTransaction,
    ) -> None:
        self._connections = connections
        self._no = namespace_no
        self._item_names, type_names = names
        self._users = PostgresUserWrites(self._item_names, type_names)
        self._write = write
        self._written: int | None = None  # the last number of the copy's last change

    # ------------------------------------------------------------------ any store

    async def users(self, after: str, events: int) -> list[StoredUser]:
        return await self._read(record_reads.users, after, events)

    async def item_names(self, after: int, limit: int) -> list[tuple[int, str]]:
        return await self._read(record_reads.item_names, after, limit)

    async def items(self, after: str, limit: int) -> list[StoredItem]:
        return await self._read(record_reads.items, after, limit)

    async def find_items(self, item_ids: Sequence[str]) -> list[StoredItem]:
        return await self._read(record_reads.find_items, item_ids)

    async def noted_item_names(self) -> list[str]:
        return await self._read(record_reads.noted_item_names)

    async def copy_record(self) -> CopyRecord | None:
        found = await self._read(copy_record.read)
        if found is None:
            return None
        record, self._written = found
        return record

    # ------------------------------------------------------------------ the target of a copy

    async def begin_copy(self, origin: str) -> None:
        self._written = await self._write(lambda each: copy_record.begin(each, origin))

    async def put_registers(self, registers: Registers) -> None:
        async def job(transaction: PostgresTransaction) -> None:
            await ledger.put_records(transaction, registers.imports)
            await transaction.run(scenarios.put_versions(registers.scenarios))
            await transaction.run(keys.put(transaction, registers.keys))
            await add_entries(transaction, registers.forgotten)

        await self._change(job, alone=(KEYS, SCENARIOS))

    async def add_item_names(self, item_ids: Sequence[str]) -> None:
        await self._change(lambda each: item_writes.add_item_names(each, item_ids))

    async def put_items(self, items: Sequence[StoredItem]) -> None:
        await self._change(
            lambda each: item_writes.put_items(each, items, self._item_names),
            lambda: self._item_names.learn([item.item_id for item in items]),
            alone=(CATALOGUE,),
        )

    async def discard_item_names(self, item_ids: Sequence[str]) -> None:
        await self._change(lambda each: item_writes.discard_item_names(each, item_ids))

    async def put_users(
        self, users: Sequence[StoredUser], absent: Sequence[str], position: str
    ) -> None:
        attempts = 0

        async def job(transaction: PostgresTransaction) -> None:
            nonlocal attempts
            attempts += 1
            # The first attempt may fail by the id of an event that another user has.
            await self._users.put_users(transaction, users, absent, evict=attempts > 1)

        await self._change(job, lambda: self._users.prepare(users), position=position)

    async def finish_copy(self) -> None:
        async def job(transaction: PostgresTransaction) -> None:
            await tallies.fold(transaction)
            await transaction.connection.execute(_ANALYZE)

        await self._change(job, alone=(FOLDING,), position="")

    async def mark_copy(self, *, is_whole: bool) -> None:
        await self._change(lambda each: copy_record.mark(each, is_whole=is_whole))

    # ------------------------------------------------------------------ inside

    async def _read(
        self,
        question: Callable[Concatenate[Connection, int, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        def read() -> T:
            with self._connections.snapshot() as connection:
                return question(connection, self._no, *args, **options)

        return await asyncio.to_thread(read)

    async def _change(
        self,
        job: Job[None],
        prepare: Callable[[], Awaitable[None]] | None = None,
        *,
        alone: tuple[int, ...] = (),
        position: str | None = None,
    ) -> None:
        written = self._written
        if written is None:
            raise Conflict("no copy to this store was begun")

        async def recorded(transaction: PostgresTransaction) -> int:
            # One user may have millions of events.
            await transaction.connection.execute(b"SET LOCAL statement_timeout = 0")
            await copy_record.check(transaction, written)
            await job(transaction)
            return await copy_record.record(transaction, position)

        self._written = await self._write(
            recorded,
            prepare,
            alone=alone,
            patience=_PATIENCE,
        )
