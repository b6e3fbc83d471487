"""Sets of files in a PostgreSQL database: whole or not there, whoever is interrupted."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from service.domain.errors import Conflict, Corrupt, NotFound, Unavailable
from service.stores.postgres import pool as patience
from service.stores.postgres import shared_files as files_module
from service.stores.postgres.shared_files import Activation, FileChunk, FileSet, SharedFiles
from service.stores.postgres.store import PostgresStore
from tests.support.heed_process import ROOT
from tests.support.postgres_server import PostgresServer


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(url: str, namespace: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url, namespace=namespace)
    yield store
    asyncio.run(store.close())


@pytest.fixture
def files(store: PostgresStore) -> SharedFiles:
    return store.shared.files("model")


def chunks_of(seed: int) -> list[FileChunk]:
    """Chunks of some files, empty ones among them."""
    rng = random.Random(seed)
    return [
        (f"file-{number}.bin", rng.randbytes(rng.choice([0, 1, 5_000])))
        for number in range(3)
        for _ in range(rng.randint(1, 4))
    ]


def stored_chunks(url: str, namespace: str) -> int:
    """The number of chunks in the namespace, of sets that are complete and of others."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM heed.file_chunks JOIN heed.namespaces USING (namespace_no)"
            " WHERE name = %s",
            (namespace,),
        ).fetchone()
    assert row is not None
    return int(row[0])


def change(url: str, statement: str, namespace: str) -> None:
    """Change the database behind the store's back."""
    with psycopg.connect(url) as connection:
        assert connection.execute(statement.encode(), (namespace,)).rowcount


IN_NAMESPACE = "namespace_no = (SELECT namespace_no FROM heed.namespaces WHERE name = %s)"


def test_what_is_put_is_read_by_any_client(url: str, namespace: str, files: SharedFiles) -> None:
    """Chunks, descriptions and sizes come back as they were put, in order, to another client."""
    put = {f"set-{seed}": chunks_of(seed) for seed in range(8)}
    for name, chunks in put.items():
        files.put(name, name.encode() + b"\0\xff", iter(chunks))
    other = PostgresStore(url, namespace=namespace)
    found = other.shared.files("model")
    assert {name: list(found.read(name)) for name in put} == put
    assert found.sets() == [
        FileSet(name, name.encode() + b"\0\xff", sum(len(data) for _, data in chunks))
        for name, chunks in put.items()
    ]
    assert found.find("set-3") == found.sets()[3]
    assert found.find("set-9") is None
    with pytest.raises(NotFound, match="set-9"):
        list(found.read("set-9"))
    asyncio.run(other.close())


def test_kinds_and_namespaces_are_apart(url: str, store: PostgresStore) -> None:
    """A set is seen in its own namespace and among its own kind alone."""
    store.shared.files("model").put("a", b"1", [("x", b"1")])
    store.shared.files("index").put("a", b"2", [("x", b"2")])
    other = PostgresStore(url, namespace=uuid.uuid4().hex)
    assert list(store.shared.files("model").read("a")) == [("x", b"1")]
    assert list(store.shared.files("index").read("a")) == [("x", b"2")]
    assert other.shared.files("model").sets() == []
    asyncio.run(other.close())


def test_names_are_given_once(url: str, namespace: str, files: SharedFiles) -> None:
    """A name that is taken, or was before a removal, is refused, and nothing is left of the try."""
    files.put("a", b"", [("x", b"1")])
    with pytest.raises(Conflict, match="model a"):
        files.put("a", b"", [("x", b"2")])
    assert files.remove("a")
    assert not files.remove("a")
    assert stored_chunks(url, namespace) == 0
    with pytest.raises(Conflict, match="model a"):
        files.put("a", b"", [("x", b"2")])
    with pytest.raises(NotFound):
        list(files.read("a"))
    assert (files.sets(), files.removed()) == ([], {"a"})
    assert stored_chunks(url, namespace) == 0


