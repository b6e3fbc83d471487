"""Backups of a PostgreSQL database: of one moment, in the form of a directory's, and restored."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from service.domain.errors import Conflict, Corrupt, Incompatible, NotFound
from service.domain.records import Event, User
from service.domain.settings import Settings
from service.jobs.job import Job
from service.maintenance.backup import back_up, digest_file
from service.maintenance.backup_manifest import BackupManifest
from service.maintenance.restore import drill, restore, restore_to_database
from service.runtime.data_layout import (
    MODELS_FOLDER,
    NAMESPACES_FOLDER,
    SEARCH_FILE,
    STORE_FILE,
)
from service.snapshots.registry import Registry
from service.snapshots.shared_registry import KIND, SharedRegistry
from service.stores.base import Store
from service.stores.postgres.store import PostgresStore
from service.stores.sqlite.store import SQLiteStore
from service.stores.store_digest import digest_store
from tests.support import full_store
from tests.support.command_line import Heed
from tests.support.heed_process import HeedProcess
from tests.support.postgres_server import PostgresDatabases
from tests.support.stores import run_on
from tests.support.tiny import World

SETTINGS = {"encoder": "static", "embedding_dim": 256}
JOB = Job("20260101t120000-000000", "succeeded", {}, 1)


class Served(NamedTuple):
    """An installation: its database, and the directory of one of its machines."""

    url: str
    data: Path
    world: World

    def back_up(self, target: Path, **options: Any) -> BackupManifest:
        return back_up(self.data, target, settings=SETTINGS, store=self.url, **options)

    def restore(self, source: Path, url: str, **options: Any) -> BackupManifest:
        return restore_to_database(source, url, self.data.with_name("other"), **options)


@pytest.fixture
def served(world: World, postgres: PostgresDatabases, tmp_path: Path) -> Served:
    """Two namespaces with everything in them, two models, a job and fitted parameters."""
    url, data = postgres.create_database(), world.copy(tmp_path / "data")
    (data / STORE_FILE).unlink()
    (data / SEARCH_FILE).write_text("{}\n")

    async def fill() -> None:
        store = PostgresStore(url)
        await full_store.fill(store)
        for version in (world.second, world.first):
            SharedRegistry(data / MODELS_FOLDER, store.shared.files(KIND)).activate(version)
        store.shared.jobs.add(JOB.id, JOB.to_json(), 100)
        store.shared.jobs.write(JOB.id, JOB.to_json(), has_ended=True)
        await store.close()

    asyncio.run(fill())
    event = Event("mia", "soup", "e1", timestamp=5)
    run_on(PostgresStore(url, namespace="shop"), lambda store: store.append([event]))
    return Served(url, data, world)


def read(store: Store) -> Any:
    """Everything that users of a store can read, and its digests; the store is closed."""
    return tuple(run_on(store, full_store.read_all, digest_store))


def test_a_database_is_restored_into_another(
    served: Served, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """Records, models, jobs and fitted parameters of all namespaces come back as they were."""
    manifest = served.back_up(tmp_path / "backup")
    url = postgres.create_database()
    assert served.restore(tmp_path / "backup", url) == manifest
    for name in ("default", "shop"):
        before = read(PostgresStore(served.url, namespace=name))
        after = read(PostgresStore(url, namespace=name, create=False))
        assert after == before
        assert after[1] == manifest.namespaces[name].digests
    store = PostgresStore(url)
    files, jobs = store.shared.files(KIND), store.shared.jobs
    assert files.last_activation().name == served.world.first
    assert {each.name for each in files.sets()} == {served.world.first, served.world.second}
    fetched = SharedRegistry(tmp_path / "fetched", files)
    versions = Registry(served.data / MODELS_FOLDER)
    for version in (served.world.first, served.world.second):
        assert fetched.load(version) == versions.load(version)
    assert [row.document for row in jobs.latest(9)] == [JOB.to_json()]
    assert jobs.unfinished() == []
    asyncio.run(store.close())
    other = served.data.with_name("other")
    assert (other / SEARCH_FILE).read_text() == "{}\n"
    assert manifest.namespaces["default"].model == served.world.first
    assert manifest.settings == SETTINGS


def test_backups_go_from_either_kind_of_store_to_the_other(
    served: Served, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """A database's backup fills a directory, whose backup fills a database with the same."""
    manifest = served.back_up(tmp_path / "backup")
    folder = tmp_path / "folder"
    restore(tmp_path / "backup", folder)
    for name, path in (("default", folder), ("shop", folder / NAMESPACES_FOLDER / "shop")):
        assert asyncio.run(digest_file(path / STORE_FILE)) == manifest.namespaces[name].digests
    assert Registry(folder / MODELS_FOLDER).current() == served.world.first
    assert (folder / "jobs" / f"{JOB.id}.json").read_bytes() == JOB.to_json()
    back_up(folder, tmp_path / "second", settings=SETTINGS)
    url = postgres.create_database()
    served.restore(tmp_path / "second", url)
    assert read(PostgresStore(url)) == read(PostgresStore(served.url))


