"""Data directories of earlier versions open in this one, and those of newer ones are refused."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from models.recommender.artifact import TrainedModel
from service.domain.errors import Incompatible, StoreFull, Unavailable
from service.domain.records import Event
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.maintenance.backup import digest_file
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.version_files import MANIFEST, seal, unseal
from service.stores.sqlite import copies as kept_copies
from service.stores.sqlite import schema
from service.stores.sqlite.database_file import DatabaseFile, checksum_vfs
from service.stores.sqlite.schema import SCHEMA_VERSION
from service.stores.sqlite.store import SQLiteStore
from tests.support.old_stores import ADDED, to_version
from tests.support.server import Server
from tests.upgrades.make_fixture import DIGESTS, FOLDER

FIXTURES = sorted(path.name for path in FOLDER.glob("v*"))
# A fixture of version 5 without what later versions added stands for the versions before.
DERIVED = [("v5", version) for version in range(1, 5)]
TABLES = {1: {"events", "items", "users", "profiles"}, 4: {"scenarios"}, 2: {"imports"}}


def copy(fixture: str, data: Path) -> Path:
    """A fixture that a test may change."""
    return Path(shutil.copytree(FOLDER / fixture, data))


def rows(path: Path) -> tuple[int, list[Any]]:
    """Version and events of a store. Without the checksums, SQLite would spoil a log in closing."""
    connection: Any = apsw.Connection(str(path), vfs=checksum_vfs())
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        query = "SELECT user_no, timestamp, seq, item_no, event_id FROM events ORDER BY 1, 2, 3"
        return version, connection.execute(query).fetchall()
    finally:
        connection.close()


def open_store(path: Path) -> None:
    """Open a store, and close it."""
    asyncio.run(SQLiteStore(path).close())


def test_there_is_a_fixture_of_this_version() -> None:
    """Whoever changes the schema makes a fixture of it before the release."""
    assert f"v{SCHEMA_VERSION}" in FIXTURES
    assert max(ADDED) == SCHEMA_VERSION


@pytest.mark.parametrize("fixture", FIXTURES)
def test_every_release_opens(fixture: str, tmp_path: Path) -> None:
    """Records are as they were written, and the model is served."""
    data = copy(fixture, tmp_path / "data")
    expected = json.loads((data / DIGESTS).read_text())
    found = asyncio.run(digest_file(data / STORE_FILE))
    # A later version has digests of more tables.
    assert expected.items() <= {table: each._asdict() for table, each in found.items()}.items()

    async def recommend() -> str:
        engine = await open_engine(Settings(data=data))
        try:
            return engine.live.snapshot.version
        finally:
            await engine.close()

    registry = Registry(data / MODELS_FOLDER)
    current = registry.current()
    assert current is not None
    assert asyncio.run(recommend()) == current
    assert len(TrainedModel.from_files(registry.load(current)).item_ids) == 60


@pytest.mark.parametrize(("fixture", "version"), DERIVED)
def test_older_schemas_are_migrated(
    fixture: str, version: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All records come through, the store as it was is kept, and the log says so."""
    data = copy(fixture, tmp_path / "data")
    path = data / STORE_FILE
    to_version(path, version)
    before = rows(path)
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(digest_file(path))
    expected = json.loads((data / DIGESTS).read_text())
    for since, tables in TABLES.items():
        for table in tables if version >= since else ():
            assert found[table]._asdict() == expected[table], table
    assert f"from schema version {version} to {SCHEMA_VERSION}" in caplog.text
    kept = data / f"{STORE_FILE}.v{version}"
    assert str(kept) in caplog.text
    assert before[0] == version
    assert rows(kept) == before
    assert rows(path)[0] == SCHEMA_VERSION
    # The kept store is one that opens.
    kept.replace(tmp_path / STORE_FILE)
    open_store(tmp_path / STORE_FILE)


def test_a_migration_that_is_killed_leaves_the_earlier_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, between and after its steps, it has changed nothing; the next one succeeds."""
    path = copy("v5", tmp_path / "data") / STORE_FILE
    to_version(path, 1)
    before = rows(path)
    kills: list[tuple[Any, str]] = [
        (kept_copies, "copy_pages"),
        (schema, "_rename_imported_events"),
        (kept_copies, "sync_directory"),
    ]
    for module, name in kills:
        _open_killed(path, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL), module, name)
        assert rows(path) == before, name
    open_store(path)
    assert rows(path)[0] == SCHEMA_VERSION
    assert rows(path.with_name(f"{STORE_FILE}.v1")) == before


def test_without_room_for_a_copy_nothing_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how much room is needed, and the store stays as it is."""
    path = copy("v5", tmp_path / "data") / STORE_FILE
    to_version(path, 4)
    before = rows(path)
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=200_000)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(StoreFull, match=r"needs 0\.3 MB.*0\.2 MB free"):
            SQLiteStore(path)
    assert rows(path) == before
    open_store(path)