def test_of_two_writers_of_one_name_one_succeeds(
    url: str, namespace: str, files: SharedFiles
) -> None:
    """Of writers that put one name at the same time, one succeeds, and the others leave nothing."""
    started = threading.Barrier(4)

    def chunks(tag: bytes) -> Iterator[FileChunk]:
        yield "x", tag
        started.wait(30)
        yield "y", tag

    def put(number: int) -> int | None:
        try:
            files.put("a", b"", chunks(bytes([number])))
        except Conflict:
            return None
        return number

    with ThreadPoolExecutor(4) as pool:
        (winner,) = [each for each in pool.map(put, range(4)) if each is not None]
    assert list(files.read("a")) == [("x", bytes([winner])), ("y", bytes([winner]))]
    assert stored_chunks(url, namespace) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE heed.file_chunks SET data = 'other'", r"chunk 1 of 3 \(b\.bin\) is damaged"),
        ("UPDATE heed.file_chunks SET digest = ''", r"chunk 1 of 3 \(b\.bin\) is damaged"),
        ("DELETE FROM heed.file_chunks", r"chunk 1 of 3 is missing"),
    ],
)
def test_damaged_chunks_are_named(
    url: str, namespace: str, files: SharedFiles, damage: str, said: str
) -> None:
    """A chunk that is missing, or not what was put, is found and named when it is read."""
    files.put("a", b"", [("a.bin", b"1"), ("b.bin", b"2"), ("c.bin", b"3")])
    change(url, f"{damage} WHERE chunk_no = 1 AND {IN_NAMESPACE}", namespace)
    read: list[FileChunk] = []
    with pytest.raises(Corrupt, match=f"model a in PostgreSQL: {said}"):
        read += files.read("a")
    with closing(files.read("a")) as chunks:
        assert next(chunks) == ("a.bin", b"1")


def test_a_set_that_is_removed_while_it_is_read_is_not_found(files: SharedFiles) -> None:
    """A reader of a set that is removed meanwhile is told so, instead of damage."""
    files.put("a", b"", [("x", b"1"), ("x", b"2")])
    chunks = files.read("a")
    assert next(chunks) == ("x", b"1")
    files.remove("a")
    with pytest.raises(NotFound, match="model a"):
        next(chunks)


