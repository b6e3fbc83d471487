"""Namespaces of an installation: the same contract over folders and over a database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.domain.errors import Conflict, Invalid, NotFound
from service.domain.records import Event
from service.stores.namespace_directory import NamespaceDirectory, open_directory
from service.stores.opening import open_store
from tests.support.postgres_server import PostgresDatabases

Machine = Callable[[], tuple[NamespaceDirectory, Path]]


@pytest.fixture(params=["folders", "database"])
def url(request: pytest.FixtureRequest, postgres: PostgresDatabases) -> str:
    """Where the namespaces are."""
    return "" if request.param == "folders" else postgres.create_database()


@pytest.fixture
def machine(url: str, tmp_path: Path) -> Iterator[Machine]:
    """A machine of the installation; without a database there is one data directory for all."""
    made: list[NamespaceDirectory] = []

    def start() -> tuple[NamespaceDirectory, Path]:
        data = tmp_path / (uuid.uuid4().hex if url else "data")
        made.append(open_directory(data, url and f"{url}?application_name={uuid.uuid4().hex}"))
        return made[-1], data

    yield start
    for directory in made:
        directory.close()


def events(folder: Path, url: str, *appended: Event) -> int:
    """Append events to a namespace's store, and return the number of its events."""

    async def run() -> int:
        store = open_store(folder, url)
        try:
            await store.append(appended)
            return (await store.counts())["events"]
        finally:
            await store.close()

    return asyncio.run(run())


def test_a_namespace_has_a_store_of_its_own(machine: Machine, url: str) -> None:
    """What one namespace stores, another one of any name does not have."""
    directory, data = machine()
    folders = [directory.create(name) for name in ("b", "a")]
    assert directory.names() == ["a", "b"]
    assert events(folders[0], url, Event("u", "i", "e")) == 1
    assert events(folders[1], url, Event("u", "j", "e")) == 1
    assert events(folders[0], url) == 1
    assert events(data, url) == 0
    assert directory.find("default") == data
    assert directory.find("a") == folders[1]


def test_what_is_no_namespace_is_refused(machine: Machine) -> None:
    """Wrong names, taken ones, unknown ones and `default` are refused."""
    directory, _ = machine()
    directory.create("a")
    with pytest.raises(Conflict):
        directory.create("a")
    for name in ("", "A", "../a", "x" * 65):
        with pytest.raises(Invalid):
            directory.create(name)
    for call in (directory.find, directory.remove):
        with pytest.raises(NotFound):
            call("unknown")
    with pytest.raises(Invalid):
        directory.remove("default")
    assert (directory.exists("unknown"), directory.token("unknown")) == (False, None)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - another machine sets no event
            await asyncio.sleep(0.01)


def test_other_machines_follow(machine: Machine, url: str) -> None:
    """A namespace that is created, removed or created anew on one machine is so on another."""
    (first, _), (second, data) = machine(), machine()
    events(first.create("a"), url, Event("u", "i"))
    asyncio.run(_until(lambda: second.exists("a")))
    token = second.token("a")
    assert token is not None
    with second.held("a", token) as folder:
        assert folder.is_relative_to(data)
        (folder / "kept").write_text("of the first namespace")
    assert events(folder, url) == 1
    held = open_store(folder, url)  # the identity is unique for as long as a store is open
    first.remove("a")
    asyncio.run(_until(lambda: not second.exists("a")))
    with pytest.raises(NotFound), second.held("a", token):
        pass
    assert events(first.create("a"), url) == 0
    asyncio.run(_until(lambda: second.token("a") not in (None, token)))
    with second.held("a", second.token("a")) as folder:
        assert not (folder / "kept").exists()
    second.forget("a")
    assert first.exists("a")
    asyncio.run(held.close())