def test_newer_directories_are_refused(tmp_path: Path) -> None:
    """A store or a model of a newer Heed is named with its version, and stays as it is."""
    data = copy("v5", tmp_path / "data")
    connection = apsw.Connection(str(data / STORE_FILE), vfs=checksum_vfs())
    connection.pragma("user_version", SCHEMA_VERSION + 1)
    connection.close()
    before = rows(data / STORE_FILE)
    with pytest.raises(Incompatible, match=f"heed.db has schema version {SCHEMA_VERSION + 1}"):
        asyncio.run(open_engine(Settings(data=data)))
    assert rows(data / STORE_FILE) == before

    data = copy("v5", tmp_path / "other")
    registry = Registry(data / MODELS_FOLDER)
    version = registry.current()
    assert version is not None
    path = data / MODELS_FOLDER / "versions" / version / MANIFEST
    body = unseal(path.read_bytes(), MANIFEST)
    path.chmod(0o644)
    path.write_bytes(seal({**body, "format": 99}))
    with pytest.raises(Incompatible, match=f"{version}/{MANIFEST}: its format is 99"):
        registry.load(version)


def test_the_kept_store_goes_with_the_first_clean_stop(tmp_path: Path) -> None:
    """It survives a kill of the service, and is removed when the service was stopped in order."""
    data = copy("v5", tmp_path / "data")
    to_version(data / STORE_FILE, 4)
    kept = data / f"{STORE_FILE}.v4"
    with Server(data) as server:
        assert "migrated from schema version 4" in " ".join(server.log().split())
        server.kill()
    assert rows(kept)[0] == 4
    with Server(data):
        assert kept.exists()
    assert not kept.exists()
    assert rows(data / STORE_FILE)[0] == SCHEMA_VERSION


def test_a_process_beside_which_a_newer_heed_migrates_writes_no_more(tmp_path: Path) -> None:
    """Its rows would lack what the newer schema has: nothing is stored, and the answer says why."""
    path = tmp_path / "data" / STORE_FILE

    async def run() -> None:
        store = SQLiteStore(path)
        await store.append([Event("u", "i")])
        newer = apsw.Connection(str(path), vfs=checksum_vfs())
        newer.pragma("user_version", SCHEMA_VERSION + 1)
        newer.close()
        with pytest.raises(Unavailable, match=f"to schema version {SCHEMA_VERSION + 1}.*stop it"):
            await store.append([Event("u", "j")])
        assert "a newer Heed has migrated" in (await store.problem() or "")
        assert (await store.history("u")).item_ids == ["i"]
        await store.close()

    asyncio.run(run())
    assert len(rows(path)[1]) == 1


@pytest.mark.parametrize("version", [1, 5])
def test_a_migration_is_killed_at_each_statement(tmp_path: Path, version: int) -> None:
    """After each, the store is the earlier one or the migrated one, whole, and opens."""
    original = copy("v5", tmp_path / "original")
    to_version(original / STORE_FILE, version)
    before = rows(original / STORE_FILE)
    expected = asyncio.run(digest_file(copied(original, tmp_path / "sound") / STORE_FILE))
    statements, seen = 0, set()
    while True:
        statements += 1
        data = copied(original, tmp_path / "data")
        path = data / STORE_FILE
        child = os.fork()
        if not child:
            try:
                _kill_at(statements)
                SQLiteStore(path)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        found = rows(path)
        seen.add(found[0])
        assert found == before or found[0] == SCHEMA_VERSION, statements
        assert asyncio.run(digest_file(path)) == expected, statements
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert statements > 30
    assert seen == {version, SCHEMA_VERSION}


def copied(original: Path, data: Path) -> Path:
    """A new copy of a directory, in the place of an earlier one."""
    shutil.rmtree(data, ignore_errors=True)
    return Path(shutil.copytree(original, data))


def _kill_at(statement: int) -> None:
    """Have this process killed at a statement of SQLite, counted over all connections."""
    connect, left = DatabaseFile._connect, [statement]

    def trace(*_: Any) -> bool:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def traced(file: DatabaseFile, *args: Any) -> apsw.Connection:
        connection = connect(file, *args)
        connection.exec_trace = trace
        return connection

    DatabaseFile._connect = traced  # type: ignore[method-assign,assignment]


def _open_killed(path: Path, kill: Callable[..., None], module: Any, name: str) -> None:
    """Open a store in a process that kills itself where it would call a function."""
    child = os.fork()
    if not child:
        try:
            setattr(module, name, kill)
            SQLiteStore(path)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
