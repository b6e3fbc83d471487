"""The registry under SIGKILL and power loss at every step of a publication."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.domain.errors import HeedError
from service.runtime import durable_files
from service.snapshots.registry import Registry

REPOSITORY = Path(__file__).parents[3]
STEPS = ("open", "write", "fsync", "close", "mkdir", "utime", "rename", "replace")


def files(tag: str) -> dict[str, bytes]:
    return {"model": tag.encode() * 1000, "index": tag.encode() * 10}


# A publisher that is killed before its n-th step, for n = 1, 2, … until it lives through all of
# them. It waits for a line before each life, so that the test can look at what the last one left.
# A killed write writes half.
PUBLISHER = f"""
import os, signal, sys
from pathlib import Path
from service.snapshots.registry import Registry

def die_before(step, number):
    real, left = getattr(os, step), [number]
    def call(*args, **options):
        steps[0] -= 1
        if steps[0] == 0:
            if step == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

for number, _ in enumerate(sys.stdin, 1):
    child = os.fork()
    if child == 0:
        steps = [number]
        for step in {STEPS}:
            setattr(os, step, die_before(step, number))
        registry = Registry(Path(sys.argv[1]))
        tag = f"v{{number}}"
        files = {{"model": tag.encode() * 1000, "index": tag.encode() * 10}}
        if sys.argv[2] == "publish":
            registry.publish(files, {{"tag": tag}}, version=tag)
        else:
            registry.activate("b" if registry.current() == "a" else "a")
        os._exit(0)
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status := os.waitpid(child, 0)[1]) else 0)
    sys.stdout.flush()
"""


@pytest.mark.parametrize("action", ["publish", "activate"])
def test_kill_at_any_step_leaves_a_complete_version(tmp_path: Path, action: str) -> None:
    """After SIGKILL at any step the current version is the old or the new one, and complete."""
    Registry(tmp_path).publish(files("b"), {"tag": "b"}, version="b")
    Registry(tmp_path).publish(files("a"), {"tag": "a"}, version="a")
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, str(tmp_path), action],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert publisher.stdin is not None
    assert publisher.stdout is not None
    outcomes = []
    with publisher:
        for number in range(1, 200):
            before = Registry(tmp_path).current() or ""
            known = len(Registry(tmp_path).versions())
            publisher.stdin.write("\n")
            publisher.stdin.flush()
            killed = int(publisher.stdout.readline()) == 9
            survivor = Registry(tmp_path)
            version = survivor.current() or ""
            assert survivor.load(version) == files(version)
            target = f"v{number}" if action == "publish" else {"a": "b", "b": "a"}[before]
            assert version in {before, target}
            listed = survivor.versions()
            assert [entry.metadata for entry in listed] == [{"tag": e.version} for e in listed]
            assert [entry.broken for entry in listed] == [None] * len(listed)
            assert len(listed) - known in ({0, 1} if action == "publish" else {0})
            assert list((tmp_path / "staging").iterdir()) == []
            outcomes.append((killed, version == target))
            if not killed:
                break
        publisher.stdin.close()
    assert outcomes[-1] == (False, True)
    assert {(True, False), (True, True)} <= set(outcomes)  # killed on both sides of the commit
    assert len(outcomes) > (30 if action == "publish" else 15)


class Disk:
    """Simulated disk that loses everything not fsynced at power loss.

    Contents: of each file, what it held at its last fsync. Names: of each directory, those of its
    last fsync, or those of the moment, as a journal may have committed a rename on its own.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}

    def fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._root):
            return
        if path.is_dir():
            self._names[status.st_ino] = self._listing(path)
        else:
            self._contents[status.st_ino] = path.read_bytes()

    def forget(self, path: Path) -> None:
        """Drop the contents recorded for the inode of a new file."""
        self._contents.pop(path.stat().st_ino, None)

    def after_power_loss(self, target: Path, *, journal_ahead: bool) -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        self._restore(self._root, self._root.stat().st_ino, target, journal_ahead)

    def _restore(self, path: Path | None, inode: int, target: Path, journal_ahead: bool) -> None:
        now = self._listing(path) if path is not None and journal_ahead else None
        names = self._names.get(inode, {}) if now is None else now
        for name, (child, is_directory) in names.items():
            if is_directory:
                (target / name).mkdir()
                below = path / name if path is not None and now is not None else None
                self._restore(below, child, target / name, journal_ahead)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))

    @staticmethod
    def _listing(path: Path) -> dict[str, tuple[int, bool]]:
        return {entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in path.iterdir()}


def lives_through_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[], None]
) -> Iterator[str]:
    """Publish `new` over `old` and cut the power at each step; yield what a restart then loads."""
    root, copy = tmp_path / "models", tmp_path / "copy"
    disk = Disk(root)
    real = {step: getattr(os, step) for step in STEPS}
    outcomes: list[str] = []
    watching = False

    def cut() -> None:
        nonlocal watching
        watching = False
        for journal_ahead in (False, True):
            disk.after_power_loss(copy, journal_ahead=journal_ahead)
            try:
                restarted = Registry(copy)
                version = restarted.current() or ""
                outcomes.append(version if restarted.load(version) == files(version) else "torn")
            except HeedError as error:
                outcomes.append(str(error))
        watching = True

    def hook(step: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if watching:
                cut()
            if step == "fsync":
                return disk.fsync(args[0])
            result = real[step](*args, **options)
            if step == "open" and args[1] & os.O_TRUNC and str(args[0]).startswith(str(root)):
                disk.forget(Path(args[0]))
            return result

        return call

    for step in STEPS:
        monkeypatch.setattr(os, step, hook(step))
    break_it()
    registry = Registry(root)
    registry.publish(files("old"), {}, version="old")
    watching = True
    registry.publish(files("new"), {}, version="new")
    cut()
    watching = False
    monkeypatch.undo()
    yield from outcomes


def test_power_loss_at_any_step_leaves_a_complete_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = list(lives_through_power_loss(tmp_path, monkeypatch, lambda: None))
    assert set(outcomes) == {"old", "new"}
    assert outcomes[-2:] == ["new", "new"]
    assert len(outcomes) > 50


@pytest.mark.parametrize("forgotten", ["files", "directories"])
def test_the_power_loss_test_finds_a_missing_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """A registry that syncs only files, or only directories, fails the test above."""

    def break_it() -> None:
        if forgotten == "directories":
            monkeypatch.setattr(durable_files, "sync_directory", lambda path: None)
        else:
            hooked = os.fsync
            monkeypatch.setattr(
                os,
                "fsync",
                lambda descriptor: (
                    hooked(descriptor)
                    if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir()
                    else None
                ),
            )

    outcomes = list(lives_through_power_loss(tmp_path, monkeypatch, break_it))
    assert outcomes[-2:] != ["new", "new"]
