"""Forged backups: whatever their files say, a restore stays in its directory or refuses them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from service.domain.errors import Corrupt, HeedError, Incompatible, Invalid
from service.domain.records import Event
from service.domain.settings import Settings
from service.maintenance.backup import back_up
from service.maintenance.backup_manifest import BACKUP_FILE
from service.maintenance.restore import drill, restore, restore_to_database
from service.runtime.data_layout import MODELS_FOLDER, NAMESPACES_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.version_files import seal, unseal
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore
from tests.support.command_line import Heed
from tests.support.stores import run_on

pytestmark = pytest.mark.verify

Body = dict[str, Any]
Trail = tuple[str | int, ...]

_watched: list[Path] = []  # a folder, while its uses are noted
_used: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event.startswith(("open", "os.", "shutil.")):
        for each in arguments:
            if isinstance(each, str | bytes | Path):
                path = os.path.normpath(Path.cwd() / os.fsdecode(each))
                if Path(path).is_relative_to(_watched[0]):
                    _used.append(f"{event} {path}")


@pytest.fixture
def watch() -> Iterator[Callable[[Path], None]]:
    """Function that has uses of a folder noted from now on."""
    if not getattr(_note, "is_installed", False):
        sys.addaudithook(_note)  # a hook cannot be removed
        _note.is_installed = True  # type: ignore[attr-defined]
    _used.clear()
    yield lambda folder: _watched.__setitem__(slice(None), [folder])
    _watched.clear()


@pytest.fixture
def backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backup of two namespaces with a model, a job and fitted parameters."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of restores
    data = tmp_path / "source"

    event = Event("mia", "soup", "e1", timestamp=5)
    for place in (data, data / NAMESPACES_FOLDER / "shop"):
        run_on(SQLiteStore(place / STORE_FILE), lambda store: store.append([event]))
    Registry(data / MODELS_FOLDER).publish({"weights": b"1"}, {"items": 1}, version="first")
    jobs = data / "jobs"
    jobs.mkdir(exist_ok=True)
    job = {"id": "20260101t000000-000000", "state": "running", "options": {}, "created": 1}
    (jobs / f"{job['id']}.json").write_text(json.dumps(job))
    back_up(data, tmp_path / "backup", settings={"encoder": "static", "embedding_dim": 256})
    return tmp_path / "backup"


def trails(value: object, trail: Trail = ()) -> Iterator[Trail]:
    """Ways to every field of a JSON value, and to every name of one."""
    if trail:
        yield trail
    if isinstance(value, dict):
        for name, each in value.items():
            yield from trails(each, (*trail, name))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from trails(each, (*trail, at))


def changed(body: Body, trail: Trail, hostile: object, *, name: bool) -> Body:
    """The value with another one at a field, or with the field under another name."""
    body = json.loads(json.dumps(body))
    at: Any = body
    for step in trail[:-1]:
        at = at[step]
    if not name:
        at[trail[-1]] = hostile
    elif isinstance(at, dict):
        at[str(hostile)] = at.pop(trail[-1])
    return body


def read(backup: Path) -> Body:
    """The manifest of a backup, without its seal."""
    return unseal((backup / BACKUP_FILE).read_bytes(), "it")


def put(backup: Path, body: Body) -> None:
    """Replace the manifest of a backup by a sealed one."""
    (backup / BACKUP_FILE).write_bytes(seal(body))


def put_file(backup: Path, place: str, content: bytes) -> None:
    """Replace the content of one file, in the objects and in the manifest."""
    body, digest = read(backup), hashlib.sha256(content).hexdigest()
    (backup / "objects" / digest).write_bytes(content)
    body["files"][place] = {"size": len(content), "sha256": digest}
    put(backup, body)


def canary(folder: Path) -> Path:
    """A folder with another installation, which no backup may touch."""
    shutil.rmtree(folder, ignore_errors=True)
    asyncio.run(SQLiteStore(folder / STORE_FILE).close())
    (folder / "note.txt").write_text("untouched")
    return folder


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """All entries of a folder, with what changes when they do."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ino)
        for path in sorted(folder.rglob("*"))
    }


