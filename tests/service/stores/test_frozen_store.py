"""Stores on a disk that is full or read-only when they are opened."""

from pathlib import Path
from typing import Any

import pytest

from service.domain.errors import HeedError, StoreFull, StoreReadOnly
from service.domain.records import Event
from service.stores.sqlite import store as store_module
from service.stores.sqlite.database_file import DatabaseFile
from service.stores.sqlite.store import SQLiteStore


class Disk:
    """Raises `fault` where a store is opened for writing, while there is one."""

    def __init__(self) -> None:
        self.fault: HeedError | None = None

    def open(self, *arguments: Any) -> DatabaseFile:
        """Open a database file."""
        if self.fault is not None:
            raise self.fault
        return DatabaseFile(*arguments)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk with switchable faults, under all stores of the test."""
    disk = Disk()
    monkeypatch.setattr(store_module, "DatabaseFile", disk.open)
    monkeypatch.setattr(store_module, "REOPEN_INTERVAL", 0.0)
    return disk


@pytest.mark.parametrize("fault", [StoreFull("the disk is full"), StoreReadOnly("read-only")])
async def test_reads_go_on_and_writes_recover(path: Path, faults: Disk, fault: HeedError) -> None:
    """Reads are answered, writes and readiness say why not, and both recover without a restart."""
    store = SQLiteStore(path)
    await store.append([Event("u", f"i{n}") for n in range(5_000)])
    await store.close()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    faults.fault = fault
    store = SQLiteStore(path)
    assert len(await store.history("u")) == 5_000
    assert sum(map(len, store.scan())) == 5_000
    for _ in range(2):
        with pytest.raises(type(fault), match=fault.detail):
            await store.append([Event("u", "i")])
        assert await store.problem() == fault.detail
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    faults.fault = None
    assert await store.append([Event("u", "new")]) == (1, 0)
    assert (await store.history("u")).item_ids[-1] == "new"
    assert await store.problem() is None
    await store.close()


async def test_writes_of_another_process_are_read_at_once(path: Path, faults: Disk) -> None:
    """A store that could only be read follows another process that writes, or refuses to answer."""
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    await store.close()
    faults.fault = StoreFull("the disk is full")
    store = SQLiteStore(path)
    assert len(await store.history("u")) == 1
    faults.fault = None
    other = SQLiteStore(path)
    await other.append([Event("u", "j")])
    faults.fault = StoreFull("the disk is full")
    with pytest.raises(StoreFull):
        await store.history("u")
    faults.fault = None
    assert (await store.history("u")).item_ids == ["i", "j"]
    await store.close()
    await other.close()


async def test_without_a_readable_store_it_is_refused(path: Path, faults: Disk) -> None:
    """Where there is no store, or its log has changes, the fault is raised."""
    faults.fault = StoreFull("the disk is full")
    with pytest.raises(StoreFull):
        SQLiteStore(path)
    faults.fault = None
    store = SQLiteStore(path)
    await store.append([Event("u", "i")])
    faults.fault = StoreFull("the disk is full")
    with pytest.raises(StoreFull):
        SQLiteStore(path)
    await store.close()
