"""Salvage of a damaged SQLite store: everything readable is copied into a new store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from service.domain.errors import Corrupt, Invalid
from service.stores.sqlite.database_file import DatabaseFile, checksum_vfs
from service.stores.sqlite.integrity.damaged_pages import PageFile, TableTree
from service.stores.sqlite.schema import COUNT_STORED_EVENTS

Row = tuple[Any, ...]

# Tables, with the columns of the keys by which their rows are stored. `state` and `popularity` are
# counted anew.
_TABLES = {
    "users": ("user_no",),
    "items": ("item_no",),
    "types": ("type_no",),
    "imports": ("import_no",),
    "events": ("user_no", "timestamp", "seq"),
    "vectors": ("user_no", "seq"),
    "claims": ("user_no", "import_no", "first_seq"),
    "replaced": ("kind", "row_no", "import_no"),
    "gone_users": ("user_no",),
    "scenarios": ("name", "version"),
    "forgotten": ("digest", "forgotten"),
    "unused_names": ("kind", "number"),
    "keys": ("key_id",),
}
_DAMAGE = (apsw.CorruptError, apsw.IOError, apsw.NotADBError)
# Rows that refer to lost rows, in the order in which they are dropped.
_DANGLING = {
    "events": "user_no NOT IN (SELECT user_no FROM users) OR item_no NOT IN"
    " (SELECT item_no FROM items) OR type_no NOT IN (SELECT type_no FROM types)",
    "vectors": "NOT EXISTS (SELECT 1 FROM events e WHERE e.user_no = vectors.user_no"
    " AND e.seq = vectors.seq)",
    "claims": "user_no NOT IN (SELECT user_no FROM users)",
    "replaced": "kind = 'user' AND row_no NOT IN (SELECT user_no FROM users)"
    " OR kind = 'item' AND row_no NOT IN (SELECT item_no FROM items)",
}


class Gap(NamedTuple):
    """Rows of one damaged page: those between two keys, both of which are readable."""

    table: str
    after: Row | None  # None: from the first row on
    before: Row | None  # None: up to the last row
    users: tuple[str, ...]  # ids of the first and the last user of the range, if they are known


class Salvaged(NamedTuple):
    """Numbers of rows in the new store by table, gaps, and readable rows that were left out."""

    rows: dict[str, int]
    gaps: list[Gap]
    dropped: dict[str, int]  # since they refer to rows that are lost


def salvage(source: Path, target: Path) -> Salvaged:
    """Copy what is readable of the store `source` into a new store in the file `target`.

    The source is only read, and is not to be in use. Rows of damaged pages are lost, all others are
    copied. The new store is valid: its counts are those of its rows, nothing in it refers to a lost
    row, versions go on from the greatest that was given, and its users' histories are new to every
    reader. It takes the room of two stores meanwhile, beside the target.

    Raises:
        Corrupt: the first page, with the names of the tables, is damaged.
        Invalid: there is a file at `target`, or none at `source`.
    """
    if target.exists():
        raise Invalid("", f"{target} exists already: name a file that does not")
    if not source.is_file():
        raise Invalid("", f"there is no store {source}")
    with tempfile.TemporaryDirectory(prefix=".salvage-", dir=target.parent) as folder:
        copy = Path(folder, "copy.db")
        for suffix in ("", "-wal"):
            if Path(f"{source}{suffix}").exists():
                shutil.copyfile(f"{source}{suffix}", f"{copy}{suffix}")
        try:
            damaged = _make_readable(copy)
            old = apsw.Connection(str(copy), vfs=checksum_vfs())
        except _DAMAGE as error:
            raise Corrupt(f"{source}: not even its tables can be found: {error}") from error
        file = DatabaseFile(target)
        new = file.writer()
        try:
            return _copy(old, new, damaged)
        finally:
            old.close()
            new.close()


def _make_readable(copy: Path) -> set[str]:
    """Replace the damaged pages of the tables of a copy; return the names of these tables."""
    connection = apsw.Connection(str(copy), vfs=checksum_vfs())
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        tables = {}
        find = "SELECT rootpage, sql LIKE '%WITHOUT ROWID%' FROM sqlite_schema WHERE name = ?"
        for table in (*_TABLES, "state"):
            row: Any = connection.execute(find, (table,)).fetchone()
            if row is not None:  # an older store
                tables[table] = TableTree(row[0], len(_columns(connection, table)), not row[1])
        size, count = connection.pragma("page_size"), connection.pragma("page_count")
    finally:
        connection.close()
    pages = PageFile(copy, size, count)
    try:
        return set(pages.replace_damaged(tables))
    finally:
        pages.close()


def _copy(old: apsw.Connection, new: apsw.Connection, damaged: set[str]) -> Salvaged:
    result = Salvaged({}, [], {})
    new.execute("BEGIN IMMEDIATE")
    for table, key in _TABLES.items():
        known = _columns(old, table)
        columns = [name for name in _columns(new, table) if name in known]
        if columns:
            marks = ", ".join("?" * len(columns))
            insert = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({marks})"
            new.executemany(insert, _rows(old, table, columns, key, result.gaps))
    _restore_users(new, result.gaps)
    for table, dangling in _DANGLING.items():
        new.execute(f"DELETE FROM {table} WHERE {dangling}")
        if new.changes():
            result.dropped[table] = new.changes()
    for table in _TABLES:
        result.rows[table] = int(new.execute(f"SELECT count(*) FROM {table}").get)
    _write_state(old, new, is_damaged=bool(damaged))
    new.execute("COMMIT")
    named = [gap._replace(users=_user_range(new, gap)) for gap in result.gaps]
    return result._replace(gaps=named)


def _columns(connection: apsw.Connection, table: str) -> list[str]:
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return [str(name) for (name,) in rows]


def _rows(
    old: apsw.Connection, table: str, columns: Sequence[str], key: Sequence[str], gaps: list[Gap]
) -> Iterator[Row]:
    """Iterate over the rows of a table in the order in which they are stored; note the gaps."""
    places = [columns.index(name) for name in key]
    last: Row | None = None
    waiting = False
    for row in old.execute(f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED"):
        if all(value is None for value in row[1:]):
            waiting = True
            continue
        place = tuple(row[at] for at in places)
        if waiting:
            gaps.append(Gap(table, last, place, ()))
            waiting = False
        last = place
        yield row
    if waiting:
        gaps.append(Gap(table, last, None, ()))


def _restore_users(new: apsw.Connection, gaps: Sequence[Gap]) -> None:
    """Set the counters of users to what their readable events need at least."""
    if gaps:
        new.execute(
            "UPDATE users SET next_seq = max(next_seq, 1 + coalesce("
            "(SELECT max(seq) FROM events e WHERE e.user_no = users.user_no), 0))"
        )


def _write_state(old: apsw.Connection, new: apsw.Connection, *, is_damaged: bool) -> None:
    """Write the counts, and a clock beyond every version that the old store can have given."""
    clock = max(
        int(new.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").get)
        for table, column in (("users", "version"), ("items", "change"), ("gone_users", "change"))
    )
    row: Any = old.execute("SELECT clock FROM state").fetchone()
    if row is not None and row[0] is not None:
        clock = max(clock, row[0])
    tick = clock + 1
    new.execute(
        "UPDATE state SET clock = ?1, catalogue = ?1,"
        " users = (SELECT count(*) FROM users), events = (SELECT count(*) FROM events),"
        " items = (SELECT count(*) FROM items WHERE document IS NOT NULL)",
        (tick,),
    )
    new.execute(COUNT_STORED_EVENTS)
    if is_damaged:  # whoever remembers more than is left must read all again
        new.execute("UPDATE users SET version = ?1, generation = ?1", (tick,))


def _user_range(new: apsw.Connection, gap: Gap) -> tuple[str, ...]:
    """Return the ids of the users at both ends of a gap whose key begins with a user."""
    if gap.table not in ("events", "vectors", "claims", "users"):
        return ()
    found = []
    for place in (gap.after, gap.before):
        if place is not None:
            user_id: Any = new.execute(
                "SELECT user_id FROM users WHERE user_no = ?", (place[0],)
            ).get
            found += [] if user_id is None else [str(user_id)]
    return tuple(dict.fromkeys(found))
