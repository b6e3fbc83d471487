"""Durability: killed writers, power loss, full and failing disks."""

import asyncio
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import pytest

from service.domain.errors import Corrupt, StoreFull, Unavailable
from service.domain.records import Event
from service.stores.sqlite import database_file, writer
from service.stores.sqlite.store import SQLiteStore
from tests.support import doomed_writer
from tests.support.faulty_disk import FaultyDisk

pytestmark = pytest.mark.verify

KILLS = 60


def notes(journal: Path) -> tuple[dict[str, int], set[str]]:
    """Return the attempted batches with their sizes, and the acknowledged batches."""
    lines = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    tried = {line[1]: int(line[2]) for line in lines if line[0] == "try"}
    return tried, {line[1] for line in lines if line[0] == "ack"}


async def check(path: Path, journal: Path, case: str) -> int:
    """Assert acknowledged ⊆ stored ⊆ attempted, in whole batches; count the acknowledged."""
    tried, acked = notes(journal)
    store = SQLiteStore(path)
    stored = Counter(str(event.event_id).rpartition("-")[0] for event in store.scan_events())
    names = [event.event_id for event in store.scan_events()]
    assert len(set(names)) == len(names) == (await store.counts())["events"]
    assert acked <= stored.keys() <= tried.keys(), case
    assert all(tried[name] == size for name, size in stored.items()), case
    for number in range(doomed_writer.USERS):
        history = await store.history(f"u{number}")
        assert (history.timestamps[1:] >= history.timestamps[:-1]).all()
        assert len(set(history.seqs.tolist())) == len(history)
    await store.append([Event("after", "i")])  # it starts by itself, and goes on
    await store.forget("after")
    await store.close()
    return len(acked)


async def test_killed_writers_lose_nothing(tmp_path: Path) -> None:
    """Over 60 kills -9 at random moments, the first opening included, no acked event is lost."""
    seed = 2024
    rng = random.Random(seed)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.support.doomed_writer"])
    for kill in range(KILLS):
        # A new store now and then; the others carry their history of kills along.
        path, journal = (tmp_path / f"{kill // 6}{suffix}" for suffix in (".db", ".journal"))
        child = server.Process(target=doomed_writer.write, args=(path, journal, kill))
        child.start()
        if kill % 6:  # else while it makes the store
            before = journal.stat().st_size if journal.exists() else 0
            while child.is_alive() and (not journal.exists() or journal.stat().st_size == before):
                time.sleep(0.001)  # noqa: ASYNC251  # nothing else is to run here
        time.sleep(rng.uniform(0, 0.08))  # noqa: ASYNC251
        child.kill()
        child.join()
        child.close()
        acked = await check(path, journal, f"seed {seed}, kill {kill}")
    assert acked > 0


async def _power_cycles(disk: FaultyDisk, tmp_path: Path, cycles: int) -> int:
    """Write through `disk`, lose power, look; returns how many acknowledged events were lost."""
    rng = random.Random(2025)
    lost = 0
    store = SQLiteStore(tmp_path / "live" / "heed.db", vfs=disk.name)
    acked: set[str] = set()
    for cycle in range(cycles):
        names = [f"{cycle}-{n}" for n in range(rng.randint(1, 12))]
        waiting = [asyncio.ensure_future(store.append([Event("u", "i", name)])) for name in names]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        acked |= {n for n, w in zip(names, waiting, strict=True) if w.done()}
        image = tmp_path / f"image-{cycle}"
        disk.lose_power(image, rng)
        try:
            found = SQLiteStore(image / "heed.db")
            stored = {str(event.event_id) for event in found.scan_events()}
            assert stored <= acked | set(names)
            lost += len(acked - stored)
            await found.close()
        except Corrupt:
            lost += len(acked)
        await asyncio.gather(*waiting)
        acked |= set(names)
    await store.close()
    return lost