def hostile_values(other: Path) -> list[object]:
    """Values that lead elsewhere, or that a program might not expect."""
    return [
        f"../{other.name}",
        f"../../{other.name}",
        str(other),
        f"{other}/{STORE_FILE}",
        "..",
        ".",
        "",
        "/dev/zero",
        "con/../..",
        "a\0b",
        "\ud800",
        "\x1b]0;x\a[red",
        "x" * 5_000,
        f"postgresql://{other}/x",
        -1,
        1 << 70,
        1.5,
        True,
        None,
        [],
        {"a": "../b"},
    ]


def forgeries(body: Body, other: Path) -> Iterator[Body]:
    """The value with a third of the hostile values at each field, other ones at the next."""
    values = hostile_values(other)
    for place, trail in enumerate(trails(body)):
        for hostile in values[place % 3 :: 3]:
            for name in (False, isinstance(hostile, str)):
                yield changed(body, trail, hostile, name=name)


def check_restore(backup: Path, data: Path, outside: Path) -> None:
    """Restore a forged backup: nothing outside of the directory may be used."""
    before = state(outside)
    _used.clear()

    def look(_: Path, folder: Path) -> None:
        assert folder.resolve().is_relative_to(data.resolve())
        assert (folder / STORE_FILE).is_file()

    refused: HeedError | None = None
    try:
        restore(backup, data, before_use=look)
    except HeedError as error:
        refused = error
    if refused is not None:
        assert refused.detail.isprintable(), refused.detail
        assert not data.exists() or not list(data.iterdir())
    assert not _used, _used[:3]
    assert state(outside) == before
    shutil.rmtree(data, ignore_errors=True)


def test_no_field_of_the_manifest_leads_out(
    backup: Path, tmp_path: Path, watch: Callable[[Path], None]
) -> None:
    """Every field and every name of `backup.json`, with hostile values, is refused or harmless."""
    box = tmp_path / "box"
    outside, data = canary(box / "canary"), box / "data"
    watch(outside)
    forged = list(forgeries(read(backup), outside))
    assert len(forged) > 200
    for body in forged:
        put(backup, body)
        check_restore(backup, data, outside)


@pytest.mark.parametrize("part", ["models/current", "manifest.json"])
def test_no_field_of_a_file_leads_out(
    backup: Path, tmp_path: Path, watch: Callable[[Path], None], part: str
) -> None:
    """So are the fields of the JSON files in a backup, sealed ones too."""
    box = tmp_path / "box"
    outside, data = canary(box / "canary"), box / "data"
    watch(outside)
    body = read(backup)
    place = next(place for place in body["files"] if part in place)
    content = (backup / "objects" / body["files"][place]["sha256"]).read_bytes()
    inner = json.loads(content)
    is_sealed = "sha256" in inner
    inner.pop("sha256", None)
    for forged in forgeries(inner, outside):
        written = seal(forged) if is_sealed else json.dumps(forged).encode()
        put_file(backup, place, written)
        check_restore(backup, data, outside)


def test_links_and_devices_in_a_backup_are_refused(backup: Path, tmp_path: Path) -> None:
    """An object, the folder of them or the manifest that is a link, a pipe or a folder."""
    outside = canary(tmp_path / "canary")
    before, data = state(outside), tmp_path / "data"
    body = read(backup)
    entry = body["files"][STORE_FILE]
    file = backup / "objects" / entry["sha256"]
    kept = file.read_bytes()
    shutil.copy(file, outside / "same.db")
    before = state(outside)
    for make in (
        lambda: file.symlink_to(outside / "same.db"),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(outside),
        lambda: os.mkfifo(file),
        file.mkdir,
    ):
        file.unlink()
        make()
        with pytest.raises(Corrupt, match="must be a regular file"):
            restore(backup, data)
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        file.write_bytes(kept)
    objects = (backup / "objects").rename(tmp_path / "elsewhere")
    (backup / "objects").symlink_to(objects)
    with pytest.raises(Corrupt, match="must be a folder, and no link"):
        restore(backup, data)
    with pytest.raises(Corrupt, match="must be a folder, and no link"):
        back_up(tmp_path / "source", backup, settings={})
    assert state(outside) == before
    assert file.resolve().read_bytes() == kept
    assert not data.exists()


