"""Indexes from the cache: a start answers as one that builds them, whatever became of the files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pytest

from models.catalogue.snapshot import Snapshot
from models.index import ann_index
from models.index.ann_index import CoarseIndex
from models.text.encoders import StaticEncoder
from service.domain.records import Event, Item
from service.runtime.cache_files import CacheFiles
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.live_snapshot import LiveSnapshot
from service.snapshots.registry import Registry
from service.snapshots.served import Served
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from tests.support.tiny import World

pytestmark = pytest.mark.anyio


@pytest.fixture
def data(world: World, tmp_path: Path) -> Path:
    return world.copy(tmp_path / "data")


@dataclass
class Builds:
    """Number of structures that were built."""

    count: int = 0


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Count the calls of what builds structures."""
    made = Builds()
    for name in ("pq", "ivf"):
        build = getattr(ann_index, name)

        def counted(*args: object, build: object = build) -> object:
            made.count += 1
            return build(*args)  # type: ignore[operator]

        monkeypatch.setattr(ann_index, name, counted)
    return made


async def opened(data: Path, cache: CacheFiles | None, *, events: list[Event] | None = None,
                 items: list[Item] | None = None) -> Snapshot:  # fmt: skip
    """The snapshot of a fresh start, with indexes from one row on, after some writes."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        await store.append(events or [])
        await store.put_items(items or [])
        with ThreadPoolExecutor(1) as pool:
            live = LiveSnapshot(
                store,
                Registry(data / MODELS_FOLDER),
                Served(EmbeddingCache(StaticEncoder())),
                pool,
                index_from=1,
                index_cache=cache,
            )
            await live.open()
            return live.snapshot
    finally:
        await store.close()


def content(index: CoarseIndex | None) -> bytes:
    """The bytes of an index."""
    assert index is not None
    serialised: np.ndarray = faiss.serialize_index(index.index)
    return serialised.tobytes()


def same(first: Snapshot, second: Snapshot) -> bool:
    """Whether two snapshots have equal rows, indexes and answers of these, bit for bit."""
    queries = np.random.default_rng(0).normal(size=(20, first.tables.vectors.shape[1]))
    found = [
        each.index.search(queries.astype(np.float32), 10).tolist()
        for each in (first, second)
        if each.index is not None
    ]
    return (
        list(first.catalogue.vocabulary.ids) == list(second.catalogue.vocabulary.ids)
        and content(first.index) == content(second.index)
        and content(first.key_index) == content(second.key_index)
        and found[0] == found[1]
    )


async def test_a_second_start_builds_nothing_and_answers_the_same(
    data: Path, builds: Builds, tmp_path: Path
) -> None:
    """With the cache, also after new events, a start has the bytes of one that builds its own."""
    cold = await opened(data, None)
    cache = CacheFiles(tmp_path / "cache", 6)
    first = await opened(data, cache)
    assert builds.count == 4
    item_id = cold.catalogue.vocabulary.ids[-1]
    again = await opened(data, cache, events=[Event("someone", item_id)])
    assert builds.count == 4
    assert same(cold, first)
    assert same(cold, again)


async def test_changed_items_are_indexed_anew(data: Path, builds: Builds, tmp_path: Path) -> None:
    """After a change of the catalogue a start answers as one without any cache."""
    cache = CacheFiles(tmp_path / "cache", 6)
    await opened(data, cache)
    items = [Item("new", title="A title that is not there yet")]
    again = await opened(data, cache, items=items)
    assert builds.count == 4
    assert same(await opened(data, None), again)


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_files_are_built_again(
    data: Path, builds: Builds, tmp_path: Path, seed: int
) -> None:
    """Flipped bits and cut files are neither served nor fatal, and are whole afterwards."""
    cache = CacheFiles(tmp_path / "cache", 6)
    first = await opened(data, cache)
    rng = np.random.default_rng(seed)
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 2
    for path in files:
        damaged = bytearray(path.read_bytes())
        at = int(rng.integers(len(damaged)))
        if seed % 2:
            damaged[at] ^= 1 << int(rng.integers(8))
        else:
            del damaged[at:]
        path.write_bytes(damaged)
    assert same(first, await opened(data, cache))
    assert builds.count == 4
    assert same(first, await opened(data, cache))
    assert builds.count == 4


async def test_nothing_of_users_is_in_the_cache(data: Path, tmp_path: Path) -> None:
    """No file of the cache changes when all users are forgotten."""
    cache = CacheFiles(tmp_path / "cache", 6)
    await opened(data, cache)
    store = SQLiteStore(data / STORE_FILE)
    for user in list(store.scan_user_ids()):
        await store.forget(user)
    await store.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    await opened(data, cache)
    assert {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before
