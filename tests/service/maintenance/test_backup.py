"""Backups: what is in them, when they are whole, and what a restore refuses."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from service.domain.errors import Corrupt, Incompatible, Invalid, NotFound
from service.domain.records import Event, User
from service.domain.settings import Settings
from service.maintenance.backup import back_up, digest_file
from service.maintenance.backup_manifest import BACKUP_FILE, read_backup_manifest
from service.maintenance.installation import read_metrics
from service.maintenance.restore import drill, restore, verify
from service.runtime.data_layout import (
    MODELS_FOLDER,
    NAMESPACES_FOLDER,
    STORE_FILE,
    UNFINISHED_RESTORE,
)
from service.snapshots.registry import Registry
from service.snapshots.version_files import seal, unseal
from service.stores.sqlite.store import SQLiteStore
from tests.support.command_line import Heed
from tests.support.heed_process import HeedProcess
from tests.support.old_stores import to_version
from tests.support.server import Server
from tests.support.stores import run_on
from tests.support.tiny import World

pytestmark = pytest.mark.verify

SETTINGS = {"encoder": "static", "embedding_dim": 256}


@pytest.fixture
def data(world: World, tmp_path: Path) -> Path:
    """A data directory with a second namespace, a scenario, a profile and a forgotten user."""
    data = world.copy(tmp_path / "data")
    run_on(
        SQLiteStore(data / STORE_FILE),
        lambda store: store.put_scenario("home", {"question": "popular"}),
        lambda store: store.put_user(User("u1", {"city": "Bonn"}, ("space",))),
        lambda store: store.forget("u39"),
    )
    append(data / NAMESPACES_FOLDER / "shop", Event("mia", "soup", "e1", timestamp=5))
    return data


def append(data: Path, *events: Event) -> None:
    run_on(SQLiteStore(data / STORE_FILE), lambda store: store.append(events))


def ids_of(path: Path) -> set[str]:
    """Event ids of a store, as another SQLite reads them."""
    with closing(sqlite3.connect(path)) as connection:
        return {row[0] for row in connection.execute("SELECT event_id FROM events")}


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of all files of a folder by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_restored_backup_has_everything(data: Path, world: World, tmp_path: Path) -> None:
    """Events, items, scenarios, profiles and models of all namespaces come back as they were."""
    manifest = back_up(data, tmp_path / "backup", settings=SETTINGS)
    restored = tmp_path / "restored"
    restore(tmp_path / "backup", restored)
    for name in (Path(), Path(NAMESPACES_FOLDER, "shop")):
        before, after = (
            asyncio.run(digest_file(each / name / STORE_FILE)) for each in (data, restored)
        )
        assert before == after
    assert ids_of(restored / STORE_FILE) == ids_of(data / STORE_FILE)
    registry = Registry(restored / MODELS_FOLDER)
    assert registry.current() == world.first == manifest.namespaces["default"].model
    assert registry.load(world.second) == Registry(data / MODELS_FOLDER).load(world.second)
    assert manifest.namespaces["shop"].digests is not None
    assert manifest.namespaces["shop"].digests["events"].records == 1
    assert manifest.settings == SETTINGS


def test_only_versions_of_models_are_read_only(tmp_path: Path) -> None:
    """Wherever the data directory lies, and whatever a namespace is called."""
    data, restored = tmp_path / "data", tmp_path / "models" / "versions" / "data"
    for folder in (data, data / NAMESPACES_FOLDER / "models"):
        asyncio.run(SQLiteStore(folder / STORE_FILE).close())
        Registry(folder / MODELS_FOLDER).publish({"weights": b"1"}, {"items": 1}, version="first")
        (folder / "jobs").mkdir(exist_ok=True)
        (folder / "jobs" / "one.json").write_text("{}")
    back_up(data, tmp_path / "backup", settings=SETTINGS)
    restore(tmp_path / "backup", restored)
    modes = {path: path.stat().st_mode & 0o777 for path in restored.rglob("*") if path.is_file()}
    read_only = {path for path, mode in modes.items() if mode == 0o400}
    assert {*modes.values()} == {0o400, 0o600}
    assert read_only == {path for path in modes if path.parent.name == "first"}


def test_a_backup_holds_only_what_is_needed_again(data: Path, tmp_path: Path) -> None:
    """Caches, locks and checkpoints are left out, and the store is not on disk twice."""
    (data / "cache").mkdir(exist_ok=True)
    (data / "cache" / "download").write_bytes(b"x")
    (data / "training.checkpoint").write_bytes(b"x")
    manifest = back_up(data, tmp_path / "backup", settings=SETTINGS)
    assert not [path for path in manifest.files if "cache" in path or "checkpoint" in path]
    assert not [path for path in manifest.files if path.endswith("lock")]
    objects = {path.name for path in (tmp_path / "backup" / "objects").iterdir()}
    assert objects == {digest for _, digest in manifest.files.values()}


def test_models_are_not_copied_twice(data: Path, tmp_path: Path) -> None:
    """A second backup into the same folder leaves the objects of models as they are."""
    target = tmp_path / "backup"
    first = back_up(data, target, settings=SETTINGS)
    weights = {
        name: (target / "objects" / digest).stat()
        for name, (_, digest) in first.files.items()
        if name.endswith(".safetensors")
    }
    assert weights
    append(data, Event("mia", "space-01", "new"))
    second = back_up(data, target, settings=SETTINGS)
    for name, status in weights.items():
        again = (target / "objects" / second.files[name][1]).stat()
        assert (again.st_ino, again.st_ctime_ns) == (status.st_ino, status.st_ctime_ns)
    # The store of the first backup is gone, with its events of people since forgotten.
    assert not (target / "objects" / first.files[STORE_FILE][1]).exists()
    restore(target, tmp_path / "restored")
    assert "new" in ids_of(tmp_path / "restored" / STORE_FILE)


def test_an_interrupted_backup_leaves_the_earlier_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the manifest is replaced, the folder is the earlier backup, or none."""
    target = tmp_path / "backup"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "shop: checking and hashing the store":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(data, target, settings=SETTINGS, progress=stop)
    with pytest.raises(NotFound, match="no complete backup"):
        verify(target)
    back_up(data, target, settings=SETTINGS)
    before = read_backup_manifest(target)
    append(data, Event("mia", "space-01", "new"))
    with pytest.raises(KeyboardInterrupt):
        back_up(data, target, settings=SETTINGS, progress=stop)
    assert verify(target) == before
    restore(target, tmp_path / "restored")
    assert "new" not in ids_of(tmp_path / "restored" / STORE_FILE)


