"""Interned names of users, items and event types of a SQLite store, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import Literal, Protocol

import apsw
import numpy as np
from numpy.typing import NDArray

# Tables of interned names, with the columns of their numbers and names.
INTERNED = {
    "users": ("user_no", "user_id"),
    "items": ("item_no", "item_id"),
    "types": ("type_no", "type"),
}
MAX_CACHED_NAMES = 1_000_000  # names per table; ~150 MB when full


def find_names(connection: apsw.Connection, table: str, numbers: Collection[int]) -> dict[int, str]:
    """Read the names of interned numbers, in the order of the numbers."""
    number, name = INTERNED[table]
    find = f"SELECT {number}, {name} FROM {table} WHERE {number} IN carray(?) ORDER BY {number}"
    wanted = np.fromiter(numbers, np.int64, len(numbers))
    return dict(connection.execute(find, (apsw.carray(wanted),)))


class NamingTransaction(Protocol):
    """The transaction in which names are numbered."""

    connection: apsw.Connection
    names: int  # the tick of the last deletion of names

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Call `hook` once the writes are durable."""
        ...


class Names:
    """Numbers of interned names, cached until names are deleted."""

    def __init__(self, table: Literal["items", "types"]) -> None:
        number, name = INTERNED[table]
        self._find = f"SELECT {name}, {number} FROM {table} WHERE {name} IN carray(?)"
        last = f"last_{table.removesuffix('s')}"
        self._next = (
            f"SELECT max(coalesce((SELECT max({number}) FROM {table}), 0), {last}) + 1 FROM state"
        )
        self._add = f"INSERT INTO {table} ({number}, {name}) VALUES (?, ?)"
        self._known: dict[str, int] = {}
        self._tick = 0  # of the last deletion of names

    def numbers(self, transaction: NamingTransaction, names: Iterable[str]) -> dict[str, int]:
        """Return the number of each name; new names are inserted."""
        if transaction.names != self._tick:
            self._known, self._tick = {}, transaction.names
        known = self._known
        wanted = set(names)
        found = {name: known[name] for name in wanted if name in known}
        if len(found) == len(wanted):
            return found
        learned = self.add(transaction, sorted(wanted - found.keys()))
        transaction.after_commit(lambda: self._remember(learned))
        return found | learned

    def add(self, transaction: NamingTransaction, names: Sequence[str]) -> dict[str, int]:
        """Insert the new ones of names, at least one, in this order; return the numbers of all."""
        connection = transaction.connection
        found = dict(connection.execute(self._find, (apsw.carray(tuple(names)),)))
        first = connection.execute(self._next).get
        new = dict.fromkeys(name for name in names if name not in found)
        added = {name: first + index for index, name in enumerate(new)}
        connection.executemany(self._add, ((number, name) for name, number in added.items()))
        return found | added

    def _remember(self, learned: dict[str, int]) -> None:
        if len(self._known) + len(learned) > MAX_CACHED_NAMES:
            self._known = {}
        self._known |= learned


class Spelling:
    """Names of interned numbers, cached: their rows are never deleted."""

    def __init__(self, table: Literal["items", "types"]) -> None:
        self._table = table
        self._known: dict[int, str] = {}

    def names(self, connection: apsw.Connection, numbers: Sequence[int]) -> list[str]:
        """Return the name of each number; unknown ones are read in the connection's transaction."""
        known = self._known  # other threads may add to it or replace it, but never remove
        try:
            return list(map(known.__getitem__, numbers))
        except KeyError:
            if len(known) > MAX_CACHED_NAMES:
                known = self._known = {}
            known.update(find_names(connection, self._table, set(numbers) - known.keys()))
            return list(map(known.__getitem__, numbers))


class NameCodes:
    """Dense codes of interned numbers: indexes into `names`, which grows with new numbers."""

    def __init__(self, table: str) -> None:
        self.names: list[str] = []
        self._table = table
        self._codes: dict[int, int] = {}

    def of(self, connection: apsw.Connection, numbers: Sequence[int]) -> NDArray[np.int32]:
        """Return the code of each number [n]."""
        if new := set(numbers).difference(self._codes):
            found = find_names(connection, self._table, new)
            self._codes |= zip(found, count(len(self.names)), strict=False)
            self.names += found.values()
        return np.fromiter(map(self._codes.__getitem__, numbers), np.int32, len(numbers))
