"""Derived files that machines share: made by one, and fetched and verified by the others."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import psycopg
import pytest

from models.index import ann_index
from models.text.encoders import StaticEncoder
from service.snapshots import derived_files
from service.snapshots.derived_files import (
    INDEXES,
    CatalogueCache,
    SharedCacheFiles,
    open_cache_files,
)
from service.snapshots.live_snapshot import LiveSnapshot, Served
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.postgres.store import PostgresStore
from tests.support import tiny
from tests.support.heed_process import ROOT
from tests.support.postgres_server import PostgresServer

DATA = np.random.default_rng(0).integers(0, 256, 5_000).astype(np.uint8)
Machine = Callable[[str], SharedCacheFiles]


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(url: str, namespace: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url, namespace=namespace)
    yield store
    asyncio.run(store.close())


@pytest.fixture
def machine(store: PostgresStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Opens the files of a machine by its name, with small chunks."""
    monkeypatch.setattr(derived_files, "CHUNK_BYTES", 1_000)

    def opened(name: str) -> SharedCacheFiles:
        files = open_cache_files(tmp_path / name, 3, store, INDEXES)
        assert isinstance(files, SharedCacheFiles)
        return files

    return opened


def change(url: str, namespace: str, statement: str) -> None:
    """Change the chunks of the namespace behind the store's back."""
    own = "namespace_no = (SELECT namespace_no FROM heed.namespaces WHERE name = %s)"
    with psycopg.connect(url) as connection:
        assert connection.execute(f"{statement} AND {own}".encode(), (namespace,)).rowcount


def test_what_one_machine_makes_another_fetches(machine: Machine, tmp_path: Path) -> None:
    """Bytes are read on a machine that never had them, and from its own disk from then on."""
    machine("a").write("one", DATA)
    assert np.array_equal(machine("b").read("one"), DATA)  # type: ignore[arg-type]
    assert machine("b").read("two") is None
    assert (tmp_path / "b" / "one").read_bytes() == (tmp_path / "a" / "one").read_bytes()
    machine("b").write("one", DATA)  # of a machine that made it at the same time


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE heed.file_chunks SET data = 'x' WHERE chunk_no = 2",
        "DELETE FROM heed.file_chunks WHERE chunk_no = 2",
        # Damaged before it was sent: chunks are as their digests say.
        "UPDATE heed.file_chunks SET data = 'x', digest = sha256('x') WHERE chunk_no = 2",
    ],
)
def test_what_is_damaged_in_the_database_is_made_anew(
    url: str, namespace: str, machine: Machine, damage: str
) -> None:
    """A damaged file is not returned, and is replaced by the machine that makes it again."""
    machine("a").write("one", DATA)
    change(url, namespace, damage)
    assert machine("b").read("one") is None
    machine("b").write("one", DATA)
    assert np.array_equal(machine("c").read("one"), DATA)  # type: ignore[arg-type]


