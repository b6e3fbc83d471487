"""Model versions that machines share by way of a database: what each has, serves and removes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from service.domain.errors import Conflict, Corrupt, Invalid, NotFound, Unavailable
from service.runtime.data_layout import MODELS_FOLDER
from service.snapshots import shared_registry, version_files
from service.snapshots.registry import Registry
from service.snapshots.shared_registry import SharedRegistry, open_registry
from service.stores.postgres import pool as patience
from service.stores.postgres.shared_files import CHUNK_BYTES
from service.stores.postgres.store import PostgresStore
from tests.support import tiny
from tests.support.heed_process import ROOT
from tests.support.postgres_server import PostgresServer
from tests.support.replicas import ReplicaProcess, served
from tests.support.tiny import World

FILES = {
    "model.safetensors": random.Random(1).randbytes(5000),
    "index-0.bin": random.Random(2).randbytes(300),
    "empty": b"",
}
Machine = Callable[[str], Registry]


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def machine(
    url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    """Opens the registry of a machine by its name, with small chunks."""
    monkeypatch.setattr(version_files, "CHUNK_BYTES", 1000)
    with Machines(url, namespace, tmp_path) as opened:
        yield opened


class Machines:
    """Opens the registries of machines by their names, over one database."""

    def __init__(self, url: str, namespace: str, folder: Path) -> None:
        self._url, self._namespace, self._folder = url, namespace, folder
        self._stores: list[PostgresStore] = []

    def __enter__(self) -> Machine:
        return self._open

    def __exit__(self, *_: object) -> None:
        for store in self._stores:
            asyncio.run(store.close())

    def _open(self, name: str) -> Registry:
        self._stores.append(PostgresStore(self._url, namespace=self._namespace))
        return open_registry(self._folder / name, self._stores[-1])


def refreshed(registry: Registry) -> object:
    """The token of a registry after a look at the database."""
    asyncio.run(registry.refresh())
    return registry.current_token()


def on_disk(folder: Path, name: str) -> list[str]:
    """The versions in a machine's own directory."""
    return sorted(path.name for path in (folder / name / MODELS_FOLDER / "versions").iterdir())


def test_what_one_machine_publishes_another_serves(machine: Machine) -> None:
    """A version that is published and activated on one machine is current, and whole, on another.

    Its token differs after each activation by any machine, and only then.
    """
    first, second = machine("a"), machine("b")
    assert (first.current(), refreshed(second)) == (None, None)
    version = first.publish(FILES, {"dims": 64})
    tokens = [refreshed(second)]
    assert second.current() == version
    assert second.load(version) == FILES
    assert second.created(version) == first.created(version)
    (entry,) = second.versions()
    assert (entry.version, entry.current, entry.broken) == (version, True, None)
    assert (entry.size, entry.metadata) == (5300, {"dims": 64})
    later = second.publish(FILES, {}, activate=False)
    assert refreshed(first) == tokens[-1]
    for registry, name in ((second, later), (first, version), (first, version)):
        registry.activate(name)
        tokens.append(refreshed(second))
        assert refreshed(second) == tokens[-1]
        assert first.current() == second.current() == name
    assert len(set(tokens)) == len(tokens)


def test_versions_of_all_machines_are_listed_before_they_are_fetched(machine: Machine) -> None:
    """Every machine lists all versions in the order of publication, fetched or not."""
    names = [machine(name).publish(FILES, {"by": name}, activate=False) for name in "abcab"]
    for name in "abcd":
        found = machine(name).versions()
        assert [(each.version, each.broken) for each in found] == [(each, None) for each in names]
        assert [each.metadata for each in found] == [{"by": name} for name in "abcab"]


