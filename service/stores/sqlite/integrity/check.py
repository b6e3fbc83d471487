"""Check of a SQLite store: pages, structure, counts and references, with one finding a line."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from service.domain.errors import HeedError
from service.stores.records import copying
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.dialect import run_job
from service.stores.sqlite.integrity.high_water_mark import read_mark
from service.stores.sqlite.integrity.store_guard import StoreGuard
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
