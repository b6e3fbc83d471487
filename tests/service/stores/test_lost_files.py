"""Files of a store that are deleted, replaced or shortened: nothing is acknowledged into them."""

# ruff: noqa: ASYNC240  # nothing else is to run beside the file operations

import errno
import os
import random
import shutil
import stat
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import apsw
import pytest

from service.domain.errors import Corrupt
from service.domain.records import Event
from service.stores.sqlite.check import check_store
from service.stores.sqlite.database_file import DatabaseFile, checksum_vfs
from service.stores.sqlite.guard import StoreGuard
from service.stores.sqlite.store import SQLiteStore

pytestmark = pytest.mark.verify


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a store in a directory of its own."""
    return tmp_path / "data" / "heed.db"


def delete_directory(path: Path) -> None:
    """Delete the data directory."""
    shutil.rmtree(path.parent)


def replace_database(path: Path) -> None:
    """Put a copy in the place of the database."""
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def shorten_database(path: Path) -> None:
    """Cut the end of the database off."""
    os.truncate(path, path.stat().st_size - 4096)


def delete_log(path: Path) -> None:
    """Delete the write-ahead log."""
    Path(f"{path}-wal").unlink()


def empty_log(path: Path) -> None:
    """Empty the write-ahead log."""
    os.truncate(f"{path}-wal", 0)


@pytest.mark.parametrize(
    "fault", [delete_directory, replace_database, shorten_database, delete_log, empty_log]
)
async def test_nothing_is_acknowledged_into_lost_files(
    path: Path, fault: Callable[[Path], None]
) -> None:
    """Once a file is not the file any more, no event is acknowledged, and the error says why."""
    store = SQLiteStore(path)
    await store.append([Event("u", f"i{n}") for n in range(500)])
    await store.close()
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    fault(path)
    for _ in range(3):
        with pytest.raises(Corrupt, match=r"(deleted|replaced|shortened).*heed check"):
            await store.append([Event("u", "lost")])
    problem = await store.problem()
    assert problem is not None
    assert str(path) in problem
    await store.close()


async def test_other_processes_may_reset_the_log(path: Path) -> None:
    """A log that another process has checkpointed and emptied is no damage."""
    store = SQLiteStore(path)
    other = apsw.Connection(str(path), vfs=checksum_vfs())
    assert other.execute("SELECT events FROM state").get == 0  # now it knows that there is a log
    for _ in range(30):
        await store.append([Event("u", "i")])
        other.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        assert Path(f"{path}-wal").stat().st_size == 0
    other.close()
    assert await store.problem() is None
    await store.close()


class Busy:
    """A connection while another process commits: the length of the log is refused at first."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection, self.refused = connection, 0

    def wal_checkpoint(self, *, mode: int) -> tuple[int, int]:
        """Refuse, as SQLite does without a call of the busy handler, and answer the fourth time."""
        if self.refused < 3:
            self.refused += 1
            raise apsw.BusyError("database is locked")
        return self._connection.wal_checkpoint(mode=mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def test_a_busy_log_is_no_damage_and_no_error(path: Path) -> None:
    """Where another process commits, the log is looked at again, and damage is found all the same.

    The log seems too short, as it does where another process has reset it.
    """
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    guard, connection = StoreGuard(path), apsw.Connection(str(path), vfs=checksum_vfs())
    assert connection.execute("SELECT events FROM state").get == 1
    busy: Any = Busy(connection)
    guard.confirm(busy, 0, log_pages=1_000)
    assert busy.refused == 3
    empty_log(path)
    busy.refused = 0
    with pytest.raises(Corrupt, match="shortened"):
        guard.confirm(busy, 0, log_pages=1_000)
    guard.close()
    connection.close()
    await store.close()


async def crashed(path: Path, commits: int) -> Path:
    """Return a copy of a store as a killed process leaves it, with all changes in its log."""
    store = SQLiteStore(path)
    for n in range(commits):
        await store.append([Event("u", f"i{n}")])
    copy = path.parent.with_name("crashed")
    shutil.copytree(path.parent, copy)
    await store.close()
    return copy / path.name


async def test_a_shortened_log_is_refused(path: Path) -> None:
    """A log that lacks acknowledged changes is refused with their number, and left as it is."""
    copy = await crashed(path, 40)
    log = Path(f"{copy}-wal")
    os.truncate(log, log.stat().st_size // 2)
    before = log.read_bytes()
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"lacks (\d+) of the 40 changes.*accept-loss") as caught:
            SQLiteStore(copy)
        assert log.read_bytes() == before
    missing = int(caught.value.detail.split("lacks ")[1].split()[0])
    DatabaseFile(copy, accept_loss=True)
    store = SQLiteStore(copy)
    assert len(await store.history("u")) == 40 - missing
    assert 0 < missing < 40
    await store.append([Event("u", "i")])
    await store.close()


async def test_every_cut_of_a_log_is_noticed(path: Path, tmp_path: Path) -> None:
    """Wherever the log is cut, the store is refused unless it still has every change."""
    copy = await crashed(path, 10)
    log, rng = Path(f"{copy}-wal").read_bytes(), random.Random(26)
    for end in [0, 31, 32, *(rng.randrange(len(log)) for _ in range(12))]:
        cut = tmp_path / f"cut-{end}"
        shutil.copytree(copy.parent, cut)
        os.truncate(cut / "heed.db-wal", end)
        with pytest.raises(Corrupt, match=r"lacks|missing"):
            SQLiteStore(cut / "heed.db")


@pytest.mark.parametrize("evidence", ["heed.db-mark", "models/current"])
@pytest.mark.parametrize("missing", [True, False])
async def test_an_emptied_store_is_refused(path: Path, evidence: str, missing: bool) -> None:
    """A store is not begun anew where a mark or a model shows that there was one."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    await store.close()
    (path.parent / "models").mkdir()
    (path.parent / "models" / "current").touch()
    for other in {"heed.db-mark", "models/current"} - {evidence}:
        (path.parent / other).unlink()
    path.unlink() if missing else path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"missing or empty.*heed check --accept-loss"):
            SQLiteStore(path)
        assert path.exists() is not missing
    DatabaseFile(path, accept_loss=True)
    store = SQLiteStore(path)
    assert await store.append([Event("u", "i")]) == (1, 0)
    await store.close()


async def test_an_older_copy_is_refused(path: Path) -> None:
    """A store in whose place an older copy was put lacks changes, and is refused."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    await store.close()
    older = path.read_bytes()
    store = SQLiteStore(path)
    await store.append([Event("u", "j")])
    await store.close()
    path.write_bytes(older)
    with pytest.raises(Corrupt, match="lacks 1 of the 2 changes"):
        SQLiteStore(path)


async def test_a_read_of_damage_stops_the_writes_of_all(path: Path) -> None:
    """Once a read finds a damaged page, no process acknowledges writes, nor after a restart."""
    store = SQLiteStore(path)
    for n in range(20):
        await store.append([Event(f"u{n}", f"i{k}") for k in range(200)])
    await store.close()
    connection = apsw.Connection(str(path), vfs=checksum_vfs())
    pages: list[Any] = connection.execute(
        "SELECT pageno FROM dbstat WHERE name = 'events' AND pagetype = 'leaf' ORDER BY path"
    ).fetchall()
    connection.close()
    store, other = SQLiteStore(path), SQLiteStore(path)
    with path.open("r+b") as file:
        file.seek(4096 * (pages[-2][0] - 1) + 2000)
        file.write(b"damage")
    with pytest.raises(Corrupt, match="heed check"):
        await store.history("u19")
    for each in (store, other):
        with pytest.raises(Corrupt, match="heed check"):
            await each.append([Event("u0", "i")])
        problem = await each.problem()
        assert problem is not None
        assert "heed check" in problem
        assert len(await each.history("u0")) >= 200  # what is intact is answered
        await each.close()
    store = SQLiteStore(path)
    with pytest.raises(Corrupt, match="found damaged before"):
        await store.append([Event("u0", "i")])
    await store.close()


async def test_files_are_the_owners_alone(path: Path) -> None:
    """Whatever the umask, no other user of the machine may read a store that Heed creates."""
    before = os.umask(0)
    try:
        store = SQLiteStore(path)
        await store.append([Event("u", "i")])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    suffixes = ("", "-wal", "-shm", "-mark")
    assert modes == {f"heed.db{suffix}": 0o600 for suffix in suffixes}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


MAGIC = b"HeedMark"


def sealed(tick: int, is_damaged: int = 0, magic: bytes = MAGIC) -> bytes:
    """A mark with a checksum that fits it."""
    body = struct.pack("<8sqq", magic, tick, is_damaged)
    return body + blake2b(body, digest_size=8).digest()


GARBLED = {
    "empty": b"",
    "a byte": b"H",
    "cut": sealed(2)[:-1],
    "longer": sealed(2) + b"\0",
    "zeros": bytes(32),
    "ones": b"\xff" * 32,
    "text": b"two changes were acknowledged...",
    "another digest": sealed(2)[:-8] + bytes(8),
    "another magic": sealed(2, magic=b"HeedDark"),
    "negative": sealed(-1),
    "no flag": sealed(2, is_damaged=2),
    "very large": sealed(2) * 100_000,
    **{
        f"bit {bit}": bytes(
            byte ^ (1 << bit % 8 if at == bit // 8 else 0) for at, byte in enumerate(sealed(2))
        )
        for bit in range(0, 256, 13)
    },
}


@pytest.mark.parametrize("content", GARBLED.values(), ids=GARBLED)
@pytest.mark.parametrize("missing", [False, True])
async def test_a_garbled_mark_is_refused(path: Path, content: bytes, missing: bool) -> None:
    """It does not count as the mark of an empty store: Heed starts once the loss is accepted."""
    store = SQLiteStore(path)
    for item in ("i", "j"):
        await store.append([Event("u", item)])
    await store.close()
    mark = path.with_name("heed.db-mark")
    assert mark.read_bytes() == sealed(2)
    mark.write_bytes(content)
    if missing:
        path.unlink()
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"heed\.db-mark is damaged.*heed check --accept-loss"):
            SQLiteStore(path)
        assert mark.read_bytes() == content
    assert path.exists() is not missing
    assert [each.level for each in check_store(path)] == ["problem"]
    DatabaseFile(path, accept_loss=True)
    store = SQLiteStore(path)
    assert await store.append([Event("u", "k")]) == (1, 0)
    await store.close()
    assert mark.read_bytes() == sealed(1 if missing else 3)


async def test_a_file_system_without_links_holds_a_mark(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as exFAT, and some shares of other machines."""

    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    await store.close()
    assert path.with_name("heed.db-mark").read_bytes() == sealed(1)
    assert not list(path.parent.glob("heed.db-mark.*"))


@pytest.mark.parametrize("tick", [3, 1 << 40, (1 << 63) - 1])
async def test_a_mark_ahead_of_its_store_is_refused(path: Path, tick: int) -> None:
    """By the mark, changes are missing, however many."""
    store = SQLiteStore(path)
    for item in ("i", "j"):
        await store.append([Event("u", item)])
    await store.close()
    path.with_name("heed.db-mark").write_bytes(sealed(tick))
    with pytest.raises(Corrupt, match=f"lacks {tick - 2} of the {tick} changes"):
        SQLiteStore(path)


@pytest.mark.parametrize("content", [b"", bytes(32), sealed(-1)])
async def test_nothing_is_acknowledged_beside_a_mark_that_was_garbled(
    path: Path, content: bytes
) -> None:
    """A process that serves finds it at the next write, and leaves it as it is."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    mark = path.with_name("heed.db-mark")
    with mark.open("r+b") as file:
        file.truncate(0)
        file.write(content)
    with pytest.raises(Corrupt, match="is damaged"):
        await store.append([Event("u", "j")])
    assert "is damaged" in (await store.problem() or "")
    assert [*(await store.history("u")).item_ids][:1] == ["i"]
    await store.close()
    assert mark.read_bytes() == content
    with pytest.raises(Corrupt, match="is damaged"):
        SQLiteStore(path)


async def test_a_store_without_changes_may_have_an_empty_mark(path: Path) -> None:
    """An earlier Heed wrote the mark with the first change; a new one is whole at once."""
    await SQLiteStore(path).close()
    mark = path.with_name("heed.db-mark")
    assert mark.read_bytes() == sealed(0)
    mark.write_bytes(b"")
    await SQLiteStore(path).close()
    assert mark.read_bytes() == sealed(0)