def test_a_migration_is_not_forced_on_a_backup(data: Path, tmp_path: Path) -> None:
    """A store of an earlier schema is backed up as it is, and restored as it was."""
    to_version(data / STORE_FILE, 4)
    manifest = back_up(data, tmp_path / "backup", settings=SETTINGS)
    assert manifest.namespaces["default"].schema == 4
    restore(tmp_path / "backup", tmp_path / "restored")
    before, after = (
        asyncio.run(digest_file(each / STORE_FILE)) for each in (data, tmp_path / "restored")
    )
    assert before == after


def test_every_flipped_bit_is_found(data: Path, tmp_path: Path) -> None:
    """Damage of any file of a backup is named before anything is restored."""
    target = tmp_path / "backup"
    manifest = back_up(data, target, settings=SETTINGS)
    paths = [target / BACKUP_FILE]
    paths += [target / "objects" / digest for digest in {d for _, d in manifest.files.values()}]
    for path in paths:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(damaged) // 2] ^= 4
        path.unlink()  # it may be linked to a file of the data directory
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match=path.name):
            restore(target, tmp_path / "restored")
        assert not (tmp_path / "restored").exists()
        path.write_bytes(content)
    missing = paths[-1]
    missing.unlink()
    with pytest.raises(Corrupt, match="is missing"):
        restore(target, tmp_path / "restored")


def test_damage_of_the_store_is_not_backed_up(data: Path, tmp_path: Path) -> None:
    """A page that fails its checksum ends the backup, and the earlier one remains."""
    target = tmp_path / "backup"
    back_up(data, target, settings=SETTINGS)
    before = read_backup_manifest(target)
    with open(data / STORE_FILE, "r+b") as file:
        file.seek(5 * 4096 + 1000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Corrupt, match="is damaged"):
        back_up(data, target, settings=SETTINGS)
    assert verify(target) == before


