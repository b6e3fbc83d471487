"""Jobs: what a store does with its tables, written once for SQLite and PostgreSQL.

A job is a generator. It yields statements, is sent the rows of each, and returns its result:

    def current(name: str) -> Job[Scenario | None]:
        rows = yield Run(f"{COLUMNS} WHERE $here AND name = :name", name=name)

Statements are PostgreSQL's, with the tables in the schema `heed`, and this notation:

    $here          the rows of the store's namespace; $here(t) those of the table t
    $in(names)     IN the list that is bound to :names
    $user          the column by which rows belong to a user
    $[one|other]   `one` in SQLite, `other` in PostgreSQL
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]

# Locks that a write may hold alone, each of one namespace. Writers of events share that of names
# with one another, and only what deletes names excludes them.
NAMES, CATALOGUE, QUOTA, KEYS, SCENARIOS, FOLDING, FILES = range(1, 8)


class Run:
    """A statement, whose rows the job is sent."""

    __slots__ = ("sql", "values")

    def __init__(self, sql: str, **values: Any) -> None:
        self.sql = sql
        self.values = values


class Do(Run):
    """A statement without rows. The job goes on before PostgreSQL has answered."""

    __slots__ = ()


@dataclass(slots=True)
class Each:
    """Rows of one table, by their values.

    Attributes:
        table: without its schema.
        columns: of the rows, separated by spaces. `sqlite:name` and `postgres:name` are columns
            that only one of the two has.
        rows: the values of the columns.
    """

    table: str
    columns: str
    rows: Iterable[Sequence[Any]]


@dataclass(slots=True)
class Insert(Each):
    """Insert rows. Without `key`, rows that are stored already stay.

    Attributes:
        key: columns that identify a row, separated by spaces.
        update: what to set where a row of this key is stored; it fails if there is none to set.
    """

    key: str = ""
    update: str = ""


@dataclass(slots=True)
class Update(Each):
    """Set the columns of rows. The first `keys` columns identify them."""

    keys: int = 1


@dataclass(slots=True)
class Find(Each):
    """Read rows by the columns that identify them; the job is sent what `returning` names."""

    returning: str


@dataclass(slots=True)
class Delete(Each):
    """Delete rows by the columns that identify them; the job is sent what `returning` names."""

    returning: str = ""


Change: TypeAlias = Insert | Update | Find | Delete
Step: TypeAlias = Run | Change
Job: TypeAlias = Generator[Step, Rows, T]


class Changed(Exception):
    """Raised in a job where another transaction has changed what it relies on."""


class UserRow(NamedTuple):
    """A stored user. `user` is the value of `$user`."""

    user: int
    user_no: int
    next_seq: int
    profile: bytes | None


@dataclass
class Tally:
    """The amounts that one change adds to the counts of a store, or takes from them."""

    users: int = 0
    bytes: int = 0
    items: dict[int, list[int]] = field(default_factory=dict)  # all and negative ones by item_no

    def add(self, item_no: int, is_negative: bool, events: int = 1) -> None:
        """Count events on an item; fewer than 0 are taken from it."""
        count = self.items.setdefault(item_no, [0, 0])
        count[0] += events
        count[1] += events * is_negative


class Transaction(Protocol):
    """The transaction of a job that writes, and what the two databases do in it differently."""

    by_key: bool
    """True if rows of users are found by the hash of their id, and event ids are a table."""

    def tick(self) -> int:
        """Return the version of this transaction's changes."""
        ...

    def last_number(self) -> int:
        """Return the greatest version that this transaction may give to a row."""
        ...

    def has_changes(self) -> bool:
        """Report whether jobs before this one have changed something in the same transaction."""
        ...

    def scrub(self) -> None:
        """Have personal data that is deleted here removed from logs, as far as Heed can."""
        ...

    # Names

    def item_numbers(self, item_ids: Iterable[str]) -> dict[str, int]:
        """Return the numbers of items; raises `Changed` where they must be learned first."""
        ...

    def type_numbers(self, types: Iterable[str]) -> dict[str, int]:
        """Return the numbers of event types, as `item_numbers` does."""
        ...

    def add_item_names(self, item_ids: Sequence[str]) -> Job[None]:
        """Number the new ones of items in this order."""
        ...

    def has_unseen(self) -> Job[bool]:
        """Report whether rows may be committed that cannot be seen yet."""
        ...

    def renumber(self, table: str, numbers: Sequence[int]) -> Job[None]:
        """Record that names are deleted, so that their numbers are not used again."""
        ...

    # Users

    def lock_users(self, user_ids: Iterable[str]) -> Job[dict[str, UserRow]]:
        """Return the users that are stored, locked until the end of the transaction."""
        ...

    def put_users(self, user_ids: Iterable[str]) -> Job[dict[str, int]]:
        """Give users a new version, and create the unknown ones; return the `$user` of each."""
        ...

    def new_user_numbers(self, count: int) -> Job[Sequence[int]]:
        """Return numbers of users who are to be stored."""
        ...

    def count(self, user: int, tally: Tally) -> Job[None]:
        """Add a change to the counts. `user` is any user of the change."""
        ...

    # Versions

    def move_keys(self) -> Job[None]:
        """Move the version of the keys."""
        ...

    def catalogue_versions(self, previous: int, later: Sequence[int]) -> list[int]:
        """Return versions of changed items: those of equal numbers in `later` are equal.

        Args:
            previous: the version of the catalogue.
            later: how much later than now each is, in ascending order.
        """
        ...

    def move_catalogue(self, version: int, items: int, size: int) -> Job[None]:
        """Move the version of the catalogue, and add to its numbers of items and of bytes."""
        ...

    def finish_copy(self) -> Job[None]:
        """Tidy up after very many writes."""
        ...


_CHOICE = re.compile(r"\$\[([^|\]]*)\|([^\]]*)\]")
_NOTATION = re.compile(r"\$here\((\w+)\)|\$here|\$in\((\w+)\)|\$user")
_VALUE = re.compile(r"(?<![:\w]):([a-z]\w*)")


def translate(sql: str, dialect: Literal["sqlite", "postgres"]) -> str:
    """Return a statement in the SQL of one database."""
    is_sqlite = dialect == "sqlite"

    def replaced(match: re.Match[str]) -> str:
        of, names = match.groups()
        text = match.group()
        if names:
            return f"IN carray(:{names})" if is_sqlite else f"= ANY(:{names})"
        if text.startswith("$here"):
            return "true" if is_sqlite else f"{f'{of}.' if of else ''}namespace_no = :no"
        return "user_no" if is_sqlite else "user_key"

    sql = _CHOICE.sub(r"\1" if is_sqlite else r"\2", sql)
    sql = _NOTATION.sub(replaced, sql)
    return sql.replace("heed.", "") if is_sqlite else _VALUE.sub(r"%(\1)s", sql)


def columns_of(
    step: Each, dialect: Literal["sqlite", "postgres"]
) -> tuple[list[str], Rows, Callable[[int], int]]:
    """Return the columns of a change that a database has, the rows of these, and how many.

    The function says how many of the first columns of the step it has.
    """
    names = translate(step.columns, dialect).split()
    own = [at for at, name in enumerate(names) if name.partition(":")[0] in (name, dialect)]
    columns = [names[at].rpartition(":")[2] for at in own]
    if len(own) == len(names):
        return columns, [tuple(row) for row in step.rows], lambda count: count
    rows = [tuple(row[at] for at in own) for row in step.rows]
    return columns, rows, lambda count: sum(at < count for at in own)
