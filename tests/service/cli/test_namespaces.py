"""Commands on namespaces: `heed namespaces`, and the option --namespace of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from service import cli
from service.snapshots.registry import Registry
from tests.support.command_line import Heed, counts
from tests.support.tiny import World

ITEMS = "item_id,title\na,First\nb,Second\n"


@pytest.fixture
def items(tmp_path: Path) -> Path:
    file = tmp_path / "items.csv"
    file.write_text(ITEMS)
    return file


def options(command: Any, path: str = "heed") -> dict[str, set[str]]:
    found = {path: {each for one in command.params for each in one.opts}}
    for name, inner in getattr(command, "commands", {}).items():
        found |= options(inner, f"{path} {name}")
    return found


def test_every_command_of_a_store_takes_a_namespace() -> None:
    """Each command with --data has --namespace, but those that are about all namespaces."""
    about_all = {
        "heed serve",
        "heed demo",
        "heed backup",
        "heed restore",
        *(f"heed keys {n}" for n in ("list", "revoke")),
        *(f"heed namespaces {n}" for n in ("create", "list", "remove")),
    }
    found = options(get_command(cli.app))
    with_data = {name for name, opts in found.items() if "--data" in opts}
    assert about_all < with_data
    named = {n for n, opts in found.items() if "--namespace" in opts}
    assert named == with_data - about_all | {"heed copy"}  # which is about two directories


def test_commands_work_on_one_namespace(
    heed: Heed, items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    for name in ("b", "c"):
        assert heed("namespaces", "create", name).code == 0
    assert heed("import", "items", items, "--namespace", "b").code == 0
    assert counts(data / "namespaces" / "b")["items"] == 2
    assert counts(data / "namespaces" / "c")["items"] == 0
    assert not (data / "heed.db").exists()
    assert "items.csv" in heed("import", "--list", "--namespace", "b").out
    monkeypatch.setenv("HEED_NAMESPACE", "b")
    assert heed("export", "items", tmp_path / "out.jsonl").code == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert heed("export", "items", tmp_path / "out.jsonl", "--namespace", "c").code == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize(("name", "said"), [("nope", "no namespace"), ("../b", "no name of a")])
def test_an_unknown_namespace_is_refused_and_not_created(
    heed: Heed, items: Path, tmp_path: Path, name: str, said: str
) -> None:
    """A command on a namespace that does not exist says so, and stores nothing."""
    ended = heed("import", "items", items, "--namespace", name)
    assert ended.code == 1
    assert said in ended.err
    assert not (tmp_path / "data").exists()


def test_a_training_publishes_into_its_namespace(heed: Heed, world: World, tmp_path: Path) -> None:
    data = tmp_path / "data"
    heed("namespaces", "create", "b")
    own = data / "namespaces" / "b"
    (own / "heed.db").unlink()
    world.copy(tmp_path / "copied", trained=False)
    (tmp_path / "copied" / "heed.db").rename(own / "heed.db")
    ended = heed("train", "--epochs", 1, "--preset", "quick", "--namespace", "b")
    assert ended.code == 0, ended.err
    (version,) = Registry(own / "models").versions()
    assert not (data / "models").exists()
    assert version.version in heed("models", "list", "--namespace", "b").out
    assert "No model yet" in heed("models", "list").out
    listed = heed("namespaces", "list").out
    if version.current:
        assert version.version in listed
    assert "480" in listed
    assert "succeeded" in heed("jobs", "list", "--namespace", "b").out
    assert "No training yet" in heed("jobs", "list").out


def test_a_removal_is_confirmed_by_the_name(
    heed: Heed, items: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the typed name or --yes removes a namespace; then no byte of it is left."""
    folder = tmp_path / "data" / "namespaces"
    for name in ("b", "c"):
        heed("namespaces", "create", name)
        heed("import", "items", items, "--namespace", name)
    for typed, code in (("y", 1), ("b", 0)):
        monkeypatch.setattr(typer, "prompt", lambda *_, typed=typed, **__: typed)
        ended = heed("namespaces", "remove", "b")
        assert ended.code == code
        assert "2 items" in ended.out
        assert (folder / "b").exists() == (code == 1)
    assert heed("namespaces", "remove", "c", "--yes").code == 0
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert heed("namespaces", "remove", "default", "--yes").code == 1


def test_a_damaged_namespace_is_listed_with_the_reason(heed: Heed, tmp_path: Path) -> None:
    """The list names what is wrong with a namespace, and lists the others beside it."""
    for name in ("bad", "gone", "good"):
        heed("namespaces", "create", name)
    (tmp_path / "data" / "namespaces" / "bad" / "heed.db").write_bytes(b"\0" * 8192)
    (tmp_path / "data" / "namespaces" / "gone" / "heed.db").unlink()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in heed("namespaces", "list").out.splitlines()
        if len(cells := line.split("│")) > 2
    }
    assert rows["good"][:3] == ["0", "0", "0"]
    assert rows["gone"][-1] == "no store"
    assert rows["bad"][:3] == ["?", "?", "?"]
    assert rows["bad"][-1]