WRITER = """
import os, signal, sys
from service.stores.postgres.store import PostgresStore

def chunks():
    for number in range(5):
        if number == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield "x", b"1"

PostgresStore(sys.argv[1], namespace=sys.argv[2]).shared.files("model").put("a", b"", chunks())
"""


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_killed_writer_leaves_no_set(
    url: str,
    namespace: str,
    files: SharedFiles,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    """What a killed writer has sent is no set, and the next writer deletes it once it is old."""
    command = [sys.executable, "-c", WRITER, url, namespace, str(chunk)]
    killed = subprocess.run(command, cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (files.find("a"), files.sets()) == (None, [])
    files.put("b", b"", [("x", b"2")])  # it may still be writing, as far as others know
    assert stored_chunks(url, namespace) == chunk + 1
    monkeypatch.setattr(files_module, "_ABANDONED_AFTER", 0.0)
    files.put("a", b"", [("x", b"3")])
    assert list(files.read("a")) == [("x", b"3")]
    assert stored_chunks(url, namespace) == 2


def test_a_writer_that_stood_still_adds_nothing(
    url: str, namespace: str, files: SharedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose set was taken for abandoned is refused, and its set never becomes whole."""

    def chunks() -> Iterator[FileChunk]:
        yield "x", b"1"
        with monkeypatch.context() as hurried:
            hurried.setattr(files_module, "_ABANDONED_AFTER", 0.0)
            files.put("b", b"", [("x", b"2")])
        yield "x", b"3"

    with pytest.raises(Unavailable, match="model a"):
        files.put("a", b"", chunks())
    assert [each.name for each in files.sets()] == ["b"]
    assert stored_chunks(url, namespace) == 1


def test_an_error_of_the_chunks_leaves_nothing(
    url: str, namespace: str, files: SharedFiles
) -> None:
    """What the caller raises amid the chunks is raised, and nothing is stored."""

    def chunks() -> Iterator[FileChunk]:
        yield "x", b"1"
        raise Corrupt("the disk says no")

    with pytest.raises(Corrupt, match="the disk says no"):
        files.put("a", b"", chunks())
    assert files.sets() == []
    assert stored_chunks(url, namespace) == 0
    files.put("a", b"", [("x", b"1")])


def test_activations_are_numbered_and_seen_by_all(
    url: str, namespace: str, files: SharedFiles
) -> None:
    """Each activation, again of the same set too, has a higher number, which every client sees."""
    other = PostgresStore(url, namespace=namespace)
    seen = other.shared.files("model")
    assert files.last_activation() == Activation(0, None, 0)
    for name in ("a", "b", "c"):
        files.put(name, b"", [("x", b"1")])
    for number, name in enumerate(["a", "b", "b", "a"], start=1):
        assert files.activate(name) == Activation(number, name, 0)
        assert seen.last_activation() == Activation(number, name, 0)
    with pytest.raises(NotFound, match="model d"):
        files.activate("d")
    assert not files.remove("a")  # it is active
    assert files.remove("b")
    with pytest.raises(NotFound, match="model b"):
        files.activate("b")

    async def active() -> Activation:
        try:
            return await seen.active()
        finally:
            await other.close()

    assert asyncio.run(active()) == Activation(4, "a", 1)


def test_the_active_set_is_never_removed(files: SharedFiles) -> None:
    """Of activations and removals at the same time, none leaves an active set without its files."""
    names = [f"set-{number}" for number in range(30)]
    for name in names:
        files.put(name, b"", [("x", name.encode())])

    def activate(name: str) -> None:
        try:
            files.activate(name)
        except NotFound:
            return
        active = files.last_activation().name
        assert active is not None
        assert files.find(active) is not None

    with ThreadPoolExecutor(4) as pool:
        first = pool.map(activate, names)
        second = pool.map(files.remove, names)
        assert any(second)
        assert list(first) == [None] * len(names)
    active = files.last_activation()
    assert active.name is not None
    assert list(files.read(active.name)) == [("x", active.name.encode())]
    assert active.removals == len(files.removed())


def test_the_oldest_sets_go_beyond_the_bytes_allowed(
    url: str, namespace: str, files: SharedFiles
) -> None:
    """Trimming keeps the newest sets that fit, and what it deletes may be put again."""
    for number in range(5):
        files.put(f"set-{number}", b"", [("x", bytes(100)), ("y", bytes(100))])
    files.trim(1000)
    assert len(files.sets()) == 5
    files.trim(599)
    assert [each.name for each in files.sets()] == ["set-3", "set-4"]
    assert stored_chunks(url, namespace) == 4
    files.put("set-0", b"", [("x", b"1")])
    assert list(files.read("set-0")) == [("x", b"1")]


def test_a_server_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls to a server that is stopped, or that hangs, raise; they succeed once it answers."""
    monkeypatch.setattr(patience, "ANSWER_SECONDS", 0.5)
    with PostgresServer() as server:
        store = PostgresStore(server.create_database())
        files = store.shared.files("model")
        files.put("a", b"", [("x", b"1"), ("x", b"2")])
        chunks = files.read("a")
        assert next(chunks) == ("x", b"1")
        server.freeze()
        with pytest.raises(Unavailable, match="does not answer"):
            next(chunks)
        with pytest.raises(Unavailable):
            files.activate("a")
        server.thaw()
        assert files.activate("a").name == "a"
        server.stop()
        for call in (files.last_activation, files.sets, lambda: files.activate("a")):
            with pytest.raises(Unavailable):
                call()
        with pytest.raises(Unavailable):
            files.put("b", b"", [("x", b"1")])
        server.start()
        assert list(files.read("a")) == [("x", b"1"), ("x", b"2")]
        asyncio.run(store.close())