def test_a_backup_is_of_one_moment(
    served: Served, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """While writers go on in two namespaces, it has what was acknowledged, and no half of it."""
    acknowledged: list[int] = []
    stop = threading.Event()

    async def write() -> None:
        stores = [PostgresStore(served.url, namespace=name) for name in ("default", "shop")]
        batch = 0
        while not stop.is_set():
            events = [Event(f"w{n}", "item 1", f"batch-{batch}-{n}") for n in range(7)]
            for store in stores:  # one after the other
                await store.append(events)
            await stores[0].put_user(User("w0", {"batch": batch}))
            acknowledged.append(batch)
            if batch % 5 == 4:
                await stores[0].delete_event("user 0000", "e-first")
                await stores[0].append([Event("user 0000", "named first", "e-first")])
            batch += 1
        for store in stores:
            await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(write()))
    thread.start()
    try:
        while len(acknowledged) < 20:
            stop.wait(0.01)
        before = len(acknowledged)
        backup = HeedProcess(
            *("backup", tmp_path / "backup", "--data", served.data),
            log=tmp_path / "backup.log",
            environment={**os.environ, "HEED_STORE": served.url},
        )
        code = backup.wait()
        after = len(acknowledged)
    finally:
        stop.set()
        thread.join()
    assert code == 0, backup.log()
    assert after > before, "nothing was written meanwhile"
    url = postgres.create_database()
    manifest = served.restore(tmp_path / "backup", url)
    found: dict[str, int] = {}
    for name in ("default", "shop"):
        stored, digests = read(PostgresStore(url, namespace=name))
        assert digests == manifest.namespaces[name].digests
        ids = [each.event_id for each in stored["events"] if each.event_id.startswith("batch-")]
        batches = {int(each.split("-")[1]) for each in ids}
        assert batches >= set(range(before))
        assert batches == set(range(len(batches))), "a hole among the batches"
        assert len(ids) == 7 * len(batches), "a torn batch"
        found[name] = len(batches)
    # Each batch was written to `shop` after it was acknowledged in `default`, by one writer.
    assert found["shop"] <= found["default"] <= found["shop"] + 1


def test_models_are_not_read_twice(served: Served, tmp_path: Path) -> None:
    """A second backup into the same folder leaves the objects of models as they are."""
    target = tmp_path / "backup"
    first = served.back_up(target)
    weights = {
        name: (target / "objects" / digest).stat()
        for name, (_, digest) in first.files.items()
        if name.endswith(".safetensors")
    }
    assert weights
    second = served.back_up(target)
    for name, status in weights.items():
        again = (target / "objects" / second.files[name][1]).stat()
        assert (again.st_ino, again.st_ctime_ns) == (status.st_ino, status.st_ctime_ns)
    assert {path.name for path in target.iterdir()} == {"backup.json", "lock", "objects"}


def test_a_damaged_model_is_left_out(served: Served, tmp_path: Path) -> None:
    """One flipped bit in a chunk: the rest is backed up, with the reason."""
    _execute(
        served.url,
        "UPDATE heed.file_chunks SET data = set_byte(data, 0, get_byte(data, 0) # 1)"
        " WHERE (set_no, chunk_no) IN (SELECT set_no, 0 FROM heed.file_sets WHERE name = %s)",
        served.world.first,
    )
    manifest = served.back_up(tmp_path / "backup")
    assert manifest.namespaces["default"].model is None
    assert manifest.namespaces["default"].models == (served.world.second,)
    assert any(served.world.first in reason for reason in manifest.left_out)
    assert drill(tmp_path / "backup", Settings(data=served.data)).answers["shop"] >= 0


