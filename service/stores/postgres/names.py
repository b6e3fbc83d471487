"""Interned names of items and event types: their numbers for writers, their spelling for readers.

A row of an event holds numbers, which saves the bytes of the strings. Numbers are never used again,
so that readers may remember what they stand for; writers forget them when names are deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from psycopg import AsyncConnection

from service.stores.jobs import Changed
from service.stores.postgres.connections import Connections
from service.stores.postgres.schema import IS_THERE

Interned = Literal["items", "types"]

# Columns of the numbers and of the names.
INTERNED: dict[Interned, tuple[str, str]] = {
    "items": ("item_no", "item_id"),
    "types": ("type_no", "type"),
}
MAX_CACHED_NAMES = 1_000_000  # names per table; ~150 MB when full
_DELETED = b"SELECT names FROM heed.namespaces WHERE namespace_no = %s"


class InternedNames:
    """Names of one table of one namespace, cached."""

    def __init__(self, connections: Connections, namespace_no: int, table: Interned) -> None:
        number, name = INTERNED[table]
        self._connections = connections
        self._namespace_no = namespace_no
        where = f"FROM heed.{table} WHERE namespace_no = %s AND"
        self._find = f"SELECT {name}, {number} {where} {name} = ANY(%b::text[])".encode()
        self._spell = f"SELECT {number}, {name} {where} {number} = ANY(%s::integer[])".encode()
        sequence = f"heed.{table.removesuffix('s')}_numbers"
        self._add = (
            f"INSERT INTO heed.{table} (namespace_no, {number}, {name})"
            f" SELECT namespace_no, nextval('{sequence}'), new_name"
            f" FROM heed.namespaces, unnest(%s::text[]) AS new_name"
            # A removal waits until the row of its namespace is free.
            f" WHERE namespace_no = %s AND {IS_THERE} FOR KEY SHARE OF namespaces"
            f" ON CONFLICT (namespace_no, {name}) DO NOTHING"
        ).encode()
        self._numbers: dict[str, int] = {}
        self._spelling: dict[int, str] = {}
        self._tick = 0  # of the last deletion of names that the numbers have seen
        self._epoch = connections.epoch  # of the numbers and the spelling

    async def learn(self, names: Iterable[str]) -> None:
        """Read the numbers of names; new names are stored at once. For `numbers`, later."""
        self._check_epoch()
        missing = sorted(set(names) - self._numbers.keys())
        if not missing:
            return
        async with self._connections.connection() as connection:
            epoch = self._connections.epoch
            # Read before the names: what is deleted later raises it.
            cursor = await connection.execute(_DELETED, (self._namespace_no,))
            row = await cursor.fetchone()
            learned = await self._look_up(connection, missing)
            if len(learned) < len(missing):
                new = [name for name in missing if name not in learned]
                await connection.execute(self._add, (new, self._namespace_no))
                learned |= await self._look_up(connection, new)
        tick = 0 if row is None else int(row[0])
        self._check_epoch()
        if tick < self._tick or epoch != self._epoch:
            return
        if tick > self._tick or len(self._numbers) + len(learned) > MAX_CACHED_NAMES:
            self._numbers, self._tick = {}, tick
        self._numbers.update(learned)

    def numbers(self, deleted: int, names: Iterable[str]) -> dict[str, int]:
        """Return the number of each name, where names were last deleted at the tick `deleted`.

        Raises `Changed` where they must be learned: names were deleted since, or never known.
        """
        self._check_epoch()
        if deleted != self._tick:
            self._numbers = {}
            raise Changed
        known = self._numbers
        try:
            return {name: known[name] for name in names}
        except KeyError:
            raise Changed from None

    async def spell(self, connection: AsyncConnection, numbers: Sequence[int]) -> list[str]:
        """Return the name of each number."""
        self._check_epoch()
        known = self._spelling  # other calls may add to it or replace it, but never remove
        try:
            return list(map(known.__getitem__, numbers))
        except KeyError:
            if len(known) > MAX_CACHED_NAMES:
                known = self._spelling = {}
            known.update(await self.find(connection, set(numbers) - known.keys()))
            return list(map(known.__getitem__, numbers))

    def _check_epoch(self) -> None:
        """Forget all names where the database may not have them: their numbers may be new ones."""
        if self._epoch != self._connections.epoch:
            self._epoch = self._connections.epoch
            self._numbers, self._spelling, self._tick = {}, {}, 0

    async def find(self, connection: AsyncConnection, numbers: Collection[int]) -> dict[int, str]:
        """Read the names of numbers."""
        cursor = await connection.execute(
            self._spell, (self._namespace_no, list(numbers)), binary=True
        )
        return dict(await cursor.fetchall())

    async def _look_up(self, connection: AsyncConnection, names: list[str]) -> dict[str, int]:
        cursor = await connection.execute(self._find, (self._namespace_no, names), binary=True)
        return dict(await cursor.fetchall())
