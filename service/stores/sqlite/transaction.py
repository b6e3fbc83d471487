"""Jobs on a SQLite database: their statements, interned names, and the writer's transactions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import count
from typing import Any, Literal, TypeVar

import apsw
import numpy as np
from numpy.typing import NDArray

from service.domain.errors import Unavailable
from service.stores.jobs import (
    Change,
    Do,
    Find,
    Insert,
    Job,
    Rows,
    Run,
    Tally,
    Update,
    UserRow,
    columns_of,
)
from service.stores.jobs import translate as translate_for
from service.stores.sqlite.schema import SCHEMA_VERSION

T = TypeVar("T")
_STATE = "SELECT clock, names, scrub, user_version FROM state, pragma_user_version"
_NOTHING = apsw.carray((b"",))  # an empty array is none, and no column has an empty blob


# statements ----------------------------------------------------------------------------


def run_job(connection: apsw.Connection, job: Job[T]) -> T:
    """Run the statements of a job, and return its result. Raises `apsw.Error`."""
    try:
        step = next(job)
        while True:
            rows = _rows(connection, step) if isinstance(step, Run) else _change(connection, step)
            step = job.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def array(values: Sequence[Any]) -> Any:
    """Return values of one type as an array for `carray`."""
    if not len(values):
        return _NOTHING
    is_number = isinstance(values[0], int)
    return apsw.carray(np.array(values, np.int64) if is_number else tuple(values))


def _rows(connection: apsw.Connection, step: Run) -> Rows:
    values = step.values
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = array(value)
    cursor = connection.execute(_translate(step.sql), values)
    return [] if isinstance(step, Do) else cursor.fetchall()


def _change(connection: apsw.Connection, step: Change) -> Rows:
    columns, rows, kept = columns_of(step, "sqlite")
    table = _translate(step.table)
    if isinstance(step, Insert):
        places = ", ".join("?" * len(columns))
        sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
        sql += f" ON CONFLICT DO UPDATE SET {_translate(step.update)}" if step.update else ""
        sql += "" if step.key else " ON CONFLICT DO NOTHING"
    elif isinstance(step, Update):
        count = kept(step.keys)
        keys, changed = columns[:count], columns[count:]
        rows = [(*row[count:], *row[:count]) for row in rows]
        sql = f"UPDATE {table} SET {_equal(changed, ', ')} WHERE {_equal(keys, ' AND ')}"
    elif isinstance(step, Find):
        returned = _translate(step.returning)
        sql = f"SELECT {returned} FROM {table} WHERE {_equal(columns, ' AND ')}"
    else:
        sql = f"DELETE FROM {table} WHERE {_equal(columns, ' AND ')}"
        sql += f" RETURNING {_translate(step.returning)}" if step.returning else ""
    return connection.executemany(sql, rows).fetchall() if rows else []


def _equal(columns: Sequence[str], separator: str) -> str:
    return separator.join(f"{name} = ?" for name in columns)


@cache
def _translate(sql: str) -> str:
    return translate_for(sql, "sqlite")


# names ---------------------------------------------------------------------------------

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

    def numbers(self, transaction: SQLiteTransaction, names: Iterable[str]) -> dict[str, int]:
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

    def add(self, transaction: SQLiteTransaction, names: Sequence[str]) -> dict[str, int]:
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


# transactions --------------------------------------------------------------------------


def check_schema(version: int) -> None:
    """Refuse an open store that a newer Heed has migrated meanwhile.

    Rows of this version would lack what the newer schema needs.

    Raises:
        Unavailable: another version of the schema is there.
    """
    if version != SCHEMA_VERSION:
        raise Unavailable(
            f"a newer Heed has migrated the store to schema version {version}, and this process "
            f"writes {SCHEMA_VERSION}: stop it, and start the newer Heed",
            30.0,
        )


class SQLiteTransaction:
    """Transaction of a group of jobs: its connection, its tick, and hooks to call after commit."""

    by_key = False

    def __init__(self, connection: apsw.Connection, items: Names, types: Names) -> None:
        self.connection = connection
        self._items = items
        self._types = types
        self.hooks: list[Callable[[], None]] = []
        row: tuple[int, int, int, int] = connection.execute(_STATE).get
        # names: the tick of their last deletion
        self.clock, self.names, self.scrubs, schema = row
        check_schema(schema)
        self.has_ticked = False
        self._tick = self.clock + 1

    def tick(self) -> int:
        """Return the version of this transaction's changes: greater than every earlier one."""
        self.has_ticked = True
        return self._tick

    def run(self, job: Job[T]) -> T:
        """Run the statements of a job."""
        return run_job(self.connection, job)

    def after_commit(self, hook: Callable[[], None]) -> None:
        """Call `hook` once the writes of this job are durable; never if they are rolled back."""
        self.hooks.append(hook)

    def scrub(self) -> None:
        """Empty the log soon after the commit: it holds personal data that is deleted here."""
        self.scrubs = self.tick()
        self.connection.execute("UPDATE state SET scrub = ?", (self.scrubs,))

    def finish(self) -> int:
        """Advance the clock if any job has used the tick; return the tick, or 0."""
        if not self.has_ticked:
            return 0
        self.connection.execute("UPDATE state SET clock = ?", (self._tick,))
        return self._tick

    def has_changes(self) -> bool:
        """Report whether jobs before this one have changed something."""
        return self.has_ticked

    def last_number(self) -> int:
        """Return the version of the changes, and of the last of them."""
        return self.tick()

    # ------------------------------------------------------------------ names

    def item_numbers(self, item_ids: Iterable[str]) -> dict[str, int]:
        """Return the numbers of items; new ones are inserted."""
        return self._items.numbers(self, item_ids)

    def type_numbers(self, types: Iterable[str]) -> dict[str, int]:
        """Return the numbers of event types; new ones are inserted."""
        return self._types.numbers(self, types)

    def add_item_names(self, item_ids: Sequence[str]) -> Job[None]:
        """Number the new ones of items in this order."""
        self._items.add(self, item_ids)
        yield from ()

    def has_unseen(self) -> Job[bool]:
        """Return False: one thread writes."""
        yield from ()
        return False

    def renumber(self, table: str, numbers: Sequence[int]) -> Job[None]:
        """Record that names are deleted, so that no process goes on using their numbers."""
        self.names = self.tick()
        last = f"last_{table.removesuffix('s')}"
        yield Do(
            f"UPDATE state SET names = :tick, {last} = max({last}, :last)",
            tick=self.names,
            last=max(numbers, default=0),
        )
        yield Do("DELETE FROM popularity WHERE item_no NOT IN (SELECT item_no FROM items)")

    # ------------------------------------------------------------------ users

    def lock_users(self, user_ids: Iterable[str]) -> Job[dict[str, UserRow]]:
        """Return the users that are stored."""
        rows = yield Run(
            "SELECT user_id, user_no, user_no, next_seq, profile FROM users WHERE user_id $in(ids)",
            ids=list(user_ids),
        )
        return {user_id: UserRow(*row) for user_id, *row in rows}

    def put_users(self, user_ids: Iterable[str]) -> Job[dict[str, int]]:
        """Give users a new version, and create the unknown ones; return their numbers."""
        wanted = sorted(set(user_ids))
        users = yield from self.lock_users(wanted)
        numbers = {user_id: row.user_no for user_id, row in users.items()}
        new = [user_id for user_id in wanted if user_id not in numbers]
        numbers |= zip(new, (yield from self.new_user_numbers(len(new))), strict=True)
        tick = self.tick()
        yield Insert(
            "users",
            "user_no user_id version generation next_seq",
            [(numbers[user_id], user_id, tick, tick, 1) for user_id in wanted],
            key="user_id",
            update="version = excluded.version",
        )
        if new:
            yield Do("UPDATE state SET users = users + :new", new=len(new))
        return numbers

    def new_user_numbers(self, count: int) -> Job[Sequence[int]]:
        """Return numbers of users who are to be stored."""
        ((last,),) = yield Run("SELECT coalesce(max(user_no), 0) FROM users")
        return range(last + 1, last + 1 + count)

    def count(self, _: int, tally: Tally) -> Job[None]:
        """Add a change to the counts."""
        counts = [(item_no, *count) for item_no, count in sorted(tally.items.items())]
        yield Insert(
            "popularity",
            "item_no events dislikes",
            counts,
            key="item_no",
            update="events = events + excluded.events, dislikes = dislikes + excluded.dislikes",
        )
        yield Do(
            "UPDATE state SET users = users + :users, events = events + :events",
            users=tally.users,
            events=sum(events for _, events, _ in counts),
        )

    # ------------------------------------------------------------------ versions

    def move_keys(self) -> Job[None]:
        """Do nothing: each key has the tick of its last change."""
        yield from ()

    def catalogue_versions(self, previous: int, later: Sequence[int]) -> list[int]:  # noqa: ARG002
        """Return versions of changed items, and move the tick on to the last of them."""
        first = self.tick()
        self._tick += later[-1]
        return [first + each for each in later]

    def move_catalogue(self, version: int, items: int, size: int) -> Job[None]:  # noqa: ARG002
        """Move the version of the catalogue, and add to its number of items."""
        yield Do(
            "UPDATE state SET catalogue = :version, items = items + :items",
            version=version,
            items=items,
        )

    def finish_copy(self) -> Job[None]:
        """Do nothing."""
        yield from ()
