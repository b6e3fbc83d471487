"""The registry of model versions: integrity, names, pruning and concurrent use."""

import contextlib
import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.domain.errors import (
    Conflict,
    Corrupt,
    Incompatible,
    Invalid,
    NotFound,
    StoreFull,
    Unavailable,
)
from service.domain.names import is_name, timestamped_name
from service.runtime import durable_files
from service.snapshots import version_files
from service.snapshots.registry import Registry

REPOSITORY = Path(__file__).parents[3]
FILES = {
    "model.safetensors": random.Random(1).randbytes(5000),
    "index-0.bin": random.Random(2).randbytes(300),
    "empty": b"",
}
METADATA: dict[str, Any] = {"dims": 64, "items": 3416, "metrics": {"hr": 0.29, "note": "é"}}
BAD_NAMES = [
    "",
    ".",
    "..",
    "../other/versions/secret",
    "../../other/versions/secret",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a.b",
    "A",
    "-a",
    "_a",
    "a\n",
    "a\0",
    "é",
    "\u0661",
    "\ud800",
    "a" * 65,
]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    # Durability is the matter of test_registry_crash; here it would only cost time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "models")


def staged(registry: Registry) -> list[Path]:
    return list((registry._root / "staging").iterdir())


def load_current(registry: Registry) -> dict[str, bytearray]:
    """The files of the version that is current."""
    return registry.load(registry.current() or "")


def test_published_bytes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published version loads with the same files and metadata, in another registry too."""
    monkeypatch.setattr("service.snapshots.registry.now", lambda: 5)
    registry = Registry(tmp_path)
    version = registry.publish(FILES, METADATA, version="v1")
    assert version == "v1"
    assert Registry(tmp_path).current() == "v1"
    assert Registry(tmp_path).load("v1") == registry.load("v1") == FILES
    (entry,) = registry.versions()
    assert (entry.version, entry.current, entry.broken, entry.created) == ("v1", True, None, 5)
    assert (entry.size, entry.metadata) == (5300, METADATA)
    assert staged(registry) == []


def test_nothing_is_active_at_first(registry: Registry) -> None:
    """An empty registry has no current version, no token and nothing to load."""
    assert registry.current() is None
    assert registry.current_token() is None
    assert registry.versions() == []
    registry.publish(FILES, {}, version="v1", activate=False)
    assert registry.current() is None
    with pytest.raises(NotFound, match="v2"):
        registry.load("v2")
    with pytest.raises(NotFound, match="v2"):
        registry.activate("v2")


def test_generated_names_sort_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names made of a time are valid, sort as the times do, and never collide."""
    times = sorted(random.Random(3).sample(range(10**15, 2 * 10**15), 200))
    names = [timestamped_name(time) for time in times]
    assert names == sorted(names)
    assert all(is_name(name) for name in names)
    assert timestamped_name(1_767_268_800_000_000) == "20260101t120000-000000"
    monkeypatch.setattr("service.snapshots.registry.now", lambda: 1_767_268_800_000_000)
    registry = Registry(tmp_path)
    published = [registry.publish(FILES, {}) for _ in range(3)]
    assert published == [f"20260101t120000-00000{n}" for n in range(3)]