def test_places_are_refused(data: Path, tmp_path: Path) -> None:
    """Neither command writes over anything, nor into the data directory."""
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "letter.txt").write_text("dear")
    for target in (strange, strange / "letter.txt", data / "backup", data, data.parent):
        with pytest.raises(Invalid):
            back_up(data, target, settings=SETTINGS)
    back_up(data, tmp_path / "backup", settings=SETTINGS)
    before = files_of(data)
    for place in (data, strange):
        with pytest.raises(Invalid, match="must be empty"):
            restore(tmp_path / "backup", place)
    assert files_of(data) == before
    with pytest.raises(NotFound, match="no store"):
        back_up(tmp_path / "nothing", tmp_path / "other", settings=SETTINGS)


def test_a_backup_of_a_newer_version_is_refused(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    back_up(data, target, settings=SETTINGS)
    body = unseal((target / BACKUP_FILE).read_bytes(), "it")
    spaces = body["namespaces"]
    newer = {**body, "namespaces": {**spaces, "default": {**spaces["default"], "schema": 99}}}
    (target / BACKUP_FILE).write_bytes(seal(newer))
    with pytest.raises(Incompatible, match="schema version 99"):
        restore(target, tmp_path / "restored")


def test_a_backup_with_digests_of_fewer_tables_is_restored(data: Path, tmp_path: Path) -> None:
    """An earlier Heed has digested fewer tables; those that it has are compared."""
    target = tmp_path / "backup"
    back_up(data, target, settings=SETTINGS)
    body = unseal((target / BACKUP_FILE).read_bytes(), "it")
    digests = body["namespaces"]["default"]["digests"]
    for table in ("deleted_scenarios", "keys", "forgotten"):
        del digests[table]
    (target / BACKUP_FILE).write_bytes(seal(body))
    restore(target, tmp_path / "restored")
    digests["events"]["digest"] = "0" * 32
    (target / BACKUP_FILE).write_bytes(seal(body))
    with pytest.raises(Corrupt, match="the content of default is not that of its manifest"):
        restore(target, tmp_path / "again")


def test_an_interrupted_restore_is_not_served(data: Path, tmp_path: Path, heed: Heed) -> None:
    """A restore that is killed leaves a directory that every command refuses to use."""
    back_up(data, tmp_path / "backup", settings=SETTINGS)
    restored = tmp_path / "restored"
    child = os.fork()
    if not child:
        try:
            restore(
                tmp_path / "backup",
                restored,
                before_use=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
            )
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (restored / UNFINISHED_RESTORE).exists()
    exported = heed("export", "users", tmp_path / "users.jsonl", "--data", restored)
    assert exported.code == 1
    assert "its restore was interrupted" in exported.err
    with pytest.raises(Corrupt, match="its restore was interrupted"):
        back_up(restored, tmp_path / "second", settings=SETTINGS)


def test_what_runs_before_use_sees_every_namespace(data: Path, tmp_path: Path) -> None:
    """The hook gets each restored directory, and what it raises leaves nothing behind."""
    back_up(data, tmp_path / "backup", settings=SETTINGS)
    seen: list[tuple[Path, Path]] = []
    one = tmp_path / "one"
    restore(tmp_path / "backup", one, before_use=lambda *places: seen.append(places))
    assert seen == [(one, one), (one, one / NAMESPACES_FOLDER / "shop")]

    def fail(*_: Path) -> None:
        raise Invalid("", "no")

    with pytest.raises(Invalid):
        restore(tmp_path / "backup", tmp_path / "two", before_use=fail)
    assert list((tmp_path / "two").iterdir()) == []


def test_a_drill_answers_and_leaves_nothing(data: Path, world: World, tmp_path: Path) -> None:
    """It restores, serves the model of the manifest, and removes what it made."""
    back_up(data, tmp_path / "backup", settings=SETTINGS)
    work = tmp_path / "work"
    work.mkdir()
    before = files_of(tmp_path / "backup")
    result = drill(tmp_path / "backup", Settings(data=data), work=work)
    assert result.answers["default"] == 10
    assert result.manifest.namespaces["default"].model == world.first
    assert list(work.iterdir()) == []
    assert files_of(tmp_path / "backup") == before


def test_a_backup_under_load_is_consistent(world: World, tmp_path: Path) -> None:
    """It has every batch that a server acknowledged before, and none by half."""
    data, target, restored = world.copy(tmp_path / "data"), tmp_path / "b", tmp_path / "restored"
    acknowledged: list[int] = []
    stop = threading.Event()

    def write(client: httpx.Client) -> None:
        batch = 0
        while not stop.is_set():
            events = [
                {"user_id": f"w{n}", "item_id": "space-01", "event_id": f"{batch}-{n}"}
                for n in range(7)
            ]
            client.post("/v1/events", json={"events": events}).raise_for_status()
            acknowledged.append(batch)
            batch += 1

    with Server(data) as server, server.client() as client:
        thread = threading.Thread(target=write, args=(client,))
        thread.start()
        try:
            while len(acknowledged) < 20:
                stop.wait(0.01)
            before = len(acknowledged)
            backup = HeedProcess("backup", target, "--data", data, log=tmp_path / "backup.log")
            code = backup.wait()
            after = len(acknowledged)
        finally:
            stop.set()
            thread.join()
    assert code == 0, backup.log()
    assert after > before, "nothing was written meanwhile"
    restoring = HeedProcess("restore", target, "--data", restored, log=tmp_path / "restore.log")
    assert restoring.wait() == 0, restoring.log()
    found = [name for name in ids_of(restored / STORE_FILE) if name[0].isdigit()]
    batches = {int(name.split("-")[0]) for name in found}
    assert batches >= set(range(before))
    assert batches == set(range(len(batches))), "a hole among the batches"
    assert len(found) == 7 * len(batches), "a torn batch"
    with Server(restored) as server, server.client() as client:
        answer = client.post("/v1/recommend", json={"user_id": "u1", "limit": 3}).json()
        assert answer["model_version"] == world.first
        assert len(answer["items"]) == 3
        metrics = read_metrics(Settings(port=int(server.url.rsplit(":", 1)[1])), {})
        assert metrics is not None
        assert metrics['heed_cache_misses_total{cache="history"}'] == 1


def test_pages_of_the_log_get_checksums(tmp_path: Path) -> None:
    """Pages that are only in the write-ahead log are intact in the copy of a large store."""
    data = tmp_path / "data"
    events = [
        Event(f"u{n % 997}", f"i{n % 501}", f"event-{n * 7919 % 40_000}", timestamp=n)
        for n in range(40_000)
    ]

    async def write_and_back_up() -> None:
        store = SQLiteStore(data / STORE_FILE)
        for start in range(0, len(events), 2_000):  # whose ids hit all pages of their index
            await store.append(events[start : start + 2_000])
        backing = HeedProcess(
            "backup", tmp_path / "backup", "--data", data, log=tmp_path / "backup.log"
        )
        assert await asyncio.to_thread(backing.wait) == 0, backing.log()
        await store.close()

    asyncio.run(write_and_back_up())
    restore(tmp_path / "backup", tmp_path / "restored")
    assert len(ids_of(tmp_path / "restored" / STORE_FILE)) == len(events)


def test_damaged_models_are_left_out(data: Path, world: World, tmp_path: Path) -> None:
    """The rest is backed up, with a reason, and the restored service has no model in use."""
    path = data / MODELS_FOLDER / "versions" / world.first / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
    manifest = back_up(data, tmp_path / "backup", settings=SETTINGS)
    assert manifest.namespaces["default"].model is None
    assert manifest.namespaces["default"].models == (world.second,)
    assert any(f"{world.first}/weights.safetensors" in reason for reason in manifest.left_out)
    restore(tmp_path / "backup", tmp_path / "restored")
    assert Registry(tmp_path / "restored" / MODELS_FOLDER).current() is None


def test_forgotten_users_do_not_come_back(data: Path, tmp_path: Path, heed: Heed) -> None:
    """A restore with the ledger of the replaced directory forgets who was forgotten since."""
    back_up(data, tmp_path / "backup", settings=SETTINGS)

    forgotten = run_on(SQLiteStore(data / STORE_FILE), lambda store: store.forget("u2"))
    assert forgotten[0] > 0
    restored = tmp_path / "restored"
    said = heed("restore", tmp_path / "backup", "--data", restored, "--forget-ledger", data)
    assert said.code == 0, said.err
    assert "1 users with" in said.out
    known, gone = run_on(
        SQLiteStore(restored / STORE_FILE),
        lambda store: store.get_user("u1"),
        lambda store: store.get_user("u2"),
    )
    assert known is not None
    assert gone is None
