"""Starts from caches of catalogues and indexes: they have what the store gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.catalogue.catalogue import Catalogue
from models.catalogue.cow import CowArray, CowList
from models.catalogue.snapshot import Snapshot
from models.data.vocabulary import Vocabulary
from models.index import ann_index
from models.text.encoders import StaticEncoder
from service.domain.records import Event, Item
from service.runtime.cache_files import CacheFiles
from service.runtime.data_layout import STORE_FILE
from service.snapshots.derived_files import CatalogueCache
from service.snapshots.live_snapshot import LiveSnapshot, Served
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from tests.support.tiny import World, item_id

QUERIES = ["hiking boots", "boots", '"leather boots"', "botts", "SKU-7", "cakestand", "läder"]


def catalogue_items() -> list[Item]:
    """Items with every kind of value that a catalogue has columns for."""
    rng = np.random.default_rng(3)
    dimension = StaticEncoder().dimension
    items = [
        Item(
            f"item-{at}",
            title=f"{('Hiking', 'Leather', 'Läder')[at % 3]} boots {at}",
            description="Sturdy boots for long walks. " * (at % 3),
            tags=("shoes", "outdoor")[: at % 3],
            categories=("boots",) if at % 2 else (),
            attributes={
                "sku": f"SKU-{at}",
                "price": at * 1.5,
                "sizes": [at, at + 1, "large", None, True],
                "shop": {"lat": 50.0 + at / 100, "lon": 8.0, "name": "Söder"},
            },
            hidden=at % 7 == 0,
            published_at=None if at % 4 else 1_700_000_000_000_000 + at,
        )
        for at in range(60)
    ]
    vector = rng.normal(size=dimension).astype(np.float32)
    return [
        *items,
        Item("brought", title="A cake stand", embedding=vector / np.linalg.norm(vector)),
        Item("empty"),
    ]


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """A data directory with items, one deleted and one written twice."""
    store = SQLiteStore(tmp_path / STORE_FILE)
    try:
        await store.put_items(catalogue_items())
        await store.put_items([Item("item-1", title="Another title")])
        await store.delete_item("item-2")
    finally:
        await store.close()
    return tmp_path


@dataclass
class Work:
    """Work of starts: none of it is done by a start from the caches."""

    texts: int = 0  # whose vectors were looked up or computed
    built: int = 0  # structures of indexes


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()
    encode = EmbeddingCache.encode

    def counted(self: EmbeddingCache, given: list[str], *args: object) -> object:
        done.texts += len(given)
        return encode(self, given, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EmbeddingCache, "encode", counted)
    for name in ("pq", "ivf"):
        build = getattr(ann_index, name)

        def built(*args: object, build: Any = build) -> object:
            done.built += 1
            return build(*args)

        monkeypatch.setattr(ann_index, name, built)
    return done


async def opened(data: Path, *, cached: bool = True, keywords: tuple[str, ...] = ("sku",),
                 then: list[Item] | None = None) -> Snapshot:  # fmt: skip
    """The snapshot of a fresh start, with indexes from one row on, after some writes to it."""
    store = SQLiteStore(data / STORE_FILE)
    encoder = StaticEncoder()
    cache = CatalogueCache(data / "cache", encoder.name, keywords)
    try:
        with ThreadPoolExecutor(1) as pool:
            live = LiveSnapshot(
                store,
                Registry(data / "models"),
                Served(EmbeddingCache(encoder)),
                pool,
                index_from=1,
                keyword_fields=keywords,
                index_cache=CacheFiles(data / "indexes", 6) if cached else None,
                catalogue_cache=cache if cached else None,
            )
            await live.open()
            if then:
                await live.catalogue.put_items(then)
            live.close()
            return live.snapshot
    finally:
        await store.close()


def files(data: Path) -> dict[Path, bytes]:
    """The files of both caches."""
    return {path: path.read_bytes() for name in ("cache", "indexes")
            for path in sorted((data / name).iterdir())}  # fmt: skip


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every array and plain value within a catalogue, by its path; of caches none."""
    if isinstance(value, CowArray):
        value = value.array
    if isinstance(value, np.ndarray):
        yield path, (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, Vocabulary):
        yield path, list(value.ids)
    elif isinstance(value, CowList):
        yield path, list(value)
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from flat(value[name], f"{path}.{name}")
    elif isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from flat(each, f"{path}.{at}")
    elif is_dataclass(value):
        for one in fields(value):
            if one.name not in {"_history", "_mask_cache", "_sample_cache"}:
                yield from flat(getattr(value, one.name), f"{path}.{one.name}")
    elif isinstance(value, str | int | float | complex | None):
        yield path, repr(value)