def test_the_newest_version_is_the_last_published_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are listed and pruned in the order of publication, whatever the clock shows."""
    noon = 1_767_268_800_000_000
    times = iter([noon, noon + 5, noon - 86_400_000_000, noon - 3_600_000_000])
    monkeypatch.setattr("service.snapshots.registry.now", lambda: next(times))
    registry = Registry(tmp_path)
    published = [registry.publish(FILES, {}, activate=False) for _ in range(4)]
    assert [entry.version for entry in registry.versions()] == published == sorted(published)
    assert registry.prune(1) == published[:3]


def test_versions_are_never_rewritten(registry: Registry) -> None:
    """A second publication under one name is a conflict and changes nothing, broken or not."""
    registry.publish(FILES, METADATA, version="v1")
    with pytest.raises(Conflict, match="v1"):
        registry.publish({"other": b"x"}, {}, version="v1")
    assert registry.load("v1") == FILES
    (registry._root / "versions/v2").mkdir()
    with pytest.raises(Conflict, match="v2"):
        registry.publish(FILES, {}, version="v2")
    assert registry.current() == "v1"


def test_activation_verifies_first(registry: Registry) -> None:
    """Activation refuses a damaged version and leaves the pointer unchanged."""
    registry.publish(FILES, {}, version="v1")
    registry.publish(FILES, {}, version="v2")
    registry.activate("v1")
    assert Registry(registry._root).current() == "v1"
    damage(registry._root / "versions/v2/index-0.bin", b"x" * 300)
    with pytest.raises(Corrupt, match=r"v2/index-0\.bin"):
        registry.activate("v2")
    assert registry.current() == "v1"


def test_tokens_differ_after_each_activation(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that polls the token sees every activation made by another, even if time stands."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    poller = Registry(registry._root)
    registry.publish(FILES, {}, version="v0", activate=False)
    registry.publish(FILES, {}, version="v1", activate=False)
    tokens = []
    for turn in range(40):
        registry.activate(f"v{turn % 2}")
        tokens.append(poller.current_token())
        assert poller.current() == f"v{turn % 2}"
        assert poller.current_token() == tokens[-1]
    times = [token[1] for token in tokens if token]
    assert times == list(range(10**18, 10**18 + 40))


def test_pruning_keeps_the_newest_and_the_current(registry: Registry) -> None:
    for number in range(6):
        registry.publish(FILES, {}, version=f"v{number}")
    registry.activate("v1")
    damage(registry._root / "versions/v0/empty", b"x")
    assert registry.prune(2) == ["v2", "v3"]
    assert [entry.version for entry in registry.versions()] == ["v0", "v1", "v4", "v5"]
    assert staged(registry) == []
    assert registry.prune(0) == ["v4", "v5"]
    assert registry.current() == "v1"
    with pytest.raises(Invalid, match="at least 0"):
        registry.prune(-1)
    damage(registry._root / "current", b"?")
    with pytest.raises(Corrupt, match="current"):
        registry.prune(0)
    assert registry.load("v1") == FILES


# Damage -------------------------------------------------------------------------------------------


def damage(path: Path, data: bytes) -> None:
    path.unlink()  # versions are published read-only
    path.write_bytes(data)


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "current"])
def test_every_flip_and_truncation_is_found(registry: Registry, name: str) -> None:
    """A flipped bit or changed length of any file is reported as Corrupt, with the file name."""
    registry.publish(FILES, METADATA, version="v1")
    path = registry._root / (name if name == "current" else f"versions/v1/{name}")
    whole = path.read_bytes()
    generator = random.Random(f"seed 7 {name}")
    region = 32 if len(whole) > 2000 else 1
    damaged = [whole[:cut] for cut in range(0, len(whole), region)] + [whole + b"\n"]
    for start in range(0, len(whole), region):
        flipped = bytearray(whole)
        flipped[generator.randrange(start, min(start + region, len(whole)))] ^= (
            1 << generator.randrange(8)
        )
        damaged.append(bytes(flipped))
    for data in damaged:
        damage(path, data)
        with pytest.raises(Corrupt, match=rf"{name}: "):
            load_current(registry)
    listed = registry.versions()[0]
    assert not listed.current if name == "current" else f"v1/{name}: " in str(listed.broken)
    damage(path, whole)
    assert load_current(registry) == FILES
    assert registry.versions()[0].broken is None


def test_a_missing_or_surplus_entry_is_found(registry: Registry) -> None:
    """Files that went missing, came on top or are no files are named, in loading and listing."""
    breakers: dict[str, list[Callable[[Path], object]]] = {
        "index-0.bin": [Path.unlink],
        "manifest.json": [Path.unlink],
        "surplus": [Path.touch],
        "folder": [Path.mkdir],
        "empty": [Path.unlink, lambda path: path.symlink_to("/dev/null")],
        "model.safetensors": [Path.unlink, os.mkfifo],
    }
    for number, (name, steps) in enumerate(breakers.items()):
        registry.publish(FILES, METADATA, version=f"v{number}")
        for step in steps:
            step(registry._root / f"versions/v{number}" / name)
        with pytest.raises(Corrupt, match=f"v{number}/{name}: "):
            load_current(registry)
        (listed,) = (entry for entry in registry.versions() if entry.current)
        assert f"v{number}/{name}: " in str(listed.broken)


def test_listing_survives_anything(registry: Registry, tmp_path: Path) -> None:
    """Invalid entries among the versions are listed as broken, valid ones are not."""
    registry.publish(FILES, METADATA, version="good")
    versions = registry._root / "versions"
    (versions / "empty").mkdir()
    (versions / "file").write_bytes(b"")
    (versions / ".DS_Store").write_bytes(b"")
    (versions / "link").symlink_to(versions / "good")
    (versions / "loop").symlink_to(versions / "loop")
    (versions / "dangling").symlink_to(tmp_path / "nowhere")
    Path(os.fsdecode(os.fsencode(versions) + b"/\xff")).mkdir()
    (versions / "copied").mkdir()
    for file in (versions / "good").iterdir():
        (versions / "copied" / file.name).write_bytes(file.read_bytes())
    for name, body in {"future": {"format": 2}, "forged": {"format": 1, "files": 7}}.items():
        (versions / name).mkdir()
        (versions / name / "manifest.json").write_bytes(version_files.seal(body))
    found = {entry.version: entry.broken for entry in registry.versions()}
    assert len(found) == 11
    assert [name for name, broken in found.items() if not broken] == ["good"]
    assert all(name.isascii() for name in found)
    with pytest.raises(Incompatible, match="future"):
        registry.load("future")
    assert registry.current() == "good"


def test_a_quiet_flip_is_listed_as_broken(registry: Registry) -> None:
    """A change that keeps size and modification time is listed as broken."""
    registry.publish(FILES, METADATA, version="v1")
    assert registry.versions()[0].broken is None
    path = registry._root / "versions/v1/model.safetensors"
    times = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"flip")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "v1/model.safetensors: its SHA-256" in str(registry.versions()[0].broken)


def test_pointer_that_names_no_version_is_corrupt(registry: Registry) -> None:
    registry.publish(FILES, METADATA, version="v1")
    for senseless in ({"version": "../v2"}, {"version": 2}, {}):
        damage(registry._root / "current", version_files.seal(senseless))
        with pytest.raises(Corrupt, match="current: it names no version"):
            registry.current()


# Names --------------------------------------------------------------------------------------------


def test_names_cannot_leave_the_registry(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid version names are refused before any file is touched."""
    canary = Registry(tmp_path / "other")
    canary.publish(FILES, METADATA, version="secret")
    (registry._root / "versions/link").symlink_to(tmp_path / "other/versions/secret")
    before = {path: path.stat() for path in sorted((tmp_path / "other").rglob("*"))}
    touched: list[str] = []
    for function in ("open", "scandir", "mkdir", "rename", "replace", "unlink"):
        real = getattr(os, function)

        def spy(path: Any, *rest: Any, real: Any = real, **options: Any) -> Any:
            touched.append(os.fspath(path))
            return real(path, *rest, **options)

        monkeypatch.setattr(os, function, spy)
    for name in [*BAD_NAMES, "link"]:
        for call in (
            registry.load,
            registry.activate,
            lambda version: registry.publish(FILES, {}, version=version),
        ):
            with pytest.raises(Invalid) as raised:
                call(name)
            assert raised.value.pointer == "/version"
    assert touched == []
    monkeypatch.undo()
    assert before == {path: path.stat() for path in sorted((tmp_path / "other").rglob("*"))}
    assert canary.load("secret") == FILES