@pytest.mark.parametrize(
    ("statement", "error", "sentence"),
    [
        ("CREATE TRIGGER t AFTER DELETE ON events BEGIN SELECT 1; END", Corrupt, "has 't'"),
        ("CREATE VIEW v AS SELECT 1", Corrupt, "has 'v'"),
        ("CREATE VIRTUAL TABLE w USING fts5(a)", Corrupt, "has 'w'"),
        (
            """CREATE VIRTUAL TABLE w USING fts5(a); PRAGMA writable_schema = ON;
            UPDATE sqlite_schema SET sql = 'create/**/ virtual table w using fts5(a)'
             WHERE name = 'w'""",
            Corrupt,
            "has 'w'",
        ),
        ("PRAGMA user_version = 5", Corrupt, "has schema version 5, not"),
        ("PRAGMA application_id = 7", Incompatible, "not one of Heed's"),
    ],
)
def test_a_forged_store_is_refused(
    backup: Path, tmp_path: Path, statement: str, error: type[HeedError], sentence: str
) -> None:
    """Contents that Heed would run or misread are found before anything is written."""
    path = tmp_path / "forged.db"
    shutil.copy(backup / "objects" / read(backup)["files"][STORE_FILE]["sha256"], path)
    connection = apsw.Connection(str(path), vfs=checksum_vfs())
    connection.execute(statement)
    connection.pragma("journal_mode", "DELETE")
    connection.close()
    put_file(backup, STORE_FILE, path.read_bytes())
    with pytest.raises(error, match=sentence):
        restore(backup, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [b"a\0b", b"\n" * 32, b"0" * 33, b"A" * 32, b"\xff" * 32])
def test_a_forged_id_of_a_namespace_is_refused(
    backup: Path, tmp_path: Path, content: bytes
) -> None:
    """A database would not take it, after it was marked as being restored."""
    place = f"{NAMESPACES_FOLDER}/shop/namespace.id"
    put_file(backup, place, b"0123456789abcdef" * 2)
    restore(backup, tmp_path / "whole")
    put_file(backup, place, b"")  # of a copy of a namespace that an earlier Heed has made
    restore(backup, tmp_path / "earlier")
    put_file(backup, place, content)
    with pytest.raises(Corrupt, match=r"shop: its namespace\.id holds no id"):
        restore(backup, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_ledger_is_applied_to_restored_stores_only(
    backup: Path, tmp_path: Path, heed: Heed
) -> None:
    """`--forget-ledger` of a forged backup opens no other store."""

    ledger, other = tmp_path / "ledger", tmp_path / "box" / "other"
    event = Event("mia", "soup", timestamp=5)
    run_on(SQLiteStore(other / STORE_FILE), lambda store: store.append([event]))
    run_on(
        SQLiteStore(ledger / STORE_FILE),
        lambda store: store.append([event]),
        lambda store: store.forget("mia"),
    )
    said = heed("forgotten", "list", "--json", tmp_path / "ledger.json", "--data", ledger)
    assert said.code == 0
    body = read(backup)
    body["namespaces"]["../../other"] = {**body["namespaces"]["shop"], "schema": 5}
    put(backup, body)
    data = tmp_path / "box" / "data"
    said = heed("restore", backup, "--data", data, "--forget-ledger", tmp_path / "ledger.json")
    assert said.code == 1
    assert "is no name" in said.err
    assert not data.exists()
    with pytest.raises(Corrupt, match="is no name"):  # before the database is looked for
        restore_to_database(backup, "postgresql://heed@127.0.0.1:1/none", data)
    connection = apsw.Connection(str(other / STORE_FILE), vfs=checksum_vfs())
    assert connection.execute("SELECT count(*) FROM events").get == 1
    connection.close()


def test_a_drill_opens_no_folder_that_a_backup_names(backup: Path, tmp_path: Path) -> None:
    """The text encoder in a folder is the operator's to name."""
    put(backup, {**read(backup), "settings": {"encoder": str(tmp_path / "model")}})
    with pytest.raises(Invalid, match="set HEED_ENCODER"):
        drill(backup, Settings(data=tmp_path / "none"), work=tmp_path)
