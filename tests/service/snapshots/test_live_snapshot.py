"""The live snapshot: follows catalogue and model versions and rejects invalid models."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save

from models.attention.attend import AttentionOptions
from models.catalogue.snapshot import Snapshot
from models.history.user_history import UserHistory
from models.history.user_memory import build_memory
from models.ranking.matches import match_fields
from models.ranking.scoring import score
from models.ranking.search import search
from models.recommender.artifact import DESCRIPTION_FILE, ITEMS_FILE, WEIGHTS_FILE
from models.text.encoders import StaticEncoder
from service.domain.errors import HeedError, ModelRejected, StoreUnreachable
from service.domain.records import Event, Item
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.live_snapshot import LiveSnapshot, Served
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from tests.support.tiny import NOON, World, item_id, items

Files = Mapping[str, bytes | bytearray]


class Slow(StaticEncoder):
    """An encoder that can be blocked and counts the texts it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.asked = 0

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        assert self.free.wait(60)
        self.asked += len(texts)
        return super().encode(texts)


@pytest.fixture
def data(world: World, tmp_path: Path) -> Path:
    return world.copy(tmp_path / "data")


@pytest.fixture
async def store(data: Path) -> AsyncIterator[SQLiteStore]:
    opened = SQLiteStore(data / STORE_FILE)
    yield opened
    await opened.close()


@pytest.fixture
def registry(data: Path) -> Registry:
    return Registry(data / MODELS_FOLDER)


@pytest.fixture
def encoder() -> Slow:
    return Slow()


@pytest.fixture
async def serving(
    store: SQLiteStore, registry: Registry, encoder: Slow
) -> AsyncIterator[LiveSnapshot]:
    with ThreadPoolExecutor(2) as pool:
        opened = LiveSnapshot(store, registry, Served(EmbeddingCache(encoder)), pool)
        await opened.open()
        yield opened


def scores(snapshot: Snapshot) -> list[float]:
    """All items' scores for a small history, with the model that is served."""
    rows = snapshot.catalogue.rows([item_id(0, n) for n in range(3)])
    past = UserHistory(rows, np.full(3, NOON), np.ones(3, np.float32), np.full(3, -1, np.int32))
    every = snapshot.catalogue.rows([item.item_id for item in items()])
    found: list[float] = score(snapshot, build_memory(snapshot, past, NOON), every).total.tolist()
    return found


# ------------------------------------------------------------------ the catalogue