@pytest.mark.parametrize("name", ["", "..", "../canary", "a/b", "/a", ".a", "a\0", "manifest.json"])
def test_file_names_cannot_leave_the_version(registry: Registry, tmp_path: Path, name: str) -> None:
    """Invalid file names are refused in publishing and in loading a forged version_files."""
    with pytest.raises(Invalid, match="file name"):
        registry.publish({name: b"x"}, {}, version="v1")
    (tmp_path / "models/versions/canary").write_bytes(b"x")
    directory = tmp_path / "models/versions/v1"
    directory.mkdir()
    file = {"size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    body = {"format": 1, "version": "v1", "created": 0, "files": {name: file}, "metadata": {}}
    (directory / "manifest.json").write_bytes(version_files.seal(body))
    with pytest.raises(Corrupt, match="is not a manifest"):
        registry.load("v1")
    assert (tmp_path / "models/versions/canary").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("files", "metadata", "pointer"),
    [
        ({}, {}, "/files"),
        (FILES, {"loss": float("nan")}, "/metadata"),
        (FILES, {"model": object()}, "/metadata"),
        (FILES, {"note": "x" * (17 << 20)}, "/metadata"),
        (FILES, [1], "/metadata"),
    ],
)
def test_invalid_files_or_metadata_are_refused(
    registry: Registry, files: Any, metadata: Any, pointer: str
) -> None:
    """A version without files, or with metadata that are not JSON or too large, is refused."""
    with pytest.raises(Invalid) as raised:
        registry.publish(files, metadata)
    assert raised.value.pointer == pointer
    assert registry.versions() == []
    assert staged(registry) == []


