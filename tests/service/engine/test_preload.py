"""Data loaded before workers are forked, by the steps that SQLite takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from service.domain.records import Event, Item
from service.runtime.data_layout import STORE_FILE
from service.stores.sqlite.store import SQLiteStore

STEPS = """
import sys
from pathlib import Path
import apsw
from service.domain.settings import Settings
from service.engine.compose import preload

steps = 0
def count(statement):
    global steps
    steps += statement["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
def trace(connection):
    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
apsw.connection_hooks.append(trace)
preload(Settings.read({"data": Path(sys.argv[1]), "workers": 2}))
print(steps)
"""
ITEMS, USERS = 20, 3


def test_what_is_read_before_the_fork_does_not_grow_with_events(tmp_path: Path) -> None:
    """Loading takes the same steps in SQLite over a log of 100 events and over one of 4,000."""
    few, many = steps_of(tmp_path / "few", 100), steps_of(tmp_path / "many", 4_000)
    assert few > ITEMS
    assert many - few < 100


def steps_of(data: Path, events: int) -> int:
    """The steps of SQLite's virtual machine until all is loaded that workers share."""

    async def fill() -> None:
        store = SQLiteStore(data / STORE_FILE)
        await store.put_items([Item(f"item-{n}", title=f"quagga {n}") for n in range(ITEMS)])
        log = [
            Event(f"user-{n % USERS}", f"item-{n % ITEMS}", timestamp=n, event_id=str(n))
            for n in range(events)
        ]
        for begin in range(0, events, 100):
            await store.append(log[begin : begin + 100])
        await store.close()

    data.mkdir()
    asyncio.run(fill())
    command = [sys.executable, "-c", STEPS, str(data)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)
