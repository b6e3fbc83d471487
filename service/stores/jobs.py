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
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

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


class Each:
    """A change of many rows of one table.

    Args:
        table: without its schema.
        columns: of the rows, separated by spaces. `sqlite:name` and `postgres:name` are columns
            that only one of the two has.
        rows: the values of the columns.
    """

    __slots__ = ("columns", "rows", "table")

    def __init__(self, table: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        self.table = table
        self.columns = columns
        self.rows = list(rows)


class Insert(Each):
    """Insert rows. Without `key`, rows that are stored already stay.

    Args:
        key: columns that identify a row, separated by spaces.
        update: what to set where a row of this key is stored; it fails if there is none to set.
    """

    __slots__ = ("key", "update")

    def __init__(
        self,
        table: str,
        columns: str,
        rows: Iterable[Sequence[Any]],
        *,
        key: str = "",
        update: str = "",
    ) -> None:
        super().__init__(table, columns, rows)
        self.key = key
        self.update = update


class Update(Each):
    """Set the columns of rows. The first `keys` columns identify them."""

    __slots__ = ("keys",)

    def __init__(
        self, table: str, columns: str, rows: Iterable[Sequence[Any]], *, keys: int = 1
    ) -> None:
        super().__init__(table, columns, rows)
        self.keys = keys


class Delete(Each):
    """Delete rows by the columns that identify them; the job is sent what `returning` names."""

    __slots__ = ("returning",)

    def __init__(
        self, table: str, columns: str, rows: Iterable[Sequence[Any]], *, returning: str = ""
    ) -> None:
        super().__init__(table, columns, rows)
        self.returning = returning


Step: TypeAlias = Run | Insert | Update | Delete
Job: TypeAlias = Generator[Step, Rows, T]


class Transaction(Protocol):
    """The transaction of a job that writes."""

    def tick(self) -> int:
        """Return the version of this transaction's changes."""
        ...

    def move_keys(self) -> Job[None]:
        """Move the version of the keys."""
        ...


WriteJob: TypeAlias = Callable[[Any], Job[T]]

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


def columns_of(step: Each, dialect: Literal["sqlite", "postgres"]) -> tuple[list[str], Rows]:
    """Return the columns of a change that a database has, and the rows of these."""
    names = translate(step.columns, dialect).split()
    own = [at for at, name in enumerate(names) if name.partition(":")[0] in (name, dialect)]
    columns = [names[at].rpartition(":")[2] for at in own]
    if len(own) == len(names):
        return columns, [tuple(row) for row in step.rows]
    return columns, [tuple(row[at] for at in own) for row in step.rows]
