"""The SQLite store: the store contract, group commit and several processes."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import numpy as np
import pytest

from service.domain.errors import Conflict, HeedError, Overloaded, Unavailable
from service.domain.keys import issue_key
from service.domain.records import Event, Item
from service.stores.quota import StoreQuota
from service.stores.sqlite import database_file, writer
from service.stores.sqlite.events import scan
from service.stores.sqlite.store import SQLiteStore
from service.stores.sqlite.transaction import SQLiteTransaction
from service.stores.values import Shard
from tests.support.faulty_disk import FaultyDisk
from tests.support.old_stores import to_version
from tests.support.store_contract import Connect, Limited, StoreContract


class TestSQLiteStore(StoreContract):
    """The store contract on a SQLite file."""

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        return lambda: SQLiteStore(tmp_path / "data" / "heed.db")

    @pytest.fixture
    async def limited(self, tmp_path: Path) -> AsyncIterator[Limited]:
        made: list[SQLiteStore] = []

        def connect(quota: StoreQuota) -> SQLiteStore:
            made.append(SQLiteStore(tmp_path / "data" / "heed.db", quota=quota))
            return made[-1]

        yield connect
        for store in made:
            await store.close()


def locked(path: Path) -> apsw.Connection:
    """Another process's transaction that keeps the store from writing."""
    connection = apsw.Connection(str(path), vfs=database_file.checksum_vfs())
    connection.execute("BEGIN IMMEDIATE")
    return connection


def files(path: Path) -> dict[str, int]:
    """The sizes of the store's files."""
    return {file.name: file.stat().st_size for file in path.parent.iterdir()}


# ------------------------------------------------------------------------------ group commit


async def test_a_commit_is_synced_before_it_is_acknowledged(path: Path, disk: FaultyDisk) -> None:
    store = SQLiteStore(path, vfs=disk.name)
    before = disk.syncs
    for n in range(10):
        await store.append([Event("u", "i")])
        assert disk.syncs > before + n
    before = disk.syncs
    await asyncio.gather(*(store.append([Event("u", "i")]) for _ in range(500)))
    assert before < disk.syncs < before + 100
    await store.close()


async def test_a_conflict_undoes_itself_alone(path: Path) -> None:
    """Of batches in one commit only the conflicting ones are rolled back."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i", "taken")])
    holder = locked(path)  # while it holds the lock, all that follow gather
    batches = [
        [Event("a", "new1", "1")],
        [Event("b", "new2", "2"), Event("b", "other", "taken")],
        [Event("c", "new2", "3")],
        [Event("d", "new3", "3")],  # in conflict with the one before it in the same commit
        [Event("b", "new3", "2")],
    ]
    tasks = [asyncio.ensure_future(store.append(batch)) for batch in batches]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    holder.execute("COMMIT")
    holder.close()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers[1:4:2]] == [Conflict, Conflict]
    assert answers[::2] == [(1, 0)] * 3
    assert {event.event_id: event.item_id for event in store.scan_events()} == {
        "taken": "i",
        "1": "new1",
        "2": "new3",
        "3": "new2",
    }
    assert await store.counts() == {"users": 4, "items": 0, "events": 4}
    await store.close()


async def test_a_job_that_fails_fails_alone(path: Path) -> None:
    """A job that raises fails alone, is rolled back, and the writer goes on."""
    store = SQLiteStore(path)

    def job(transaction: SQLiteTransaction) -> None:
        transaction.connection.execute("UPDATE state SET events = 99")
        transaction.item_numbers(["name that is undone"])
        raise ZeroDivisionError

    def statement(transaction: SQLiteTransaction) -> None:
        transaction.connection.execute(
            "INSERT INTO state (only, clock, catalogue, users, items, events)"
            " VALUES (2, 0, 0, 0, 0, 0)"
        )

    first = store._writer.submit(job)
    second = store._writer.submit(statement)
    assert await store.append([Event("u", "i")]) == (1, 0)
    with pytest.raises(ZeroDivisionError):
        await first
    with pytest.raises(apsw.ConstraintError):
        await second
    assert (await store.counts())["events"] == 1
    await store.append([Event("v", "name that is undone")])
    assert (await store.history("v")).item_ids == ["name that is undone"]
    assert await store.problem() is None
    await store.close()


async def test_cancelled_write_is_not_executed(path: Path) -> None:
    """An append cancelled while it waits behind another is dropped."""
    store = SQLiteStore(path)
    holder = locked(path)
    first = asyncio.ensure_future(store.append([Event("u", "i")]))
    while store._writer._waiting:  # noqa: ASYNC110  # the writer that takes it sets no event
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(store.append([Event("v", "i")]))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    holder.close()
    assert await first == (1, 0)
    await store.append([Event("w", "i")])
    assert [event.user_id for event in store.scan_events()] == ["u", "w"]
    await store.close()


async def test_nothing_is_left_of_the_forgotten(path: Path) -> None:
    """After deletion no table has a row of the user."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i", f"e{n}", key=np.ones(3, np.float32)) for n in range(9)])
    await store.append([Event("v", "i", "other", key=np.ones(3, np.float32))])
    await store.delete_event("u", "e3")
    await store.merge("w", "u")
    await store.forget("w")
    await store.close()
    reader = sqlite3.connect(path)
    for table in ("events", "vectors", "users"):
        assert reader.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,), table
    reader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # meant
