"""Check of a SQLite store, and salvage of what SQL can read of a damaged one."""

from __future__ import annotations

import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from service.domain.errors import Corrupt, HeedError, Invalid
from service.stores.records import copying
from service.stores.sqlite.database_file import DatabaseFile, checksum_vfs
from service.stores.sqlite.guard import StoreGuard, read_mark
from service.stores.sqlite.schema import COUNT_STORED_EVENTS
from service.stores.sqlite.transaction import run_job
from service.stores.values import CheckResult, copy_unfinished

_MOST_PROBLEMS = 100  # of the structure, that are reported
# Statements that count rows without a counterpart.
_REFERENCES = {
    "events of users who are not stored": "SELECT count(*) FROM events"
    " WHERE user_no NOT IN (SELECT user_no FROM users)",
    "events of items without a name": "SELECT count(*) FROM events"
    " WHERE item_no NOT IN (SELECT item_no FROM items)",
    "events of types without a name": "SELECT count(*) FROM events"
    " WHERE type_no NOT IN (SELECT type_no FROM types)",
    "vectors without their event": "SELECT count(*) FROM vectors v WHERE NOT EXISTS"
    " (SELECT 1 FROM events e WHERE e.user_no = v.user_no AND e.seq = v.seq)",
    "events of imports that are not recorded": "SELECT count(*) FROM events WHERE import_no"
    " IS NOT NULL AND import_no NOT IN (SELECT import_no FROM imports)",
}
_COUNTS = {
    "users": "SELECT count(*) FROM users",
    "items": "SELECT count(*) FROM items WHERE document IS NOT NULL",
    "events": "SELECT count(*) FROM events",
}


def check_store(path: Path, *, full: bool = False) -> Iterator[CheckResult]:
    """Check the store in the file `path`, which may be in use.

    Every page is read, and so its checksum verified. With `full`, also the order and the indexes of
    all rows, and each reference from one table to another, which takes several times as long.
    """
    try:
        file = DatabaseFile(path)
        connection = file.reader()
    except HeedError as error:
        yield CheckResult("problem", error.detail)
        return
    problems = 0
    try:
        for finding in _check(file, connection, full):
            problems += finding.level == "problem"
            yield finding
    except (apsw.Error, OSError) as error:
        problems += 1
        yield CheckResult("problem", file.explain(error)[0].detail)
    finally:
        connection.close()
    yield from _check_mark(path, intact=not problems)


def _check(file: DatabaseFile, connection: apsw.Connection, full: bool) -> Iterator[CheckResult]:
    pragma = "integrity_check" if full else "quick_check"
    found = connection.execute(f"PRAGMA {pragma}({_MOST_PROBLEMS})").fetchall()
    sentences = [str(row[0]) for row in found]
    if sentences != ["ok"]:
        for sentence in sentences:
            yield CheckResult("problem", f"{file.path}: {sentence}")
        return
    pages = connection.pragma("page_count")
    yield CheckResult("ok", f"{file.path}: {pages:,} pages are intact")
    if (origin := run_job(connection, copying.unfinished())) is not None:
        yield CheckResult("problem", copy_unfinished(str(file.path), origin).detail)
    connection.execute("BEGIN")  # counts belong together
    for what, find in _COUNTS.items():
        counted: Any = connection.execute(find).get
        recorded: Any = connection.execute(f"SELECT {what} FROM state").get
        if counted == recorded:
            yield CheckResult("ok", f"{counted:,} {what}")
        else:
            yield CheckResult(
                "problem", f"{file.path}: {counted:,} {what} are stored, {recorded:,} recorded"
            )
    if full:
        for what, find in _REFERENCES.items():
            rows: Any = connection.execute(find).get
            if rows:
                yield CheckResult("problem", f"{file.path}: {rows:,} {what}")
    connection.execute("ROLLBACK")


def _check_mark(path: Path, *, intact: bool) -> Iterator[CheckResult]:
    state = read_mark(path)
    if state is None or not state.is_damaged:
        return
    if not intact:
        yield CheckResult("note", f"{path} takes no writes, since a process found it damaged")
        return
    guard = StoreGuard(path)
    guard.clear_damage()
    guard.close()
    yield CheckResult(
        "note",
        f"{path} was found damaged before, and is intact now: it takes writes once restarted",
    )


