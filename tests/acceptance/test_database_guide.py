"""The section about the database in docs/operate, run command by command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from service.domain.records import Event
from service.maintenance.copying import copy_store
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.shared_registry import KIND, SharedRegistry
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from tests.support.guided import BACKUPS, GuidedShell, read_blocks
from tests.support.postgres_programs import program
from tests.support.postgres_server import PostgresServer
from tests.support.tiny import World

SECTION = ("several-machines", "The database")


class Walked(NamedTuple):
    """The section, gone through to its end, with the service running."""

    shell: GuidedShell
    url: str
    moved: str  # the URL of the database at other servers
    forgotten: int  # events of the user who was forgotten after the backup


def ids(url: str) -> set[str]:
    """The ids of all stored events."""
    store = PostgresStore(url)
    try:
        return {event.event_id or "" for event in store.scan_events()}
    finally:
        asyncio.run(store.close())


@pytest.fixture(scope="module")
def walked(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    """Run all blocks in order; after the backup, one user is forgotten and an event written."""
    folder = tmp_path_factory.mktemp("database-guide")
    with PostgresServer() as server, PostgresServer() as other:
        url = server.create_database("heed")
        places = {
            "heed@db.example.org": f"postgres@127.0.0.1:{server.port}",
            "postgres@db.example.org": f"postgres@127.0.0.1:{server.port}",
            "heed@new.example.org": f"postgres@127.0.0.1:{other.port}",
            str(Path(BACKUPS).with_name("postgres")): str(folder / "base"),
        }
        tools = Path(program("pg_verifybackup")).parent
        shell = GuidedShell(folder, places, {"HEED_STORE": url}, tools=tools)
        (folder / "base").mkdir()
        world.copy(shell.data)
        asyncio.run(fill(shell.data, url, world))
        (unit,) = [each for each in read_blocks() if each.language == "ini"]
        shell.run(unit)
        forgotten = 0
        try:
            for block in read_blocks(SECTION):
                if block.section == "Restore it" and not forgotten:
                    forgotten = asyncio.run(forget(url))
                shell.run(block)
            yield Walked(shell, url, other.url("heed"), forgotten)
        finally:
            shell.stop()


async def fill(data: Path, url: str, world: World) -> None:
    """Move the world into the database."""
    source, target = SQLiteStore(data / STORE_FILE), PostgresStore(url)
    await copy_store(source, target, "the world")
    await source.close()
    (data / STORE_FILE).unlink()
    SharedRegistry(data / MODELS_FOLDER, target.shared.files(KIND)).activate(world.first)
    await target.close()


async def forget(url: str) -> int:
    """Forget a user and store an event, after the backup."""
    store = PostgresStore(url)
    await store.append([Event("u1", "space-00", "late")])
    events = await store.forget("u2")
    await store.close()
    return events


def test_the_restored_database_is_the_one_that_was_backed_up(walked: Walked) -> None:
    """It has the events of the backup but those of whom was forgotten since, and is served."""
    expected = {f"e{user}-{n}" for user in range(40) if user != 2 for n in range(12)}
    assert walked.forgotten == 12
    assert ids(walked.url) == expected
    assert ids(walked.moved) == expected


def test_what_the_section_writes(walked: Walked) -> None:
    """The doctor's findings, a backup, a ledger and a base backup are where it says."""
    findings = json.loads((walked.shell.folder / "doctor.json").read_text())
    assert {"no-fsync", "superuser"} <= {each["code"] for each in findings}
    assert (walked.shell.backups / "monday" / "backup.json").exists()
    assert (walked.shell.folder / "base" / "monday" / "backup_manifest").exists()