def test_names_sort_after_those_of_machines_with_other_clocks(
    url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is the newest one when it is published, whatever the clocks of machines show."""
    store = PostgresStore(url, namespace=namespace)
    noon = 1_767_268_800_000_000
    published = []
    for name, clock in (("a", noon), ("b", noon - 3_600_000_000), ("a", noon), ("c", 5)):
        root = tmp_path / name
        monkeypatch.setattr("service.snapshots.registry.now", lambda now=clock: now)
        registry = SharedRegistry(root, store.shared.files("model"))
        published.append(registry.publish(FILES, {}, activate=False))
    assert published == sorted(published)
    assert len(set(published)) == 4
    asyncio.run(store.close())


def test_names_are_given_once_for_all_machines(machine: Machine, tmp_path: Path) -> None:
    """A name that another machine has published under, also before a removal, is refused."""
    machine("a").publish(FILES, {}, version="v1")
    with pytest.raises(Conflict, match="v1"):
        machine("b").publish({"other": b"x"}, {}, version="v1")
    assert machine("b").load("v1") == FILES
    machine("a").publish(FILES, {}, version="v2")
    assert machine("a").prune(1) == ["v1"]
    with pytest.raises(Conflict, match="v1"):
        machine("a").publish({"other": b"x"}, {}, version="v1")
    assert on_disk(tmp_path, "a") == ["v2"]
    with pytest.raises(Invalid):
        machine("a").load("../v1")
    with pytest.raises(NotFound):
        machine("a").activate("v3")


def test_other_bytes_under_the_same_name_are_replaced(machine: Machine, tmp_path: Path) -> None:
    """A directory of the same name with other content is not mistaken for the shared version."""
    Registry(tmp_path / "b" / MODELS_FOLDER).publish({"other": b"x"}, {}, version="v1")
    machine("a").publish(FILES, {}, version="v1")
    assert machine("b").load("v1") == FILES
    assert Registry(tmp_path / "b" / MODELS_FOLDER).load("v1") == FILES


def test_pruning_removes_from_the_database_and_from_all_disks(
    machine: Machine, tmp_path: Path
) -> None:
    """Pruned versions go from the database, this disk at once, and the others when they look."""
    first, second = machine("a"), machine("b")
    for number in range(5):
        first.publish(FILES, {}, version=f"v{number}", activate=number == 1)
    for name in ("v0", "v1", "v2"):
        second.load(name)
    refreshed(second)
    assert second.prune(2) == ["v0", "v2"]
    assert on_disk(tmp_path, "b") == ["v1"]
    assert on_disk(tmp_path, "a") == ["v0", "v1", "v2", "v3", "v4"]
    refreshed(first)
    assert on_disk(tmp_path, "a") == ["v1", "v3", "v4"]
    with pytest.raises(NotFound):
        first.load("v2")
    assert [entry.version for entry in second.versions()] == ["v1", "v3", "v4"]
    with pytest.raises(Invalid, match="/keep"):
        first.prune(-1)


def test_models_from_before_are_shared_by_activation(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions of a time without the database serve on their machine, and all after activation."""
    own = Registry(tmp_path / "a" / MODELS_FOLDER)
    own.publish(FILES, {}, version="v1")
    first, second = machine("a"), machine("b")
    refreshed(first)
    assert (first.current(), second.current()) == ("v1", None)
    assert "heed models activate v1" in caplog.text
    assert first.load("v1") == FILES
    assert [entry.version for entry in first.versions()] == ["v1"]
    with pytest.raises(NotFound):
        second.load("v1")
    first.activate("v1")
    assert second.current() == "v1"
    assert second.load("v1") == FILES


def test_a_damaged_copy_is_fetched_again(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A version that is damaged on one disk is replaced by the intact one, and the log names it."""
    machine("a").publish(FILES, {}, version="v1")
    for damage in ("model.safetensors", "manifest.json"):
        path = tmp_path / "a" / MODELS_FOLDER / "versions/v1" / damage
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert machine("a").load("v1") == FILES
        assert Registry(tmp_path / "a" / MODELS_FOLDER).load("v1") == FILES
    assert "v1/model.safetensors" in caplog.text
    path = tmp_path / "a" / MODELS_FOLDER / "versions/v1/index-0.bin"
    path.unlink()
    machine("a").activate("v1")
    assert path.read_bytes() == FILES["index-0.bin"]


def test_a_damaged_chunk_is_named_and_leaves_nothing(
    url: str, namespace: str, machine: Machine, tmp_path: Path
) -> None:
    """A version with a damaged chunk in the database is not fetched, and the message names it."""
    machine("a").publish(FILES, {}, version="v1")
    damage_chunk(url, namespace, 2)
    second = machine("b")
    refreshed(second)
    with pytest.raises(Corrupt, match=r"v1 in PostgreSQL: chunk 2 of 7 \(model\.safetensors\)"):
        second.load("v1")
    assert on_disk(tmp_path, "b") == []
    assert list((tmp_path / "b" / MODELS_FOLDER / "staging").iterdir()) == []
    assert machine("a").load("v1") == FILES  # which has it on its disk


def damage_chunk(url: str, namespace: str, chunk: int) -> Callable[[], None]:
    """Damage a chunk of every set in the namespace; return what puts their bytes back."""
    own = "namespace_no = (SELECT namespace_no FROM heed.namespaces WHERE name = %s)"
    where = f"chunk_no = {chunk} AND {own}".encode()
    with psycopg.connect(url) as connection:
        kept = connection.execute(
            b"SELECT data, set_no FROM heed.file_chunks WHERE " + where, (namespace,)
        ).fetchall()
        connection.execute(b"UPDATE heed.file_chunks SET data = 'x' WHERE " + where, (namespace,))
    assert kept

    def restore() -> None:
        statement = b"UPDATE heed.file_chunks SET data = %s WHERE set_no = %s AND " + where
        with psycopg.connect(url) as connection:
            for data, number in kept:
                connection.execute(statement, (data, number, namespace))

    return restore


def test_one_chunk_at_a_time_is_in_memory(
    url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing and fetching a version of many chunks take the memory of a few of them."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    files = {"large": random.Random(3).randbytes(20 * CHUNK_BYTES + 5)}
    with Machines(url, namespace, tmp_path) as machine:
        sender, receiver = machine("a"), machine("b")
        tracemalloc.start()
        sender.publish(files, {}, version="v1")
        sent = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        refreshed(receiver)
        received = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert on_disk(tmp_path, "b") == ["v1"]
        assert max(sent, received) < 6 * CHUNK_BYTES
        assert receiver.load("v1") == files


# A machine that is killed before its n-th step of fetching a version, for n = 1, 2, … until it
# lives through all of them.
FETCHER = """
import os, signal, sys
from pathlib import Path
from service.snapshots import version_files
from service.snapshots.shared_registry import open_registry
from service.stores.postgres.store import PostgresStore
from tests.service.snapshots.test_registry_crash import STEPS

version_files.CHUNK_BYTES = 1000
steps = [0]

def die_before(real):
    def call(*args, **options):
        steps[0] -= 1
        if steps[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return call

for number, _ in enumerate(sys.stdin, 1):
    child = os.fork()
    if child == 0:
        store = PostgresStore(sys.argv[1], namespace=sys.argv[2])
        registry = open_registry(Path(sys.argv[3]), store)
        steps[0] = number
        for step in STEPS:
            setattr(os, step, die_before(getattr(os, step)))
        registry.load("v1")
        os._exit(0)
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status := os.waitpid(child, 0)[1]) else 0)
    sys.stdout.flush()
"""


def test_kill_at_any_step_of_a_fetch_leaves_nothing_or_the_whole_version(
    url: str, namespace: str, machine: Machine, tmp_path: Path
) -> None:
    machine("a").publish(FILES, {}, version="v1")
    data = tmp_path / "b"
    fetcher = subprocess.Popen(
        [sys.executable, "-c", FETCHER, url, namespace, str(data)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert fetcher.stdin is not None
    assert fetcher.stdout is not None
    outcomes = []
    with fetcher:
        for _ in range(200):
            fetcher.stdin.write("\n")
            fetcher.stdin.flush()
            killed = int(fetcher.stdout.readline()) == 9
            survivor = Registry(data / MODELS_FOLDER)
            assert list((data / MODELS_FOLDER / "staging").iterdir()) == []
            is_there = on_disk(tmp_path, "b") == ["v1"]
            if is_there:
                assert survivor.load("v1") == FILES
            outcomes.append((killed, is_there))
            if not killed:
                break
            assert machine("b").load("v1") == FILES
            shutil.rmtree(data)
        fetcher.stdin.close()
    assert outcomes[-1] == (False, True)
    assert {(True, False), (True, True)} <= set(outcomes)  # killed on both sides of the rename
    assert len(outcomes) > 20


def test_without_the_database_the_disk_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the database is away, what is current stays and loads, and changes are refused.

    What is trained meanwhile is kept on the disk, and shared by its activation afterwards.
    """
    monkeypatch.setattr(patience, "ANSWER_SECONDS", 1.0)
    with (
        PostgresServer() as server,
        Machines(server.create_database(), "default", tmp_path) as machine,
    ):
        first, second = machine("a"), machine("b")
        first.publish(FILES, {}, version="v1")
        first.publish(FILES, {}, version="v2", activate=False)
        token = refreshed(second)
        server.stop()
        for _ in range(3):
            assert refreshed(second) == token
        assert caplog.text.count("models are not followed") == 1
        assert second.current() == "v1"
        assert second.load("v1") == FILES
        assert [entry.version for entry in second.versions()] == ["v1"]
        with pytest.raises(Unavailable):
            first.activate("v2")
        with pytest.raises(Unavailable):
            first.prune(0)
        with pytest.raises(Unavailable, match="heed models activate v3"):
            first.publish({"x": b"new"}, {}, version="v3")
        with pytest.raises(NotFound):
            second.load("v2")
        server.start()
        assert refreshed(second) == token
        first.activate("v3")
        assert refreshed(second) != token
        assert second.current() == "v3"
        server.stop()
        assert second.load("v3") == {"x": b"new"}
        assert Registry(tmp_path / "b" / MODELS_FOLDER).current() == "v3"
        server.start()


# ---------------------------------------------------------------------------- served models


@pytest.fixture
def shop(url: str, namespace: str, world: World, tmp_path: Path) -> World:
    """The small world in the database; its models are published by a machine that then leaves."""

    async def put() -> None:
        store = PostgresStore(url, namespace=namespace)
        await store.put_items(tiny.items())
        await store.append(tiny.events())
        await store.close()

    asyncio.run(put())
    own = Registry(world.data / MODELS_FOLDER)
    with Machines(url, namespace, tmp_path) as machine:
        publisher = machine("publisher")
        for version in (world.first, world.second):
            publisher.publish(own.load(version), {}, version=version, activate=False)
        publisher.activate(world.first)
    shutil.rmtree(tmp_path / "publisher")
    return world


def test_processes_on_two_directories_follow_an_activation(
    url: str, namespace: str, shop: World, tmp_path: Path
) -> None:
    """Both machines serve what a third one activates, also the one that starts later."""
    with (
        Machines(url, namespace, tmp_path) as machine,
        ReplicaProcess(url, namespace, tmp_path / "a") as first,
    ):
        first.wait(lambda said: said.get("version") == shop.first)
        machine("third").activate(shop.second)
        first.wait(lambda said: said == {"version": shop.second, "fault": None})
        with ReplicaProcess(url, namespace, tmp_path / "b") as second:
            second.wait(lambda said: said == {"version": shop.second, "fault": None})
            machine("third").activate(shop.first)
            for replica in (first, second):
                replica.wait(lambda said: said == {"version": shop.first, "fault": None})
    for name in "ab":
        own = Registry(tmp_path / name / MODELS_FOLDER)
        assert own.load(shop.first) == Registry(shop.data / MODELS_FOLDER).load(shop.first)


def test_a_model_with_a_damaged_chunk_is_not_served(
    url: str, namespace: str, shop: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model goes on, degraded by a fault that names the chunk, until another is current.

    A version that can be fetched at last is served without another activation.
    """
    monkeypatch.setattr(shared_registry, "_FIRST_DELAY", 0.0)
    monkeypatch.setattr(shared_registry, "_LONGEST_DELAY", 0.0)

    async def story(activating: Registry) -> None:
        await asyncio.to_thread(activating.load, shop.second)
        async with served(url, namespace, tmp_path / "b") as live:
            assert (live.snapshot.version, live.degraded) == (shop.first, False)
            restore = damage_chunk(url, namespace, 0)
            await asyncio.to_thread(activating.activate, shop.second)
            for _ in range(2):
                await live.follow_registry()
                assert (live.snapshot.version, live.degraded) == (shop.first, True)
                assert f"{shop.second} in PostgreSQL: chunk 0" in str(live.served.fault)
            restore()
            await live.follow_registry()
            assert (live.snapshot.version, live.degraded) == (shop.second, False)

    with Machines(url, namespace, tmp_path) as machine:
        asyncio.run(story(machine("a")))


def test_a_start_with_a_damaged_chunk_serves_another_model(
    url: str, namespace: str, shop: World, tmp_path: Path
) -> None:
    """A machine that cannot fetch the current model serves the newest one on its disk."""

    async def story() -> None:
        async with served(url, namespace, tmp_path / "b") as live:
            assert (live.snapshot.version, live.degraded) == (shop.second, True)
            assert f"{shop.first} in PostgreSQL" in str(live.served.fault)

    with Machines(url, namespace, tmp_path) as machine:
        machine("b").load(shop.second)
    damage_chunk(url, namespace, 0)
    asyncio.run(story())
