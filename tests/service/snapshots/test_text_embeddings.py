"""The cache of text embeddings: each text is encoded once, despite restarts and damage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.text.static_encoder import StaticEncoder
from service.domain.records import Item
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder
from tests.support import asking

Vectors = NDArray[np.float32]


class Counting:
    """An encoder that records the texts it encodes."""

    def __init__(self, name: str = "counting", dimension: int = 6) -> None:
        self.name = name
        self.dimension = dimension
        self.quick = True
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.asked += texts
        seeds = [list(text.encode()) for text in texts]
        drawn = [np.random.default_rng(seed).normal(size=self.dimension) for seed in seeds]
        unit = [vector / np.linalg.norm(vector) for vector in drawn]
        return np.array(unit, dtype=np.float32).reshape(-1, self.dimension)


TEXTS = ["a", "b", "c", "a", "ü"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "embeddings.bin"


def test_each_text_is_encoded_once(path: Path) -> None:
    """Repeated texts get the same vector, which is the encoder's to half precision."""
    encoder = Counting()
    embeddings = EmbeddingCache(encoder, path)
    found = embeddings.encode(TEXTS)
    embeddings.encode(["c", "d"])
    assert encoder.asked == ["a", "b", "c", "ü", "d"]
    np.testing.assert_array_equal(found[0], found[3])
    np.testing.assert_allclose(found, Counting().encode(TEXTS), atol=1e-3)
    assert found.dtype == np.float32
    assert embeddings.encode([]).shape == (0, 6)


def test_a_restart_changes_no_vector(path: Path) -> None:
    """After a restart the vectors are equal bit for bit, and nothing is encoded again."""
    first = EmbeddingCache(Counting(), path)
    before = first.encode(TEXTS)
    first.save()
    encoder = Counting()
    second = EmbeddingCache(encoder, path)
    np.testing.assert_array_equal(second.encode(TEXTS), before)
    assert encoder.asked == []
    second.encode(["more"])
    second.save()
    assert len(EmbeddingCache(Counting(), path).encode([*TEXTS, "more"])) == 6
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_new_is_nothing_written(path: Path) -> None:
    """Saving without new vectors leaves the file unchanged; without a path nothing is written."""
    embeddings = EmbeddingCache(Counting(), path)
    embeddings.save()
    assert not path.exists()
    embeddings.encode(TEXTS)
    embeddings.save()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    embeddings.encode(TEXTS)
    embeddings.save()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    EmbeddingCache(Counting()).save()


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_file_is_made_anew(path: Path, seed: int) -> None:
    """A truncated or changed file is ignored and its texts are encoded again."""
    embeddings = EmbeddingCache(Counting(), path)
    before = embeddings.encode(TEXTS)
    embeddings.save()
    whole = path.read_bytes()
    random = np.random.default_rng(seed)
    place = int(random.integers(len(whole)))
    if seed % 2:
        damaged = whole[:place]
    else:
        damaged = whole[:place] + bytes([whole[place] ^ 1 << seed % 8]) + whole[place + 1 :]
    path.write_bytes(damaged)
    encoder = Counting()
    np.testing.assert_array_equal(EmbeddingCache(encoder, path).encode(TEXTS), before)
    assert encoder.asked == ["a", "b", "c", "ü"]


def test_another_encoders_file_is_not_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file of another encoder is ignored with a warning."""
    assert not is_of_other_encoder(path, "counting")
    embeddings = EmbeddingCache(Counting(), path)
    embeddings.encode(TEXTS)
    embeddings.save()
    other = Counting("another", dimension=3)
    assert EmbeddingCache(other, path).encode(TEXTS).shape == (5, 3)
    assert other.asked == ["a", "b", "c", "ü"]
    assert [is_of_other_encoder(path, name) for name in ("counting", "another")] == [False, True]
    for text in (str(path), "encoder counting, which are not used", "again by another"):
        assert text in caplog.text


def test_encoding_reports_progress(path: Path) -> None:
    """Progress is reported for new texts and not for cached ones."""
    texts = [f"text {number}" for number in range(300)]
    embeddings = EmbeddingCache(Counting(), path)
    told: list[tuple[int, int]] = []
    vectors = embeddings.encode(texts, lambda *far: told.append(far))
    np.testing.assert_allclose(vectors, Counting().encode(texts), atol=1e-3)
    assert told[-1] == (300, 300)
    assert len(told) > 1
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    told.clear()
    embeddings.encode(texts[:3], lambda *far: told.append(far))
    assert told == []


def test_no_room_for_the_file_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be written gives a warning, and is saved later."""
    blocked = tmp_path / "file"
    blocked.touch()
    embeddings = EmbeddingCache(Counting(), blocked / "embeddings.bin")
    before = embeddings.encode(TEXTS)
    with caplog.at_level(logging.WARNING):
        embeddings.save()
    assert "not saved" in caplog.text
    np.testing.assert_array_equal(embeddings.encode(TEXTS), before)
    blocked.unlink()
    embeddings.save()
    assert (blocked / "embeddings.bin").exists()


def test_a_query_is_the_encoders_own_vector() -> None:
    """A query has the encoder's unrounded vector and is encoded once."""
    encoder = Counting()
    embeddings = EmbeddingCache(encoder)
    for _ in range(3):
        np.testing.assert_array_equal(embeddings.query("q"), Counting().encode(["q"])[0])
    assert encoder.asked == ["q"]
    assert embeddings.encoder is encoder


def test_threads_share_it(path: Path) -> None:
    """Threads encode each text once and get correct vectors."""
    encoder = Counting()
    embeddings = EmbeddingCache(encoder, path)
    batches = [[f"text {n}" for n in range(start, start + 30)] for start in range(0, 100, 5)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(embeddings.encode, batches))
    assert sorted(encoder.asked) == sorted({text for batch in batches for text in batch})
    for batch, vectors in zip(batches, found, strict=True):
        np.testing.assert_allclose(vectors, Counting().encode(batch), atol=1e-3)


@pytest.mark.anyio
@pytest.mark.parametrize("quick", [True, False])
async def test_the_loop_does_not_wait_for_a_slow_encoder(tmp_path: Path, quick: bool) -> None:
    """A slow encoder encodes queries on another thread, a quick one on the event loop."""
    seen: list[str] = []

    class Watched(StaticEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.quick = quick

        def encode(self, texts: Sequence[str]) -> Vectors:
            seen.append(threading.current_thread().name)
            return super().encode(texts)

    engine = await open_engine(Settings(data=tmp_path), encoder=Watched())
    try:
        await engine.live.catalogue.put_items([Item("i", title="A quiet river")])
        await asking.ask(engine, asking.search(asking.who(), "river"))
        seen.clear()
        await asking.ask(engine, asking.search(asking.who(), "a loud river"))
    finally:
        await engine.close()
    assert [name == threading.current_thread().name for name in seen] == [quick]


def test_a_folder_that_was_removed_is_not_created_again(tmp_path: Path) -> None:
    """New embeddings do not bring the folder of a removed namespace back."""
    removed, missing = tmp_path / "removed", tmp_path / "missing"
    removed.mkdir()
    caches = [EmbeddingCache(Counting(), folder / "e.bin") for folder in (removed, missing)]
    removed.rmdir()
    for cache in caches:
        cache.encode(["a"])
        cache.save()
    assert [path.name for path in tmp_path.iterdir()] == ["missing"]
    caches[1].detach()
    before = (missing / "e.bin").read_bytes()
    caches[1].encode(["b"])
    caches[1].save()
    assert (missing / "e.bin").read_bytes() == before
