"""Command `heed copy`: between directories and databases, of one namespace or of all."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.domain.records import Event
from service.maintenance import copying
from service.maintenance.store_places import parse_place
from service.stores.base import Store
from tests.support import full_store
from tests.support.command_line import Heed
from tests.support.postgres_server import PostgresDatabases
from tests.support.stores import run_on

TABLES = ["events", "items", "users", "profiles", "scenarios", "deleted_scenarios"]
TABLES += ["imports", "keys", "forgotten"]


def using(place: str, use: Callable[[Store], Awaitable[Any]], namespace: str = "default") -> Any:
    """Open a store, use it, and close it."""
    return run_on(parse_place(place).open(namespace), use)[0]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A data directory with everything in it."""
    place = str(tmp_path / "source")
    using(place, full_store.fill)
    return place


def test_a_store_is_copied_and_compared(
    heed: Heed, source: str, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """From a directory to a database and to another directory; both are compared table by table."""
    url, back, report = postgres.create_database(), tmp_path / "back", tmp_path / "report.json"
    counts = using(source, lambda store: store.counts())
    said = heed("copy", "--from", source, "--to", url, "--json", report)
    assert said.code == 0, said.err
    assert said.out.count(" same ") == len(TABLES)
    assert f"{counts['events']:,} events of {counts['users']} users copied" in said.out
    assert "Not copied" in said.out
    assert "models" in said.out
    written = json.loads(report.read_text())
    tables = written["namespaces"]["default"]["tables"]
    assert list(tables) == TABLES
    assert all(each["source"] == each["target"] for each in tables.values())
    assert written["differing"] == []
    assert heed("copy", "--from", url, "--to", f"sqlite:{back}").code == 0
    assert using(source, full_store.read_all) == using(str(back), full_store.read_all)
    assert heed("check", "--data", back).code == 0
    again = heed("copy", "--from", url, "--to", back / "heed.db")
    assert again.code == 0
    assert "0 events of 0 users copied in" in again.out


def test_a_difference_is_named(
    heed: Heed, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = copying.compare_stores

    async def beside_a_writer(*args: Any) -> Any:
        await parse_place(source).open("default").append([Event("user 0001", "i", "meanwhile")])
        return await compared(*args)

    target = tmp_path / "target"
    monkeypatch.setattr(copying, "compare_stores", beside_a_writer)
    said = heed("copy", "--from", source, "--to", target)
    assert said.code == 1
    assert f"{source} and {target} differ in default: events:" in said.out
    assert said.out.count("differs") == 1
    refused = heed("export", "users", tmp_path / "users.jsonl", "--data", target)
    assert refused.code == 1
    assert "run the same heed copy" in refused.err


def test_all_namespaces_are_copied_under_their_names(
    heed: Heed, source: str, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """Each is compared; --namespace copies one, whose folder or row is made where it is missing."""
    url, back = postgres.create_database(), str(tmp_path / "back")
    for name in ("shop", "empty"):
        assert heed("namespaces", "create", name, "--data", source).code == 0
    using(source, lambda store: store.append([Event("mia", "soup", "e1")]), "shop")
    said = heed("copy", "--from", source, "--to", url, "--namespace", "shop")
    assert said.code == 0, said.err
    assert parse_place(url).namespaces() == ["shop"]
    assert heed("copy", "--from", source, "--to", url, "--all-namespaces").code == 0
    assert parse_place(url).namespaces() == ["default", "empty", "shop"]
    assert heed("copy", "--from", url, "--to", back, "--all-namespaces").code == 0
    assert parse_place(back).namespaces() == ["default", "empty", "shop"]
    for name in ("default", "empty", "shop"):
        expected = using(source, full_store.read_all, name)
        assert using(back, full_store.read_all, name) == expected
        ids = {parse_place(place).namespace_id(name) for place in (source, url, back)}
        assert len(ids) == 1  # the keys open their namespaces by it
    heed("namespaces", "remove", "shop", "--data", source, "--yes")
    heed("namespaces", "create", "shop", "--data", source)
    refused = heed("copy", "--from", source, "--to", url, "--all-namespaces")
    assert (refused.code, "has a namespace shop of its own" in refused.err) == (1, True)


@pytest.mark.parametrize("kind", ["directory", "database"])
def test_an_unfinished_copy_is_not_served(
    heed: Heed,
    source: str,
    postgres: PostgresDatabases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Every command but the same copy refuses it, and says which goes on; so do doctor and check.

    The copy is interrupted when one of two namespaces is whole.
    """
    data = tmp_path / "data"
    target = postgres.create_database() if kind == "database" else str(data)
    assert heed("namespaces", "create", "shop", "--data", source).code == 0
    copied = copying._copy_items
    calls: list[int] = []

    async def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the cable was pulled")
        return await copied(*args)

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_copy_items", interrupted)
        assert heed("copy", "--from", source, "--to", target, "--all-namespaces").code == 1
    using(target, lambda store: store.counts(), "shop")
    if kind == "database":
        monkeypatch.setenv("HEED_STORE", target)
    for command in (
        ("serve", "--port", "8231"),
        ("export", "users", tmp_path / "users.jsonl"),
        ("keys", "list"),
        ("backup", tmp_path / "backup"),
        ("train",),
    ):
        said = heed(*command, "--data", data)
        assert said.code == 1, command
        assert "holds part of a copy of sqlite:" in said.err
        assert "run the same heed copy --from SOURCE --to TARGET again" in said.err
    said = heed("check", "--data", data)
    assert said.code == 1
    assert "problem" in said.out.split("holds part of a copy")[0]
    said = heed("doctor", "--data", data, "--json")
    assert said.code == 1
    assert '"unfinished-copy"' in said.out
    monkeypatch.delenv("HEED_STORE", raising=False)
    refused = heed("copy", "--from", target, "--to", tmp_path / "third")
    assert refused.code == 1
    assert "holds part of a copy" in refused.err
    assert not (tmp_path / "third").exists()
    assert heed("copy", "--from", source, "--to", target, "--all-namespaces").code == 0
    assert using(target, full_store.read_all) == using(source, full_store.read_all)


def test_an_unfinished_copy_can_be_accepted(
    heed: Heed, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --accept-loss, the unfinished copy of an unreadable source is served."""

    async def fails(*_: Any) -> Any:
        raise OSError("a damaged page")

    with monkeypatch.context() as patch:
        patch.setattr(copying, "_copy_items", fails)
        assert heed("copy", "--from", source, "--to", tmp_path / "target").code == 1
    assert heed("check", "--data", tmp_path / "target").code == 1
    said = heed("check", "--data", tmp_path / "target", "--accept-loss")
    assert said.code == 0, said.err
    using(str(tmp_path / "target"), lambda store: store.counts())


def test_what_cannot_be_copied_is_said_in_a_line(
    heed: Heed, source: str, postgres: PostgresDatabases, tmp_path: Path
) -> None:
    """No source, the same store twice, another's data, and what is no place: nothing is changed."""
    url = postgres.create_database()
    missing = heed("copy", "--from", tmp_path / "nowhere", "--to", url)
    assert (missing.code, missing.err.count("\n")) == (1, 1)
    assert f"there is no store {tmp_path / 'nowhere' / 'heed.db'}" in missing.err
    assert not (tmp_path / "nowhere").exists()
    assert (
        "there is no namespace 'default' in postgresql://"
        in heed("copy", "--from", url, "--to", tmp_path / "new").err
    )
    assert parse_place(url).namespaces() == []
    assert (
        "no store in postgresql://"
        in heed("copy", "--from", url, "--to", tmp_path / "new", "--all-namespaces").err
    )
    same = heed("copy", "--from", source, "--to", f"sqlite:{source}/heed.db")
    assert "are the same store" in same.err
    full = tmp_path / "full"
    using(str(full), lambda store: store.append([Event("u", "i"), Event("v", "i")]))
    before = using(str(full), full_store.read_all)
    refused = heed("copy", "--from", source, "--to", full)
    assert refused.code == 1
    assert "the target is not empty, and no copy: it holds 2 users, 2 events" in refused.err
    assert using(str(full), full_store.read_all) == before
    assert heed("copy", "--from", "mysql://me:secret@host/db", "--to", full).code == 1
    assert (
        "no name of a namespace"
        in heed("copy", "--from", source, "--to", url, "--namespace", "../up").err
    )
