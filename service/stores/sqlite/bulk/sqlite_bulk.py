"""Access to a SQLite store in bulk: reads off the event loop, writes as jobs of the writer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

import apsw

from service.domain.errors import Conflict
from service.stores.bulk_access import BulkAccess
from service.stores.records import keys, scenarios
from service.stores.sqlite.bulk import copy_record, item_writes, record_reads
from service.stores.sqlite.bulk.user_writes import SQLiteUserWrites
from service.stores.sqlite.forgetting import add_entries
from service.stores.sqlite.imports import import_ledger
from service.stores.sqlite.writer import SQLiteTransaction
from service.stores.sqlite.writes import Names
from service.stores.values import CopyRecord, Registers, StoredItem, StoredUser

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ReadOffLoop(Protocol):
    """Function that runs a query on a thread, over a connection of the thread's own."""

    def __call__(
        self, question: Callable[[apsw.Connection, *Ts], T], *args: *Ts
    ) -> Awaitable[T]: ...


class SubmitJob(Protocol):
    """Function that runs a job on the writer's thread; done once it is durable."""

    def __call__(
        self, job: Callable[[SQLiteTransaction, *Ts], T], *args: *Ts, rows: int = 1
    ) -> Awaitable[T]: ...


class SQLiteBulk(BulkAccess):
    """Bulk access by the reads and writes of a store."""

    def __init__(self, read: ReadOffLoop, write: SubmitJob) -> None:
        self._read = read
        self._write = write
        self._records = record_reads.RecordReads()
        self._item_names = Names("items")
        self._users = SQLiteUserWrites(self._item_names, Names("types"))
        self._written: int | None = None  # the tick of the copy's last change

    # ------------------------------------------------------------------ any store

    async def users(self, after: str, events: int) -> list[StoredUser]:
        return await self._read(self._records.users, after, events)

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
        self._written = await self._write(
            lambda transaction: copy_record.begin(transaction, origin), rows=1
        )

    async def put_registers(self, registers: Registers) -> None:
        def job(transaction: SQLiteTransaction) -> None:
            import_ledger.put_records(transaction, registers.imports)
            transaction.run(scenarios.put_versions(registers.scenarios))
            transaction.run(keys.put(transaction, registers.keys))
            add_entries(transaction, registers.forgotten)

        await self._change(job, sum(len(records) for records in registers))

    async def add_item_names(self, item_ids: Sequence[str]) -> None:
        def job(transaction: SQLiteTransaction) -> None:
            self._item_names.add(transaction, item_ids)

        await self._change(job, len(item_ids))

    async def put_items(self, items: Sequence[StoredItem]) -> None:
        await self._change(
            lambda transaction: item_writes.put_items(transaction, items, self._item_names),
            len(items),
        )

    async def discard_item_names(self, item_ids: Sequence[str]) -> None:
        await self._change(
            lambda transaction: item_writes.discard_item_names(transaction, item_ids),
            len(item_ids),
        )

    async def put_users(
        self, users: Sequence[StoredUser], absent: Sequence[str], position: str
    ) -> None:
        rows = sum(len(user.events) for user in users) + len(absent)
        await self._change(
            lambda transaction: self._users.put_users(transaction, users, absent), rows, position
        )

    async def finish_copy(self) -> None:
        await self._change(lambda _: None, 1, "")

    async def mark_copy(self, *, is_whole: bool) -> None:
        await self._change(lambda transaction: copy_record.mark(transaction, is_whole=is_whole), 1)

    # ------------------------------------------------------------------ inside

    async def _change(
        self, job: Callable[[SQLiteTransaction], None], rows: int, position: str | None = None
    ) -> None:
        written = self._written
        if written is None:
            raise Conflict("no copy to this store was begun")

        def recorded(transaction: SQLiteTransaction) -> int:
            copy_record.check(transaction, written)
            job(transaction)
            return copy_record.record(transaction, position)

        self._written = await self._write(recorded, rows=rows)
