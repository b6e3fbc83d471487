"""Forgetting in the SQLite store, down to the bytes of its files."""

# ruff: noqa: ASYNC110, ASYNC240, ASYNC251  # nothing else is to run beside the file operations

import asyncio
import multiprocessing
import random
import time
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from service.domain.records import Event, Item, User
from service.stores.sqlite import writer
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.guard import mark_path
from service.stores.sqlite.store import SQLiteStore

# What identifies the user: ids of the user and of another device, profiles, events, items, types.
SECRETS = [b"maria-4711", b"device-4711", b"maria@example.org", b"orchids", b"evt4711", b"only4711",
           b"type4711", b"ferns"]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a store in a directory of its own."""
    return tmp_path / "data" / "heed.db"


def found(directory: Path) -> dict[str, list[bytes]]:
    """Return the secrets that are in each file of a directory."""
    contents = {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }
    hits = {name: [s for s in SECRETS if s in content] for name, content in contents.items()}
    return {name: secrets for name, secrets in hits.items() if secrets}


async def fill(store: SQLiteStore, rows: int) -> None:
    """Store events of Maria, with secrets in every column, among those of others, at random."""
    rng = random.Random(27)
    imports = [await store.begin_import("users.csv") for _ in range(2)]
    profile = User("maria-4711", {"email": "maria@example.org"}, ("orchids",))
    await store.put_user(profile, import_id=imports[0])
    await store.put_user(User("maria-4711", {}, ("ferns",)), import_id=imports[1])
    events = [
        Event(
            "maria-4711" if n % 3 else "device-4711",
            f"only4711-{rng.randrange(rows)}" if n % 2 else f"i{n % 50}",
            f"evt4711-{rng.randrange(10**9)}",
            "type4711" if n % 5 else "view",
            timestamp=rng.randrange(10**12),
        )
        for n in range(rows)
    ]
    others = [
        Event(f"u{rng.randrange(99)}", f"i{n % 50}", timestamp=rng.randrange(10**12))
        for n in range(2 * rows)
    ]
    mixed = events + others
    rng.shuffle(mixed)
    for start in range(0, len(mixed), 200):
        source = imports[0] if start % 400 else None
        await store.append(mixed[start : start + 200], import_id=source)
    await store.append(events[:500], import_id=imports[1])  # claims
    await store.put_user(User("device-4711", {"email": "maria@example.org"}))


async def scrubbed(path: Path) -> None:
    """Wait until the log was emptied, as another process sees it."""
    with closing(apsw.Connection(str(path), vfs=checksum_vfs())) as connection:
        while connection.execute("SELECT scrub FROM state").get:
            await asyncio.sleep(0.01)


async def test_a_forgotten_user_is_in_no_file(path: Path) -> None:
    """While the store is open and afterwards, no byte of its files names the forgotten user."""
    store = SQLiteStore(path)
    await fill(store, 6_000)
    assert found(path.parent)
    await store.merge("maria-4711", "device-4711")
    assert await store.forget("maria-4711") == 6_000
    assert await store.clean_up()
    assert not await store.clean_up()
    await scrubbed(path)
    assert found(path.parent) == {}
    assert (await store.counts())["events"] == 12_000
    assert len(list(store.scan_events())) == 12_000
    await store.close()
    assert found(path.parent) == {}


async def test_the_source_of_a_merge_is_in_no_file(path: Path) -> None:
    """The id of a merged user is gone, while the events and the profile live on."""
    store = SQLiteStore(path)
    await store.append([Event("device-4711", "i")])
    await store.merge("maria-4711", "device-4711")
    await scrubbed(path)
    await store.close()
    assert found(path.parent) == {"heed.db": [b"maria-4711"]}


async def test_a_reader_delays_the_emptying_of_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long scan keeps the log from being emptied; writes go on, and it is emptied afterwards."""
    monkeypatch.setattr(writer, "SCRUB_RETRY", 0.01)
    store = SQLiteStore(path)
    await fill(store, 600)
    scan = store.scan(10)
    next(scan)
    await store.forget("maria-4711")
    await store.forget("device-4711")
    for _ in range(20):
        await store.append([Event("u", "i")])
    assert b"maria-4711" in found(path.parent)["heed.db-wal"]
    assert sum(map(len, scan)) + 10 == 1_800  # the scan's state is the one of its begin
    await store.clean_up()
    await scrubbed(path)
    assert found(path.parent) == {}
    await store.close()