async def test_failed_writer_ends_every_waiting_call(path: Path) -> None:
    store = SQLiteStore(path)
    holder = locked(path)

    def job(transaction: SQLiteTransaction) -> None:
        raise SystemExit

    first = asyncio.ensure_future(store.append([Event("u", "i")]))
    await asyncio.sleep(0)
    fatal = store._writer.submit(job, writer.MAX_GROUP_ROWS)
    last = asyncio.ensure_future(store.append([Event("u", "i")]))
    await asyncio.sleep(0)
    holder.close()
    answers = await asyncio.gather(first, fatal, last, return_exceptions=True)
    assert [type(answer) for answer in answers[1:]] == [Unavailable] * 2
    with pytest.raises(Unavailable):
        await store.append([Event("u", "i")])
    assert await store.problem() is not None
    assert len(await store.history("u")) == (answers[0] == (1, 0))
    await store.close()


async def test_too_much_waiting_is_refused_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the write queue is full, an append raises Overloaded."""
    monkeypatch.setattr(writer, "MAX_QUEUED_ROWS", 50)
    store = SQLiteStore(path)
    holder = locked(path)
    tasks = [asyncio.ensure_future(store.append([Event("u", "i")] * 10)) for _ in range(20)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) >= 10  # 5 wait, and one group of 5 was taken at most
    holder.close()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(answer) for answer in answers if isinstance(answer, HeedError)} == {Overloaded}
    stored = sum(answer == (10, 0) for answer in answers)
    assert len(await store.history("u")) == 10 * stored > 0
    await store.append([Event("u", "i")] * 100)  # a batch beyond the limit, with nobody waiting
    await store.close()


async def test_another_process_that_keeps_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process holds the lock, writes time out and reads go on."""
    monkeypatch.setattr(database_file, "WRITE_TIMEOUT_MS", 50)
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    holder = locked(path)
    with pytest.raises(Unavailable, match="locked"):
        await store.append([Event("u", "j")])
    assert (await store.history("u")).item_ids == ["i"]
    assert await store.problem() is None
    holder.close()
    await store.append([Event("u", "k")])
    assert (await store.history("u")).item_ids == ["i", "k"]
    await store.close()


async def test_checkpoints_bound_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints bound the write-ahead log, and closing removes it."""
    monkeypatch.setattr(writer, "CHECKPOINT_PAGES", 50)
    store = SQLiteStore(path)
    for _ in range(100):
        await store.append([Event("u", "i") for _ in range(50)])
        await store.history("u")
    assert files(path)["heed.db-wal"] < 200 * 4096
    await store.close()
    assert files(path).keys() == {"heed.db", "heed.db-mark"}
    assert sqlite3.connect(path).execute("SELECT count(*) FROM events").fetchone() == (5000,)


async def test_reads_from_any_thread(path: Path) -> None:
    """Threads with their own event loops read and write one store."""
    store = SQLiteStore(path)

    def work(name: str) -> int:
        async def both() -> int:
            for n in range(20):
                await store.append([Event("u", f"{name}{n}")])
            return len(await store.history(name)) + len(await store.history("u"))

        return asyncio.run(both())

    seen = await asyncio.gather(*(asyncio.to_thread(work, f"t{n}") for n in range(4)))
    assert max(seen) == len(await store.history("u")) == 80
    await store.close()


async def test_long_histories_are_read_off_the_loop(path: Path) -> None:
    """A long history is read without blocking the event loop."""
    store = SQLiteStore(path)
    await store.append([Event("u", f"i{n}", timestamp=n) for n in range(20_000)])
    reading = asyncio.ensure_future(store.history("u"))
    await asyncio.sleep(0)
    assert not reading.done()
    history = await reading
    assert history.item_ids == [f"i{n}" for n in range(20_000)]
    await store.close()


async def test_the_writer_thread_leaves_the_processor_to_answers(path: Path) -> None:
    """The thread that writes has a higher niceness than the process; this thread keeps its own."""
    own, before = os.getpriority(os.PRIO_PROCESS, 0), set(threading.enumerate())
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    started = set(threading.enumerate()) - before
    (thread,) = (each for each in started if each.name == "heed-store-writer")
    assert thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == min(19, own + writer.NICENESS) > own
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    await store.close()


# ------------------------------------------------------------------------------ several processes

WRITE = """
import asyncio, sys
from service.domain.records import Event
from service.stores.sqlite.events import scan
from service.stores.sqlite.store import SQLiteStore