def check_modes(directory: Path) -> Iterator[CheckResult]:
    """Report what other users of the machine may read or enter in a data directory."""
    entries = [directory, *sorted(directory.rglob("*"))]
    open_ones = [
        entry
        for entry in entries
        if not entry.is_symlink() and stat.S_IMODE(entry.stat().st_mode) & 0o077
    ]
    if directory in open_ones:
        yield CheckResult(
            "note",
            f"other users may read {directory}, with {len(open_ones) - 1:,} entries in it: "
            f"chmod -R go= {directory}",
        )


Row = tuple[Any, ...]

# Tables, with the columns of the keys by which their rows are stored. `state` and `popularity` are
# counted again.
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
    """Rows that cannot be read: those between two keys, both of which can."""

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
    """Copy what SQL can read of the store `source` into a new store in the file `target`.

    Each table is read from its first row on, and, if a damaged page ends that, from its last row
    back: with several damaged pages, the rows between them are lost. The source is only read, and
    is not to be in use. The new store is valid: its counts are those of its rows, nothing in it
    refers to a lost row, versions go on from the greatest that was given, and its users' histories
    are new to every reader. It takes the room of two stores meanwhile, beside the target.

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
            old = apsw.Connection(str(copy), vfs=checksum_vfs())
            old.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        except _DAMAGE as error:
            raise Corrupt(f"{source}: not even its tables can be found: {error}") from error
        file = DatabaseFile(target)
        new = file.writer()
        try:
            return _copy(old, new)
        finally:
            old.close()
            new.close()


def _copy(old: apsw.Connection, new: apsw.Connection) -> Salvaged:
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
    _write_state(old, new, result.gaps)
    new.execute("COMMIT")
    named = [gap._replace(users=_user_range(new, gap)) for gap in result.gaps]
    return result._replace(gaps=named)


def _columns(connection: apsw.Connection, table: str) -> list[str]:
    rows = connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
    return [str(name) for (name,) in rows]


def _rows(
    old: apsw.Connection, table: str, columns: Sequence[str], key: Sequence[str], gaps: list[Gap]
) -> Iterator[Row]:
    """Iterate over the rows of a table that can be read; note the gap between them."""
    places = [columns.index(name) for name in key]
    ends: list[Row | None] = []
    for direction in ("ASC", "DESC"):
        end: Row | None = None
        order = ", ".join(f"{name} {direction}" for name in key)
        try:
            for row in old.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}"):
                end = tuple(row[at] for at in places)
                yield row
            return  # all of them
        except _DAMAGE:
            ends.append(end)
    gaps.append(Gap(table, ends[0], ends[1], ()))


def _restore_users(new: apsw.Connection, gaps: Sequence[Gap]) -> None:
    """Set the counters of users to what their readable events need at least."""
    if gaps:
        new.execute(
            "UPDATE users SET next_seq = max(next_seq, 1 + coalesce("
            "(SELECT max(seq) FROM events e WHERE e.user_no = users.user_no), 0))"
        )


def _write_state(old: apsw.Connection, new: apsw.Connection, gaps: Sequence[Gap]) -> None:
    """Write the counts, and a clock beyond every version that the old store can have given."""
    clock = max(
        int(new.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").get)
        for table, column in (("users", "version"), ("items", "change"), ("gone_users", "change"))
    )
    is_known = False
    with suppress(*_DAMAGE):
        clock = max(clock, int(old.execute("SELECT clock FROM state").get))
        is_known = True
    tick = clock + 1
    new.execute(
        "UPDATE state SET clock = ?1, catalogue = ?1,"
        " users = (SELECT count(*) FROM users), events = (SELECT count(*) FROM events),"
        " items = (SELECT count(*) FROM items WHERE document IS NOT NULL)",
        (tick,),
    )
    new.execute(COUNT_STORED_EVENTS)
    if gaps or not is_known:  # a reader that remembers more than is left must read all again
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
