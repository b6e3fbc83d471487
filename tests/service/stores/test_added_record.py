"""A record that is added to both stores: its jobs are written once, here."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import psycopg
import pytest

from service.domain.errors import Conflict
from service.stores.base import Store
from service.stores.jobs import Delete, Find, Insert, Job, Run, Transaction, Update
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore
from tests.support.postgres_server import PostgresDatabases

SHELVES = """\
CREATE TABLE IF NOT EXISTS shelves (
  shelf TEXT PRIMARY KEY, width REAL, is_full INTEGER NOT NULL, books INTEGER NOT NULL) STRICT"""
SHELVES_OF_NAMESPACES = """\
CREATE TABLE IF NOT EXISTS heed.shelves (
  namespace_no integer, shelf text, width double precision, is_full boolean NOT NULL,
  books bigint NOT NULL, PRIMARY KEY (namespace_no, shelf))"""
COLUMNS = "shelf width is_full books"


def build(_: Transaction, shelf: str, width: float | None) -> Job[None]:
    """Add a shelf. Raises `Conflict` if there is one of this name."""
    if (yield Find("shelves", "shelf", [(shelf,)], returning="books")):
        raise Conflict(f"there is a shelf {shelf!r}")
    yield Insert("shelves", COLUMNS, [(shelf, width, False, 0)], key="shelf")


def fill(_: Transaction, books: dict[str, int]) -> Job[list[str]]:
    """Add books to shelves, and return those that are full now, at ten books."""
    rows = yield Run(
        "SELECT shelf, books FROM heed.shelves WHERE $here AND shelf $in(names)",
        names=list(books),
    )
    sums = [(shelf, count + books[shelf]) for shelf, count in rows]
    full = sorted(shelf for shelf, count in sums if count >= 10)
    yield Update("shelves", "shelf books is_full", [(*each, each[0] in full) for each in sums])
    return full


def clear(_: Transaction, shelves: list[str]) -> Job[int]:
    """Remove shelves, and return the number of their books."""
    rows = yield Delete("shelves", "shelf", [(each,) for each in shelves], returning="books")
    return sum(books for (books,) in rows)


def shelves() -> Job[list[tuple[str, float | None, bool, int]]]:
    """Return all shelves by name."""
    rows = yield Run(
        "SELECT shelf, width, is_full, books FROM heed.shelves WHERE $here ORDER BY shelf"
    )
    return [(shelf, width, bool(is_full), books) for shelf, width, is_full, books in rows]


@pytest.fixture(params=["sqlite", "postgres"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresDatabases
) -> AsyncIterator[Store]:
    """A store of each kind, whose schema has the record's table."""
    made: Store
    if request.param == "sqlite":
        path = tmp_path / "heed.db"
        made = SQLiteStore(path)
        connection = apsw.Connection(str(path), vfs=checksum_vfs())
        connection.execute(SHELVES)
        connection.close()
    else:
        url = postgres.create_database()
        made = PostgresStore(url, namespace=uuid.uuid4().hex, patience=20.0)
        with psycopg.connect(url) as database:
            database.execute(SHELVES_OF_NAMESPACES)
    yield made
    await made.close()


async def test_a_record_is_added_in_one_file(store: Store) -> None:
    """Both stores run the same jobs with the same results, errors and rollbacks."""
    await store._write(build, "north", 1.5)
    await store._write(build, "south", None)
    with pytest.raises(Conflict, match="'north'"):
        await store._write(build, "north", 2.0)
    assert await store._write(fill, {"north": 4, "south": 12, "west": 1}) == ["south"]
    assert await store._read(shelves) == [("north", 1.5, False, 4), ("south", None, True, 12)]

    def fill_and_fail(tx: Transaction) -> Job[None]:
        yield from fill(tx, {"north": 100})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store._write(fill_and_fail)
    assert await store._write(clear, ["north", "east"]) == 4
    assert await store._read(shelves) == [("south", None, True, 12)]
    assert await store._write(clear, []) == 0
