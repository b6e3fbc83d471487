"""Catalogue refreshes: which reads wait for which writes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.text.encoders import StaticEncoder
from service.domain.records import Item
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.live_snapshot import LiveSnapshot, Served, UnacknowledgedWrites
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.stores.values import CatalogueChanges


class Encoder(StaticEncoder):
    """A text encoder that can be blocked or made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.quick = True
        self.free = threading.Event()
        self.free.set()
        self.fails = False

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        assert self.free.wait(60)
        if self.fails:
            raise RuntimeError("the encoder failed")
        return super().encode(texts)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    opened = SQLiteStore(tmp_path / STORE_FILE)
    yield opened
    await opened.close()


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
async def live(store: SQLiteStore, encoder: Encoder, tmp_path: Path) -> AsyncIterator[LiveSnapshot]:
    """An empty catalogue, served without any model."""
    with ThreadPoolExecutor(2) as pool:
        registry = Registry(tmp_path / MODELS_FOLDER)
        opened = LiveSnapshot(store, registry, Served(EmbeddingCache(encoder)), pool)
        await opened.open()
        yield opened
        encoder.free.set()
        opened.close()


def batch(name: str, count: int = 100) -> list[Item]:
    """Items whose titles are all different."""
    return [Item(f"{name}{n}", title=f"{name} number {n}") for n in range(count)]


async def until(held: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    for _ in range(60_000):
        if held():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never held")


async def until_changed(store: SQLiteStore) -> None:
    """Wait until the store has a catalogue version."""
    for _ in range(60_000):
        if await store.catalogue_version():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing was written")


def found_by_words(catalogue: Catalogue, query: str) -> list[str]:
    """The ids of the items that have words of a query, best first."""
    index = catalogue.bm25_index
    assert index is not None
    rows = index.search(index.parser.parse(query), 5, catalogue.visible).rows
    return catalogue.vocabulary.ids_of(rows.tolist())


# ------------------------------------------------------------------ what is waited for


async def test_read_does_not_wait_for_an_unacknowledged_write(
    live: LiveSnapshot, store: SQLiteStore, encoder: Encoder
) -> None:
    before = await live.current()
    encoder.free.clear()
    writing = asyncio.create_task(live.catalogue.put_items(batch("new")))
    await until_changed(store)
    assert await live.current() is before
    assert not writing.done()
    encoder.free.set()
    assert await writing == 100
    assert live.snapshot.catalogue.row("new99") >= 0
    assert await live.current() is live.snapshot


async def test_read_waits_for_a_write_of_another_process(
    live: LiveSnapshot, store: SQLiteStore, encoder: Encoder
) -> None:
    encoder.free.clear()
    writing = asyncio.create_task(live.catalogue.put_items(batch("mine")))
    await until_changed(store)
    await store.put_items([Item("theirs", title="of another process")])
    waiting = asyncio.create_task(live.current())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    encoder.free.set()
    assert (await waiting).catalogue.row("theirs") >= 0
    await writing


async def test_read_does_not_wait_for_later_writes(
    live: LiveSnapshot, store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, written = store.catalogue_changes, 0

    async def behind(after: int, limit: int | None = None) -> CatalogueChanges:
        nonlocal written
        changes = await reading(after, limit)
        written += 1
        await store.put_items([Item("again", title=f"the title of write {written}")])
        return changes

    await store.put_items([Item("first", title="written before the question")])
    monkeypatch.setattr(store, "catalogue_changes", behind)
    async with asyncio.timeout(60):
        snapshot = await live.current()
    assert snapshot.catalogue.row("first") >= 0
    assert written < 5


async def test_failed_refresh_fails_reads_and_no_write(
    live: LiveSnapshot, encoder: Encoder
) -> None:
    encoder.fails = True
    assert await live.catalogue.put_items(batch("new")) == 100
    with pytest.raises(RuntimeError, match="the encoder failed"):
        await live.current()
    encoder.fails = False
    assert (await live.current()).catalogue.row("new0") >= 0


# ------------------------------------------------------------------ slow text encoders


async def test_slow_encoding_does_not_delay_reads(live: LiveSnapshot, encoder: Encoder) -> None:
    """With a slow encoder items are found by words at once and by embedding later."""
    encoder.quick = False
    encoder.free.clear()
    await live.catalogue.put_items(batch("rocket"))
    await live.catalogue.put_items(
        [Item("late", title="volcano")]
    )  # behind those, it has to wait too
    async with asyncio.timeout(60):
        catalogue = (await live.current()).catalogue
    assert found_by_words(catalogue, "42") == ["rocket42"]
    assert found_by_words(catalogue, "volcano") == ["late"]
    assert not catalogue.has_content.any()
    await live.catalogue.put_items([Item("rocket1", title="submarine")])
    await live.catalogue.delete_item("rocket2")
    encoder.free.set()
    await live.catalogue.put_items([Item("last", title="a title that is waited for")])
    row = live.snapshot.catalogue.row("last")
    await until(lambda: bool(live.snapshot.catalogue.has_content[row]))
    catalogue = live.snapshot.catalogue
    assert (catalogue.has_content == catalogue.visible).all()
    assert not catalogue.visible[catalogue.row("rocket2")]
    content = catalogue.content[catalogue.row("rocket1")]
    np.testing.assert_allclose(content, encoder.encode(["submarine"])[0], atol=1e-3)


async def test_a_few_texts_are_encoded_before_a_write_is_acknowledged(
    live: LiveSnapshot, encoder: Encoder
) -> None:
    encoder.quick = False
    await live.catalogue.put_items([Item("one", title="guitar")])
    assert live.snapshot.catalogue.has_content[live.snapshot.catalogue.row("one")]


# ------------------------------------------------------------------ the parts


def test_only_unacknowledged_writes_may_be_missing() -> None:
    """`acknowledged_at` returns the version before the first unacknowledged write."""
    writes = UnacknowledgedWrites()
    with writes.track() as first, writes.track() as second:
        first(3, 4)
        second(3, 4)  # in the same transaction
        with writes.track() as third:
            third(4, 6)
            assert [writes.acknowledged_at(version) for version in (3, 4, 6)] == [3, 3, 3]
            assert writes.acknowledged_at(5) == 5  # of another process
        assert writes.acknowledged_at(6) == 6
        assert writes.acknowledged_at(4) == 3
    assert writes.acknowledged_at(4) == 4


def test_forked_processes_know_what_each_other_writes() -> None:
    """Forks share unacknowledged writes; the next write of a version replaces a killed one's."""
    writes = UnacknowledgedWrites()
    pid = os.fork()
    if not pid:
        with writes.track() as on_change:
            on_change(3, 4)
            os._exit(0)
    os.waitpid(pid, 0)
    assert writes.acknowledged_at(4) == 3
    with writes.track() as on_change:
        on_change(3, 4)
        assert writes.acknowledged_at(4) == 3
    assert writes.acknowledged_at(4) == 4


def test_writes_beyond_those_that_are_tracked_are_waited_for() -> None:
    writes = UnacknowledgedWrites()
    with writes.track() as on_change:
        for version in range(1, 1_001):
            on_change(version - 1, version)
        assert writes.acknowledged_at(1_000) == 1_000
        assert writes.acknowledged_at(100) == 0
    assert writes.acknowledged_at(100) == 100