async def main(path, name):
    store = SQLiteStore(path)
    for n in range(20):
        await store.append([Event("u", f"i{n % 7}", f"{name}-{n}-{k}") for k in range(5)])
    assert "torch" not in sys.modules and "faiss" not in sys.modules
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_share_a_new_store(path: Path) -> None:
    """Processes that create and write one store concurrently store every event once."""
    run = asyncio.create_subprocess_exec
    children = [
        await run(sys.executable, "-c", WRITE, path, str(n), stderr=subprocess.PIPE)
        for n in range(3)
    ]
    for child in children:
        _, errors = await child.communicate()
        assert (errors, child.returncode) == (b"", 0)
    store = SQLiteStore(path)
    names = sorted(str(event.event_id) for event in store.scan_events())
    assert names == sorted(f"{p}-{n}-{k}" for p in range(3) for n in range(20) for k in range(5))
    assert sorted((await store.history("u")).seqs.tolist()) == list(range(1, 301))
    await store.close()


async def test_stores_of_version_3_get_scenarios(tmp_path: Path) -> None:
    """A store from before there were scenarios keeps what it holds, and takes scenarios."""
    path = tmp_path / "heed.db"
    store = SQLiteStore(path)
    await store.put_items([Item("a")])
    await store.close()
    to_version(path, 3)
    store = SQLiteStore(path)
    stored = await store.put_scenario("home", {"question": "popular"})
    assert await store.scenario("home") == stored
    assert await store.get_items(["a"]) == [Item("a")]
    await store.close()


async def test_stores_of_version_5_get_keys(tmp_path: Path) -> None:
    """A store from before there were keys keeps what it holds, has no key, and takes one."""
    path = tmp_path / "heed.db"
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    await store.close()
    to_version(path, 5)
    store = SQLiteStore(path)
    assert (await store.keys(), await store.keys_version()) == ([], 0)
    key, _ = issue_key("shop", frozenset({"read"}), 1)
    await store.add_key(key)
    assert await store.keys() == [key]
    assert len(await store.history("u")) == 1
    await store.close()


async def test_a_store_of_the_fifth_version_gets_counts_of_its_events(tmp_path: Path) -> None:
    """A store from before popularity was stored has the same counts, and goes on counting."""
    path = tmp_path / "heed.db"
    store = SQLiteStore(path)
    await store.append([Event("u", "a"), Event("v", "a"), Event("u", "b", "1", "return")])
    before = await store.popularity()
    await store.close()
    to_version(path, 5)
    store = SQLiteStore(path)
    ids, counts = await store.popularity()
    assert (ids, counts.tolist()) == (before[0], before[1].tolist()) == (["a", "b"], [2, 0])
    await store.delete_event("u", "1")
    await store.append([Event("w", "c")])
    ids, counts = await store.popularity()
    assert (ids, counts.tolist()) == (["a", "c"], [2, 1])
    await store.close()


async def test_a_scan_of_a_shard_steps_over_no_other_event(tmp_path: Path) -> None:
    """SQLite steps through the users, and then through the events of the shard's users alone."""
    store = SQLiteStore(tmp_path / "heed.db")
    await store.append([Event(f"u{n % 40}", "i") for n in range(4_000)])
    await store.close()
    counted: list[dict[str, int]] = []
    rows = 0

    def row(_cursor: apsw.Cursor, values: tuple[object, ...]) -> tuple[object, ...]:
        nonlocal rows
        rows += len(values) == 5  # the columns of an event
        return values

    connection = apsw.Connection(str(tmp_path / "heed.db"), vfs=database_file.checksum_vfs())
    connection.trace_v2(
        apsw.SQLITE_TRACE_PROFILE, lambda traced: counted.append(traced["stmt_status"])
    )
    connection.row_trace = row
    read = sum(len(part) for part in scan(connection, 100, Shard(1, 3)))
    connection.close()
    assert 0 < read == rows < 4_000
    assert sum(status["SQLITE_STMTSTATUS_SORT"] for status in counted) == 0
    assert sum(status["SQLITE_STMTSTATUS_FULLSCAN_STEP"] for status in counted) < 40