async def test_a_known_catalogue_answers_while_a_changed_one_cannot_be_read(
    serving: LiveSnapshot, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot is degraded from a change that the store does not tell until it does."""

    async def unreachable(after: int, limit: int | None = None) -> None:
        raise StoreUnreachable("PostgreSQL does not answer")

    await store.put_items([Item("new", title="rocket")])
    with monkeypatch.context() as patched:
        patched.setattr(store, "catalogue_changes", unreachable)
        known = await serving.current()
        assert serving.degraded
        assert known.catalogue.row("new") == -1
    told = await serving.current()
    assert not serving.degraded
    assert told.catalogue.row("new") >= 0


async def test_concurrent_reads_share_one_refresh(
    serving: LiveSnapshot, store: SQLiteStore, encoder: Slow
) -> None:
    asked = encoder.asked
    await store.put_items([Item(f"n{n}", title=f"title number {n}") for n in range(20)])
    found = await asyncio.gather(*(serving.current() for _ in range(10)))
    assert len({id(snapshot) for snapshot in found}) == 1
    assert found[0].catalogue.row("n19") >= 0
    assert encoder.asked == asked + 20


async def test_the_catalogue_is_read_in_parts(
    serving: LiveSnapshot, store: SQLiteStore, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot does not depend on the size of the batches in which it is read."""
    monkeypatch.setattr("service.snapshots.live_snapshot._READ_BATCH", 7)
    monkeypatch.setattr("service.snapshots.live_snapshot._REFRESH_BATCH", 7)
    with ThreadPoolExecutor(2) as pool:
        again = LiveSnapshot(store, registry, Served(EmbeddingCache(StaticEncoder())), pool)
        await again.open()
        np.testing.assert_allclose(scores(again.snapshot), scores(serving.snapshot), atol=1e-6)
        for batch in range(3):
            await store.put_items([Item(f"n{batch}.{n}", title=f"title {n}") for n in range(20)])
        await store.delete_item("n1.3")
        now = (await again.current()).catalogue
        assert now.visible.sum() == 60 + 60 - 1


@pytest.fixture
async def indexed(
    store: SQLiteStore, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LiveSnapshot]:
    """A live snapshot with indexes from five rows on, built without delay."""
    monkeypatch.setattr("service.snapshots.live_snapshot._STEADY", 0)
    with ThreadPoolExecutor(2) as pool:
        opened = LiveSnapshot(
            store, registry, Served(EmbeddingCache(StaticEncoder())), pool, index_from=5
        )
        await opened.open()
        yield opened
        opened.close()


def titled(snapshot: Snapshot, title: str) -> list[str]:
    """The ids of the best items for a text, as search finds them through the key index."""
    catalogue = snapshot.catalogue
    query = StaticEncoder().encode([title])[0]
    how = AttentionOptions(mode="coarse", k=3)
    found = search(match_fields(snapshot, query, allowed=catalogue.visible, options=how), limit=1)
    return [catalogue.vocabulary.id(row) for row in found.rows.tolist()]


async def test_indexes_are_made_anew_while_requests_are_answered(
    indexed: LiveSnapshot, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes before, during and after the building of an index are found at all times."""
    held, begun = threading.Event(), threading.Event()
    made: list[Snapshot] = []
    indexing = Snapshot.reindexed

    def slowly(snapshot: Snapshot, **options: Any) -> Snapshot:
        begun.set()
        assert held.wait(60)
        made.append(indexing(snapshot, **options))
        return made[-1]

    monkeypatch.setattr(Snapshot, "reindexed", slowly)
    first = indexed.snapshot
    assert (first.indexed_items, first.indexed_keys) == (60, len(first.catalogue.keys))
    await store.put_items([Item(f"n{n}", title=f"rocket number {n}") for n in range(9)])
    await store.put_items([Item(item_id(0, n), title=f"submarine {n}") for n in range(3)])
    before = await indexed.current()
    await asyncio.to_thread(begun.wait, 60)
    assert titled(before, "submarine 0") == [item_id(0, 0)]
    # While the index is made, one item changes that it will hold, one goes and one comes.
    await store.put_items([Item("n3", title="violin"), Item("late", title="volcano")])
    await store.delete_item("n4")
    during = await indexed.current()
    assert during.key_index is first.key_index
    assert titled(during, "violin") == ["n3"]
    assert titled(during, "volcano") == ["late"]
    held.set()
    await indexed.indexes.wait()
    after = indexed.snapshot
    assert after.indexed_items == made[0].indexed_items == 69
    assert after.index is made[0].index
    keys = after.catalogue.keys
    assert keys.orphans == 2  # the titles of what changed meanwhile, or went; no earlier ones
    for text, expected in (("violin", "n3"), ("volcano", "late"), ("submarine 0", item_id(0, 0))):
        assert titled(after, text) == [expected]
    assert "n4" not in titled(after, "rocket number 4")
    assert titled(during, "violin") == ["n3"]  # who has an earlier snapshot goes on with it
    np.testing.assert_allclose(scores(after), scores(during), atol=1e-5)


async def test_a_model_that_comes_meanwhile_keeps_its_own_indexes(
    indexed: LiveSnapshot, store: SQLiteStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes of the previous model that finish after an activation are discarded."""
    held = threading.Event()
    indexing = Snapshot.reindexed
    before = indexed.snapshot.model

    def slowly(snapshot: Snapshot, **options: Any) -> Snapshot:
        assert snapshot.model is not before or held.wait(60)
        return indexing(snapshot, **options)

    monkeypatch.setattr(Snapshot, "reindexed", slowly)
    await store.put_items([Item(f"n{n}", title=f"rocket number {n}") for n in range(9)])
    await indexed.current()
    mine = await indexed.activate(world.second)
    held.set()
    await indexed.indexes.wait()
    assert indexed.snapshot is mine
    assert mine.indexed_items == 69


async def test_refresh_of_a_cancelled_request_is_reused(
    serving: LiveSnapshot, store: SQLiteStore, encoder: Slow
) -> None:
    """The refresh begun by a timed-out request is used by the next request."""
    encoder.free.clear()
    await store.put_items([Item("slow", title="a title nobody has seen")])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await serving.current()
    waiting = asyncio.create_task(serving.current())
    encoder.free.set()
    asked = encoder.asked
    assert (await waiting).catalogue.row("slow") >= 0
    assert encoder.asked == asked + 1


async def test_embeddings_of_another_dimension_are_left_out(
    serving: LiveSnapshot, store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    """An embedding of another dimension is ignored with a warning; the text is used instead."""
    with caplog.at_level(logging.WARNING):
        await store.put_items(
            [
                Item("short", title="garlic", embedding=np.ones(3, np.float32)),
                Item("fits", embedding=np.ones(256, np.float32)),
            ]
        )
        snapshot = await serving.current()
    assert "the embeddings of 1 items are not used" in caplog.text
    assert snapshot.catalogue.has_content[snapshot.catalogue.rows(["short", "fits"])].all()


async def test_popularity_is_refreshed_on_request(
    serving: LiveSnapshot, store: SQLiteStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`refresh_popularity` counts new and deleted events, and skips an unchanged log."""
    name = item_id(2, 2)
    before = serving.snapshot
    row = before.catalogue.row(name)
    await store.append([*[Event("popular", name)] * 5, Event("popular", "unknown")])
    assert serving.snapshot is before
    await serving.refresh_popularity()
    assert serving.snapshot.counts[row] == before.counts[row] + 5
    assert serving.snapshot.counts[serving.snapshot.catalogue.row("unknown")] == 1
    assert serving.snapshot.version == world.first
    unchanged = serving.snapshot
    with monkeypatch.context() as patched:
        patched.setattr(store, "popularity", None)  # the log is not read where nothing was written
        await serving.refresh_popularity()
    assert serving.snapshot is unchanged
    await store.forget("popular")
    await serving.refresh_popularity()
    assert serving.snapshot.counts[row] == before.counts[row]


async def test_removed_items_stay_removed_after_a_restart(
    serving: LiveSnapshot, store: SQLiteStore, registry: Registry
) -> None:
    name = item_id(2, 2)
    await store.delete_item(name)
    before = (await serving.current()).catalogue
    with ThreadPoolExecutor(1) as pool:
        again = LiveSnapshot(store, registry, Served(EmbeddingCache(StaticEncoder())), pool)
        await again.open()
    after = again.snapshot.catalogue
    for catalogue in (before, after):
        row = catalogue.row(name)
        assert row >= 0
        assert catalogue.deleted[row]
        assert not catalogue.visible[row]


# ------------------------------------------------------------------ models


def described(files: Files, old: str, new: str) -> Files:
    """The files with one word of the description changed."""
    text = files[DESCRIPTION_FILE].decode()
    assert old in text
    return {**files, DESCRIPTION_FILE: text.replace(old, new).encode()}


def overflowing(files: Files) -> Files:
    """The files with weights so large that no score is finite."""
    weights = load(bytes(files[WEIGHTS_FILE]))
    weights["id_embedding.weight"] = np.full_like(weights["id_embedding.weight"], 3e38)
    return {**files, WEIGHTS_FILE: save(weights)}


BAD: dict[str, tuple[Callable[[Files], Files], str]] = {
    "overflow": (overflowing, "scores are not finite"),
    "encoder": (lambda f: described(f, "wordllama", "another"), "it reads vectors of another"),
    "torn": (lambda f: {**f, WEIGHTS_FILE: f[WEIGHTS_FILE][:1000]}, WEIGHTS_FILE),
}


@pytest.mark.parametrize("kind", BAD)
async def test_invalid_model_is_rejected_with_its_reason(
    serving: LiveSnapshot, registry: Registry, world: World, kind: str
) -> None:
    before = serving.snapshot
    spoil, reason = BAD[kind]
    files = spoil(registry.load(world.first))
    version = registry.publish(files, {}, activate=False)
    with pytest.raises(ModelRejected, match=version) as rejected:
        await serving.activate(version)
    assert reason in str(rejected.value)
    assert registry.current() == world.first
    assert serving.snapshot is before
    registry.activate(version)
    await serving.follow_registry()
    assert serving.snapshot is before


async def test_a_choice_made_meanwhile_is_followed_next(
    serving: LiveSnapshot, registry: Registry, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation during the loading of another version is kept and followed next."""
    loading = registry.load

    def slow(version: str) -> object:
        found = loading(version)
        if version == world.second:
            registry.activate(world.first)
        return found

    registry.activate(world.second)
    monkeypatch.setattr(registry, "load", slow)
    await serving.follow_registry()
    assert registry.current() == world.first
    await serving.follow_registry()
    assert serving.snapshot.version == world.first


async def test_a_start_without_an_intact_version_is_refused(
    store: SQLiteStore, registry: Registry, data: Path, world: World, encoder: Slow
) -> None:
    """Opening with all versions damaged is refused and names the current one's file."""
    for version in (world.first, world.second):
        path = data / MODELS_FOLDER / "versions" / version / ITEMS_FILE
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
    with ThreadPoolExecutor(1) as pool:
        serving = LiveSnapshot(
            store, Registry(data / MODELS_FOLDER), Served(EmbeddingCache(encoder)), pool
        )
        with pytest.raises(HeedError, match=f"{world.first}/{ITEMS_FILE}"):
            await serving.open()