def test_the_oldest_files_go_from_the_database(
    store: PostgresStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database keeps the files that were made last, within its bytes."""
    shared = store.shared.files(INDEXES)
    monkeypatch.setattr(derived_files, "SHARED_BYTES", 3 * len(DATA))
    files = SharedCacheFiles(tmp_path, 9, shared)
    for number in range(5):
        files.write(f"key-{number}", DATA)
    files.write("large", np.tile(DATA, 4))
    assert [each.name for each in shared.sets()] == ["key-3", "key-4"]
    assert files.read("large") is not None


def test_without_the_database_a_machine_makes_its_own(tmp_path: Path) -> None:
    """While the database is away, files are made, kept and read only on the disk."""
    with PostgresServer() as server:
        store = PostgresStore(server.create_database())
        files = SharedCacheFiles(tmp_path, 3, store.shared.files(INDEXES))
        server.stop()
        assert files.read("one") is None
        with files.building("one"):
            files.write("one", DATA)
        assert np.array_equal(files.read("one"), DATA)  # type: ignore[arg-type]
        server.start()
        assert store.shared.files(INDEXES).sets() == []
        asyncio.run(store.close())


def test_one_machine_builds_and_the_other_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two machines miss a file, one makes it, and the other one begins after that."""
    waited, happened = threading.Event(), []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        waited.set()
        sleep(0.001)

    monkeypatch.setattr(time, "sleep", noted)

    def second() -> None:
        with machine("b").building("one"):
            happened.append("second builds")
            assert np.array_equal(machine("b").read("one"), DATA)  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:
        with machine("a").building("one"):
            later = pool.submit(second)
            assert waited.wait(60)
            machine("a").write("one", DATA)
            happened.append("first has built")
        later.result(60)
    assert happened == ["first has built", "second builds"]


BUILDER = """
import sys, time
from pathlib import Path
from service.snapshots.derived_files import INDEXES, open_cache_files
from service.stores.postgres.store import PostgresStore

store = PostgresStore(sys.argv[1], namespace=sys.argv[2])
with open_cache_files(Path(sys.argv[3]), 3, store, INDEXES).building("one"):
    print("builds", flush=True)
    time.sleep(600)
"""


def test_a_machine_that_dies_while_it_builds_is_not_waited_for(
    url: str, namespace: str, machine: Machine, tmp_path: Path
) -> None:
    """The next machine builds once the one that built has been killed."""
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, url, namespace, str(tmp_path / "a")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with builder, ThreadPoolExecutor(1) as pool:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "builds\n"

        def build() -> int:
            with machine("b").building("one"):
                return int(builder.poll() or 0)

        later = pool.submit(build)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        assert later.result(60) == -signal.SIGKILL


# ---------------------------------------------------------------------------- whole starts


class CountingEncoder(StaticEncoder):
    """An encoder that counts the texts it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = 0

    def encode(self, texts):  # type: ignore[no-untyped-def]
        self.texts += len(texts)
        return super().encode(texts)


async def started(
    url: str, namespace: str, data: Path, encoder: StaticEncoder
) -> tuple[bytes, bytes]:
    """Start on a machine, with indexes from one row on; return the bytes of the indexes."""
    store = PostgresStore(url, namespace=namespace)
    try:
        with ThreadPoolExecutor(1) as pool:
            live = LiveSnapshot(
                store,
                Registry(data / "models"),
                Served(EmbeddingCache(encoder)),
                pool,
                index_from=1,
                index_cache=open_cache_files(data / "indexes", 6, store, INDEXES),
                catalogue_cache=CatalogueCache(
                    data / "catalogue", encoder.name, ("sku",), store=store
                ),
            )
            await live.open()
            snapshot = live.snapshot
            assert snapshot.index is not None
            assert snapshot.key_index is not None
            live.close()
    finally:
        await store.close()
    found = (snapshot.index.index, snapshot.key_index.index)
    return faiss.serialize_index(found[0]).tobytes(), faiss.serialize_index(found[1]).tobytes()


def test_a_second_machine_starts_from_what_the_first_has_made(
    url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty directory it builds no index and encodes no text, and has the same indexes."""
    builds = []
    for name in ("pq", "ivf"):
        build = getattr(ann_index, name)

        def counted(*args: object, build: object = build) -> object:
            builds.append(1)
            return build(*args)  # type: ignore[operator]

        monkeypatch.setattr(ann_index, name, counted)

    async def put() -> None:
        store = PostgresStore(url, namespace=namespace)
        await store.put_items(tiny.items())
        await store.close()

    asyncio.run(put())
    first, second = CountingEncoder(), CountingEncoder()
    made = asyncio.run(started(url, namespace, tmp_path / "a", first))
    count = len(builds)
    assert count > 0
    assert first.texts > 0
    assert asyncio.run(started(url, namespace, tmp_path / "b", second)) == made
    assert (len(builds), second.texts) == (count, 0)
