"""Transactions of a SQLite store, in which the writer's thread runs jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import apsw

from service.stores.jobs import Do, Insert, Job, Run, Tally, UserRow
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.names import Names
from service.stores.sqlite.schema import check_schema

T = TypeVar("T")
_STATE = "SELECT clock, names, scrub, user_version FROM state, pragma_user_version"


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