def _forget_and_die(path: Path) -> None:
    async def run() -> None:
        store = SQLiteStore(path)
        store._writer._scrub = lambda: None  # type: ignore[method-assign]  # killed before that
        await store.forget("maria-4711")
        await store.forget("device-4711")
        time.sleep(60)

    asyncio.run(run())


@pytest.mark.parametrize("beside", [False, True])
async def test_a_killed_process_leaves_nothing_for_good(
    path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """After a kill between the commit and the emptying, the next process, or another, does it."""
    monkeypatch.setattr(writer, "SCRUB_POLL", 0.01)
    store = SQLiteStore(path)
    await fill(store, 600)
    if not beside:
        await store.close()
    child = multiprocessing.get_context("fork").Process(target=_forget_and_die, args=(path,))
    child.start()
    with closing(apsw.Connection(str(path), vfs=checksum_vfs())) as connection:
        while connection.execute("SELECT count(*) FROM forgotten").get < 2:
            time.sleep(0.01)
    child.kill()
    child.join()
    if not beside:
        store = SQLiteStore(path)
    await store.clean_up()
    await scrubbed(path)
    assert found(path.parent) == {}
    await store.close()


async def test_deleted_names_come_back_under_new_numbers(path: Path) -> None:
    """Processes that remember deleted names store and answer events of these names correctly."""
    stores = [SQLiteStore(path), SQLiteStore(path)]
    for n in range(20):
        one, other = stores[n % 2], stores[(n + 1) % 2]
        await one.append([Event("maria", "rare", type="odd"), Event("u", "i")])
        assert (await other.history("maria")).item_ids == ["rare"]
        await other.append([Event("maria", "rare", type="odd")])
        await one.forget("maria")
        assert await one.clean_up()
        await other.append([Event("v", f"new{n}", type="odd"), Event("w", "rare")])
        assert (await one.history("v")).item_ids[-1] == f"new{n}"
        assert (await one.history("w")).item_ids == ["rare"]
        assert set((await one.history("v")).types) == {"odd"}
        await other.forget("w")
    for store in stores:
        await store.close()


async def test_names_in_use_stay(path: Path) -> None:
    """A name that others use, that the catalogue has, or that is used again meanwhile is kept."""
    store = SQLiteStore(path)
    await store.append([Event("maria", name) for name in ("shared", "listed", "back", "rare")])
    await store.append([Event("u", "shared")])
    await store.put_items([Item("listed")])
    await store.forget("maria")
    asyncio.get_running_loop().call_soon(
        lambda: asyncio.ensure_future(store.append([Event("u", "back")]))
    )
    await store.clean_up()
    assert (await store.history("u")).item_ids == ["shared", "back"]
    assert await store.get_items(["listed"]) == [Item("listed")]
    with closing(apsw.Connection(str(path), vfs=checksum_vfs())) as connection:
        names = connection.execute("SELECT item_id FROM items").fetchall()
    assert {name for (name,) in names} == {"shared", "listed", "back"}
    await store.close()


@pytest.fixture
def backup(path: Path) -> bytes:
    """A backup of a store with 30 users."""

    async def make() -> None:
        store = SQLiteStore(path)
        for n in range(30):
            await store.append([Event(f"u{n}", "i") for _ in range(n + 1)])
        await store.close()

    asyncio.run(make())
    return path.read_bytes()


async def test_a_restored_backup_forgets_again(path: Path, backup: bytes) -> None:
    """After a backup is restored, the ledger of the lost store says who is to be forgotten."""
    store = SQLiteStore(path)
    for n in range(10):
        await store.forget(f"u{n}")
    await store.append([Event("u3", "later")])
    ledger, _ = await store.page_forgotten(limit=1000)
    assert [entry.events for entry in ledger] == list(range(1, 11))
    await store.close()
    path.write_bytes(backup)
    mark_path(path).unlink()
    store = SQLiteStore(path)
    assert await store.find_forgotten("u3") == []
    assert await store.forget_again(ledger) == (10, 55, 10)
    users, _ = await store.page_users()
    assert {user.user_id for user in users} == {f"u{n}" for n in range(10, 30)}
    await store.append([Event("u3", "later")])  # comes back
    assert await store.forget_again(ledger) == (0, 0, 0)
    assert len(await store.history("u3")) == 1
    entries = await store.find_forgotten("u3")
    assert ledger[3] in entries
    await store.close()