def test_a_database_of_another_schema_is_not_backed_up(
    served: Served, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """Nor is it migrated; and an empty database has nothing to back up."""
    _execute(served.url, "DELETE FROM heed.migrations WHERE number > 3")
    with pytest.raises(Incompatible, match="version 3 of Heed's schema"):
        served.back_up(tmp_path / "backup")
    with pytest.raises(NotFound, match="nothing of Heed"):
        served._replace(url=postgres.create_database()).back_up(tmp_path / "backup")
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_a_database_with_anything_in_it_is_refused(
    served: Served, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """It is left as it is; one that was only opened before is empty."""
    served.back_up(tmp_path / "backup")
    before = read(PostgresStore(served.url))
    with pytest.raises(Conflict, match="is not empty"):
        served.restore(tmp_path / "backup", served.url)
    assert read(PostgresStore(served.url)) == before
    opened = postgres.create_database()
    asyncio.run(PostgresStore(opened).close())
    served.restore(tmp_path / "backup", opened)
    assert read(PostgresStore(opened)) == before


def test_an_interrupted_restore_is_not_served_and_goes_on(
    served: Served,
    postgres: PostgresDatabases,
    tmp_path: Path,
    heed: Heed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed on the way, it leaves a database that all refuse, but the same restore."""
    served.back_up(tmp_path / "backup")
    url = postgres.create_database()
    child = os.fork()
    if not child:
        try:
            served.restore(tmp_path / "backup", url, progress=_die_at("default: publishing"))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with pytest.raises(Corrupt, match="its restore was interrupted"):
        PostgresStore(url)
    monkeypatch.setenv("HEED_STORE", url)
    said = heed("keys", "list")
    assert said.code == 1
    assert "its restore was interrupted" in said.err
    back_up(tmp_path / "data", tmp_path / "later", settings=SETTINGS, store=served.url)
    with pytest.raises(Corrupt, match="its restore was interrupted"):
        served.restore(tmp_path / "later", url)
    served.restore(tmp_path / "backup", url)
    assert read(PostgresStore(url)) == read(PostgresStore(served.url))


def _die_at(stage: str) -> Any:
    def progress(name: str, _done: int, _total: int) -> None:
        if name.startswith(stage):
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def test_the_commands(
    served: Served,
    postgres: PostgresDatabases,
    tmp_path: Path,
    heed: Heed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backup, drill, and a restore that forgets again who was forgotten since."""
    monkeypatch.setenv("HEED_STORE", served.url)
    target, ledger = tmp_path / "backup", tmp_path / "forgotten.json"
    said = heed("backup", target)
    assert said.code == 0, said.err
    assert "shop: 1 events" in said.out
    said = heed("restore", target, "--drill", "--work", tmp_path)
    assert said.code == 0, said.err
    assert "default: a question was answered with" in said.out

    assert run_on(PostgresStore(served.url), lambda store: store.forget("user 0011"))[0] > 0
    assert heed("forgotten", "list", "--json", ledger).code == 0
    assert len(json.loads(ledger.read_text())) > 1
    assert heed("forgotten", "verify", "user 0011").code == 0
    assert heed("restore", target).code == 1, "the database is not empty"
    url = postgres.create_database()
    monkeypatch.setenv("HEED_STORE", url)
    said = heed("restore", target, "--forget-ledger", ledger)
    assert said.code == 0, said.err
    assert "1 users with" in said.out
    assert "postgres@" not in said.out
    assert heed("forgotten", "verify", "user 0011").code == 0
    stored, _ = read(PostgresStore(url))
    assert "user 0011" not in stored["users"]
    assert "user 0012" in stored["users"]
    assert len(stored["keys"]) == 3
    assert heed("keys", "list").code == 0
    said = heed("namespaces", "list")
    assert "shop" in said.out


def test_a_ledger_of_a_directory_is_read_beside_a_database(
    served: Served, tmp_path: Path, heed: Heed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger that is named is applied, whatever HEED_STORE says."""
    folder = tmp_path / "old"
    run_on(
        SQLiteStore(folder / STORE_FILE),
        lambda store: store.append([Event("user 0012", "i")]),
        lambda store: store.forget("user 0012"),
    )
    monkeypatch.setenv("HEED_STORE", served.url)
    said = heed("forgotten", "apply", folder)
    assert said.code == 0, said.err
    assert said.out.startswith("1 users with")


def _execute(url: str, statement: str, *values: object) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode(), values)