# Faults and company -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, OSError)]
)
@pytest.mark.parametrize("function", ["write", "fsync", "rename", "replace"])
def test_a_failing_disk_publishes_nothing(
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    code: int,
    error: type[Exception],
) -> None:
    """A full or failing disk is reported, the old version serves, and no space stays taken."""
    registry.publish(FILES, METADATA, version="v1")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(error):
        registry.publish(FILES, {}, version="v2")
    monkeypatch.undo()
    assert load_current(registry) == FILES
    assert staged(registry) == []
    registry.publish(FILES, {}, version="v3")
    assert registry.current() == "v3"


def test_only_abandoned_staging_is_cleaned(registry: Registry) -> None:
    """Opening removes abandoned staging folders and keeps those in use."""
    with registry._staging.new() as living:
        dead = living.with_name("dead")
        dead.mkdir()
        (dead / "model").write_bytes(b"half")
        Registry(registry._root)
        assert staged(registry) == [living]
    assert staged(registry) == []


def test_a_held_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing and activation raise Unavailable if the lock is held beyond the timeout."""
    monkeypatch.setattr(version_files, "_TIMEOUT", 0.05)
    registry = Registry(tmp_path)
    registry.publish(FILES, {}, version="v1")
    with durable_files.locked(tmp_path / "lock", 1):
        with pytest.raises(Unavailable):
            registry.publish(FILES, {}, version="v2")
        with pytest.raises(Unavailable):
            registry.activate("v1")
        assert Registry(tmp_path).current() == "v1"
    registry.publish(FILES, {}, version="v2")


PUBLISHER = """
import os, sys
os.fsync = lambda descriptor: None
from pathlib import Path
from service.domain.errors import Conflict
from service.snapshots.registry import Registry
registry = Registry(Path(sys.argv[1]))
won = 0
for turn in range(8):
    text = f"{sys.argv[2]} {turn}".encode()
    registry.publish({"a": text, "b": text * 99}, {"text": text.decode()})
    try:
        registry.publish({"a": text, "b": text * 99}, {"text": text.decode()}, version=f"v{turn}")
        won += 1
    except Conflict:
        pass
    registry.prune(4)
print(won)
"""


def test_publishers_do_not_disturb_each_other_or_readers(registry: Registry) -> None:
    """Concurrent publishers, pruning and reads never give an incomplete version."""
    registry.publish({"a": b"-", "b": b"-" * 99}, {"text": "-"})
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(registry._root), str(number)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
        )
        for number in range(3)
    ]
    seen, reads, torn = set(), 0, []
    while any(publisher.poll() is None for publisher in publishers):
        version = registry.current() or ""
        with contextlib.suppress(NotFound):  # replaced and pruned while it was being read
            files = registry.load(version)
            reads += 1
            seen.add(version)
            if files["a"] * 99 != files["b"]:
                torn.append(version)
        torn += [entry.broken for entry in registry.versions() if entry.broken]
    won = [int(publisher.communicate()[0]) for publisher in publishers]
    assert [publisher.returncode for publisher in publishers] == [0, 0, 0]
    assert torn == []
    assert sum(won) >= 8  # a name can be won again after it was pruned
    assert reads > 1
    assert len(seen) > 1
    assert staged(registry) == []