def assert_same(first: Snapshot, second: Snapshot) -> None:
    """Check that two catalogues have the same bits, and answers by words and by indexes too."""
    left, right = dict(flat(first.catalogue)), dict(flat(second.catalogue))
    assert len(left) > 40
    assert left.keys() == right.keys()
    assert [path for path in left if left[path] != right[path]] == []
    for query in QUERIES:
        assert answers(first.catalogue, query) == answers(second.catalogue, query)
    queries = np.random.default_rng(0).normal(size=(20, first.catalogue.dimension))
    for one, other in ((first.index, second.index), (first.key_index, second.key_index)):
        assert one is not None
        assert other is not None
        found, same = (index.search(queries.astype(np.float32), 10) for index in (one, other))
        assert found.tolist() == same.tolist()


def answers(catalogue: Catalogue, query: str) -> list[Any]:
    """The query as it is parsed, and what the index of words answers to it."""
    index = catalogue.bm25_index
    assert index is not None
    parsed = index.parser.parse(query)
    hits, (rows, levels, names, _) = (
        index.search(parsed, 50, catalogue.visible),
        index.keyword_hits(parsed),
    )
    return [parsed, hits.rows.tolist(), hits.scores.tolist(), rows.tolist(), levels.tolist(), names]


async def test_a_second_start_computes_nothing_and_has_the_same_bits(
    data: Path, work: Work
) -> None:
    """A start from the caches has what a start from the store has."""
    cold = await opened(data, cached=False)
    assert work.texts
    assert work.built
    await opened(data)
    assert {path.stat().st_mode & 0o777 for path in files(data)} == {0o600}
    work.texts = work.built = 0
    assert_same(cold, await opened(data))
    assert work == Work()


async def test_nothing_of_users_is_in_the_caches(world: World, tmp_path: Path, work: Work) -> None:
    """With a model, a start after new events and forgotten users computes nothing either."""
    data = world.copy(tmp_path / "data")
    await opened(data)
    before = files(data)
    store = SQLiteStore(data / STORE_FILE)
    await store.append([Event("someone", item_id(1, 2))])
    for user in [*store.scan_user_ids()][:20]:
        await store.forget(user)
    await store.close()
    work.texts = work.built = 0
    await opened(data)
    assert work == Work()
    assert files(data) == before


async def test_later_changes_have_the_same_result(data: Path) -> None:
    """Items that are written to a service which began with the cache end as without it."""
    later = [Item("item-3", title="Rubber boots", attributes={"price": 2}), Item("new", title="X")]
    twin = data / "twin"
    twin.mkdir()
    (twin / STORE_FILE).write_bytes((data / STORE_FILE).read_bytes())
    await opened(data)
    without = await opened(twin, cached=False, then=later)
    assert_same(without, await opened(data, then=later))
    assert_same(await opened(twin, cached=False), await opened(data))  # as of a changed catalogue


async def test_changed_items_or_settings_are_not_answered_from_the_cache(
    data: Path, work: Work
) -> None:
    """After a change of an item, of one row in the file, or of keywords, the store is read."""
    await opened(data)
    await opened(data, then=[Item("item-3", title="Rubber boots")])
    served = (await opened(data)).catalogue
    assert served.titles[served.row("item-3")] == "Rubber boots"
    work.texts = 0
    changed = await opened(data, keywords=("price",))
    assert work.texts
    assert_same(await opened(data, cached=False, keywords=("price",)), changed)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
async def test_damaged_files_are_made_again(data: Path, work: Work, damage: str) -> None:
    """Whichever file is damaged or gone, the start reads the store, and the next one the cache."""
    cold = await opened(data, cached=False)
    await opened(data)
    names = [*files(data)]
    assert len(names) == 5
    for path in names:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
        for is_whole in (False, True):
            work.texts = work.built = 0
            assert_same(cold, await opened(data))
            assert (work == Work()) == is_whole


async def test_another_catalogue_leaves_nothing_of_the_last(data: Path) -> None:
    """The texts of a deleted item are gone from the cache after the next start."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        await store.put_items([Item("secret", title="Xylophonist")])
        await opened(data)
        assert any(b"Xylophonist" in content for content in files(data).values())
        await store.delete_item("secret")
    finally:
        await store.close()
    await opened(data)
    assert not any(b"Xylophonist" in content for content in files(data).values())
