"""Opening newer, foreign, damaged, truncated or crashed store files."""

import asyncio
import random
import shutil
import sqlite3
from pathlib import Path

import apsw
import pytest

from service.domain.errors import Corrupt, Incompatible, Unavailable
from service.domain.records import Event, Item
from service.stores.sqlite import database_file
from service.stores.sqlite.store import SQLiteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heed.db"


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed store of some 100 pages."""

    async def fill() -> None:
        store = SQLiteStore(path)
        for user in range(20):
            await store.append([Event(f"u{user}", f"i{n}", f"{user}-{n}") for n in range(100)])
        await store.put_items([Item(f"i{n}", "x" * 200) for n in range(100)])
        await store.close()

    asyncio.run(fill())
    return path


@pytest.fixture
def crashed(path: Path, tmp_path: Path) -> Path:
    """What kill -9 leaves of ten commits: a database and its log."""
    crash = tmp_path / "crash"

    async def write() -> None:
        store = SQLiteStore(path)
        for n in range(10):
            await store.append([Event("u", f"i{n}", f"e{n}")])
        crash.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", crash / f"heed.db{suffix}")
        await store.close()

    asyncio.run(write())
    return crash


def items(path: Path, user_id: str) -> list[str]:
    """The user's items, from a store opened for it."""

    async def read() -> list[str]:
        store = SQLiteStore(path)
        try:
            return (await store.history(user_id)).item_ids
        finally:
            await store.close()

    return asyncio.run(read())


def flipped(content: bytes, at: int, rng: random.Random) -> bytes:
    """The content with one bit of the byte `at` turned."""
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def test_a_newer_store_is_refused(filled: Path) -> None:
    """A file of a later schema is left alone, with the file and the version named."""
    connection = apsw.Connection(str(filled), vfs=database_file.checksum_vfs())
    connection.pragma("user_version", 99)
    connection.close()
    with pytest.raises(Incompatible, match="99") as caught:
        SQLiteStore(filled)
    assert str(filled) in caught.value.detail


def test_another_programs_database_is_refused(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (a)")
    other.commit()
    other.close()
    before = path.read_bytes()
    with pytest.raises(Incompatible, match=r"heed\.db"):
        SQLiteStore(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database, only text\n" * 50, bytes(4096) + b"x"])
def test_what_is_no_database_is_refused(path: Path, content: bytes) -> None:
    """A file that is no database is refused as Corrupt and left unchanged."""
    path.write_bytes(content)
    with pytest.raises(Corrupt, match=r"heed\.db"):
        SQLiteStore(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [None, b""])
def test_an_empty_file_becomes_a_store(path: Path, content: bytes | None) -> None:
    path = path.parent / "a" / "b" / path.name
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    assert items(path, "u") == []
    reader = sqlite3.connect(path)  # any SQLite can look into it
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert reader.execute("SELECT events FROM state").fetchone() == (0,)
    reader.close()


def test_an_unusable_path_is_explained(tmp_path: Path) -> None:
    """A path through a file, or to a directory, is an error that names it."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "heed.db", tmp_path):
        with pytest.raises(Unavailable, match=str(path)):
            SQLiteStore(path)


def test_truncation_is_found_at_open(filled: Path, tmp_path: Path) -> None:
    """A file that was cut off keeps the store from opening, wherever it was cut."""
    content, copy, rng = filled.read_bytes(), tmp_path / "copy.db", random.Random(21)
    size = len(content)
    for end in [1, 99, 100, size - 4096, size - 1, *(rng.randrange(1, size) for _ in range(20))]:
        copy.write_bytes(content[:end])
        with pytest.raises((Corrupt, Incompatible), match=r"copy\.db"):
            SQLiteStore(copy)


def test_flipped_bits_are_found_when_read(filled: Path) -> None:
    """A damaged page is an error, never an answer."""
    connection = apsw.Connection(str(filled), vfs=database_file.checksum_vfs())
    leaves = "SELECT pageno FROM dbstat WHERE name = 'events' AND pagetype = 'leaf'"
    pages = [page for (page,) in connection.execute(leaves)]
    connection.close()
    content, rng = filled.read_bytes(), random.Random(22)
    for page in pages[: len(pages) // 2]:
        content = flipped(content, 4096 * (page - 1) + rng.randrange(4096), rng)
    filled.write_bytes(content)

    async def read() -> None:
        store = SQLiteStore(filled)
        assert await store.problem() is None
        good = 0
        for n in range(20):
            try:
                assert (await store.history(f"u{n}")).item_ids == [f"i{k}" for k in range(100)]
                good += 1
            except Corrupt as error:
                assert str(filled) in error.detail  # noqa: PT017  # which users is not the point
        assert 0 < good < 20
        with pytest.raises(Corrupt):
            list(store.scan())
        assert await store.problem() is not None
        await store.close()

    asyncio.run(read())


def test_a_damaged_log_is_found_at_open(crashed: Path, tmp_path: Path) -> None:
    """A changed bit in the log before its last commits is reported as Corrupt."""
    log = (crashed / "heed.db-wal").read_bytes()
    before_the_last_commits, rng = len(log) - 3 * 8 * 4120, random.Random(23)
    for at in [*range(32), *(rng.randrange(32, before_the_last_commits) for _ in range(20))]:
        copy = tmp_path / f"flipped-{at}"
        shutil.copytree(crashed, copy)
        (copy / "heed.db-wal").write_bytes(flipped(log, at, rng))
        with pytest.raises(Corrupt, match=r"heed\.db-wal"):
            SQLiteStore(copy / "heed.db")


def test_a_log_without_its_database_is_damage(crashed: Path) -> None:
    """A log beside a missing or empty database is reported as Corrupt."""
    log = (crashed / "heed.db-wal").read_bytes()
    (crashed / "heed.db").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"heed\.db"):
            SQLiteStore(crashed / "heed.db")
        assert (crashed / "heed.db-wal").read_bytes() == log
        (crashed / "heed.db").unlink(missing_ok=True)


def test_a_torn_log_is_no_damage(crashed: Path, tmp_path: Path) -> None:
    """A truncated log opens with the commits before the cut."""
    log, rng = (crashed / "heed.db-wal").read_bytes(), random.Random(24)
    lengths = []
    for end in [0, 31, 32, *sorted(rng.randrange(len(log)) for _ in range(12)), len(log)]:
        copy = tmp_path / f"torn-{end}"
        shutil.copytree(crashed, copy)
        (copy / "heed.db-wal").write_bytes(log[:end])
        found = items(copy / "heed.db", "u")
        assert found == [f"i{n}" for n in range(len(found))]
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (0, 10)
