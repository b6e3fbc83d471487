"""Folders of namespaces: created whole, removed with every byte, and cleaned up after a kill."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.domain.errors import Conflict, Invalid, NotFound
from service.runtime.data_layout import (
    create_namespace,
    find_namespace,
    folder_size,
    namespace_id,
    namespace_names,
    remove_namespace,
)
from service.runtime.durable_files import try_lock


def fill(folder: Path) -> None:
    (folder / "heed.db").write_bytes(b"x" * 100)


def everything(data: Path) -> set[str]:
    """Return all files and folders of a data directory but the lock."""
    return {str(path.relative_to(data)) for path in data.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("name", ["", "A", "../a", "a/b", ".new-a", "a\n", "-a", "a" * 65])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    """A name that could be another path is refused everywhere, and nothing is created."""
    for work in (
        lambda: find_namespace(tmp_path, name),
        lambda: create_namespace(tmp_path, name, fill),
        lambda: remove_namespace(tmp_path, name),
    ):
        with pytest.raises(Invalid, match="no name of a namespace"):
            work()
    assert everything(tmp_path) <= {"namespaces"}


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    """A second namespace of one name is refused, and the first keeps its content."""
    folder = create_namespace(tmp_path, "a", fill)
    for name in ("a", "default"):
        with pytest.raises(Conflict, match="already"):
            create_namespace(tmp_path, name, lambda folder: None)
    assert folder_size(folder) == 100 + len(namespace_id(folder))


def test_a_removed_namespace_leaves_no_byte(tmp_path: Path) -> None:
    """A removal deletes all files of one namespace, and no file of another or of `default`."""
    fill(tmp_path)
    create_namespace(tmp_path, "b", fill)
    before = everything(tmp_path)
    folder = create_namespace(tmp_path, "a", fill)
    (folder / "models" / "versions").mkdir(parents=True)
    (folder / "models" / "versions" / "weights").write_bytes(b"w")
    remove_namespace(tmp_path, "a")
    assert everything(tmp_path) == before
    with pytest.raises(NotFound, match="'a'"):
        remove_namespace(tmp_path, "a")
    with pytest.raises(Invalid, match="default"):
        remove_namespace(tmp_path, "default")
    assert everything(tmp_path) == before


def test_a_namespace_in_training_is_not_removed(tmp_path: Path) -> None:
    """A removal is refused while a training holds the lock of the namespace's jobs."""
    jobs = create_namespace(tmp_path, "a", fill) / "jobs"
    jobs.mkdir()
    lock = try_lock(jobs / "runner.lock")
    assert lock is not None
    before = everything(tmp_path)
    with pytest.raises(Conflict, match="training"):
        remove_namespace(tmp_path, "a")
    assert everything(tmp_path) == before
    os.close(lock)
    remove_namespace(tmp_path, "a")
    assert everything(tmp_path) == {"namespaces"}


def test_an_interrupted_creation_is_no_namespace(tmp_path: Path) -> None:
    """A creation that fails leaves nothing under the name, and the next one succeeds."""

    def interrupted(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_namespace(tmp_path, "a", interrupted)
    assert namespace_names(tmp_path) == []
    (tmp_path / "namespaces" / ".removed-b-0123").mkdir()  # of a removal that was killed
    create_namespace(tmp_path, "a", fill)
    files = {f"namespaces/a/{name}" for name in ("heed.db", "namespace.id")}
    assert everything(tmp_path) == {"namespaces", "namespaces/a"} | files