async def test_lost_power_loses_nothing(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No acknowledged event is lost when unsynced writes are lost."""
    monkeypatch.setattr(writer, "CHECKPOINT_PAGES", 30)  # so that power fails in checkpoints too
    assert await _power_cycles(disk, tmp_path, 60) == 0


async def test_synchronous_normal_loses_acknowledged_events(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = database_file.DatabaseFile.writer

    def normal(file: database_file.DatabaseFile) -> apsw.Connection:
        connection = full(file)
        connection.pragma("synchronous", "NORMAL")
        return connection

    monkeypatch.setattr(database_file.DatabaseFile, "writer", normal)
    assert await _power_cycles(disk, tmp_path, 10) > 0


async def test_64_writers_on_one_user(path: Path) -> None:
    """64 concurrent writers in two stores store each of 32,000 events once."""
    stores = [SQLiteStore(path), SQLiteStore(path)]

    async def write(number: int) -> None:
        for n in range(50):
            batch = [Event("u", f"i{n}", f"{number}-{n}-{k}") for k in range(10)]
            assert await stores[number % 2].append(batch) == (10, 0)

    await asyncio.gather(*(write(number) for number in range(64)))
    history = await stores[0].history("u")
    assert sorted(history.seqs.tolist()) == list(range(1, 32_001))
    names = await stores[1].event_ids("u", history.seqs.tolist(), history.timestamps.tolist())
    assert set(names) == {f"{w}-{n}-{k}" for w in range(64) for n in range(50) for k in range(10)}
    for store in stores:
        await store.close()


async def test_a_full_disk(path: Path, disk: FaultyDisk) -> None:
    """On a full disk writes raise StoreFull, reads go on, and writes recover with space."""
    store = SQLiteStore(path, vfs=disk.name)
    await store.append([Event("u", "i", "e0")])
    disk.full = True
    tasks = [store.append([Event("u", "new", f"e{n}")]) for n in range(1, 9)]
    answers: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreFull] * 8
    assert answers[0].retry_after > 0
    assert str(path) in answers[0].detail
    assert (await store.history("u")).item_ids == ["i"]
    assert await store.problem() is None
    disk.full = False
    assert await store.append([Event("u", "new", f"e{n}") for n in range(1, 5)]) == (4, 0)
    assert (await store.history("u")).item_ids == ["i", "new", "new", "new", "new"]
    await store.close()


async def test_a_disk_full_only_for_the_checkpoint(
    path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_PAGES", 1)
    measure = writer.Writer._measure_log

    def after_the_commit(
        self: writer.Writer, connection: apsw.Connection, name: str, pages: int
    ) -> int:
        disk.full = True
        return measure(self, connection, name, pages)

    monkeypatch.setattr(writer.Writer, "_measure_log", after_the_commit)
    store = SQLiteStore(path, vfs=disk.name)
    assert await store.append([Event("u", "i")]) == (1, 0)
    with pytest.raises(StoreFull):
        await store.append([Event("u", "j")])
    assert await store.problem() is None
    disk.full = False
    assert await store.append([Event("u", "k")]) == (1, 0)
    assert (await store.history("u")).item_ids == ["i", "k"]
    disk.full = False
    await store.close()


async def test_a_disk_that_cannot_sync(path: Path, disk: FaultyDisk) -> None:
    """After a failed sync every write is refused and health is false; reads go on."""
    store = SQLiteStore(path, vfs=disk.name)
    await store.append([Event("u", "i", "acked")])
    disk.sync_fails = True
    answers = await asyncio.gather(
        *(store.append([Event("u", "i")]) for _ in range(9)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [Unavailable] * 9
    disk.sync_fails = False  # the kernel reports an error once, and then pretends
    for _ in range(3):
        with pytest.raises(Unavailable):
            await store.append([Event("u", "i")])
        with pytest.raises(Unavailable):
            await store.forget("u")
    assert await store.problem() is not None
    assert [event.event_id for event in store.scan_events()] == ["acked"]
    await store.close()
    reopened = SQLiteStore(path)
    assert await reopened.problem() is None
    assert [event.event_id for event in reopened.scan_events()] == ["acked"]
    await reopened.close()
