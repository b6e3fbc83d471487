"""Training from a store: the corpus, refusals, published metadata and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.recommender.artifact import WEIGHTS_FILE, TrainedModel
from models.text.encoders import StaticEncoder
from models.training.checkpoint import Checkpoint
from models.training.fit import TrainingProgress
from models.training.presets import Preset
from service.domain.errors import ModelRejected, StoreFull
from service.domain.records import Event, Item
from service.runtime.data_layout import CHECKPOINT_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from tests.support.tiny import NOON, QUICK, SECOND, World, events, item_id, items

pytestmark = pytest.mark.verify

FAST = replace(
    QUICK,
    train_config=replace(QUICK.train_config, epochs=2, attention_epochs=1, final_epochs=1),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    opened = SQLiteStore(tmp_path / STORE_FILE)
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / MODELS_FOLDER)


@pytest.fixture
def embeddings() -> EmbeddingCache:
    return EmbeddingCache(StaticEncoder())


def fill(store: SQLiteStore, sent: list[Event], stock: list[Item] | None = None) -> None:
    async def put() -> None:
        await store.put_items(items() if stock is None else stock)
        await store.append(sent)

    asyncio.run(put())


def train(
    corpus: training_corpus.TrainingCorpus, registry: Registry, preset: Preset = FAST, **more: Any
) -> dict[str, Any]:
    return train_and_publish.train(corpus, registry, StaticEncoder.name, preset=preset, **more)


# ------------------------------------------------------------------ what it reads


def test_corpus_contains_every_event_and_the_text_of_their_items(
    store: SQLiteStore, embeddings: EmbeddingCache
) -> None:
    sent = [*events(), Event("u0", "bare", "bare", weight=2.5, timestamp=NOON)]
    fill(store, sent, [*items(), Item("untouched", title="nobody saw it")])
    corpus = training_corpus.read_store(store, embeddings)
    assert set(corpus.item_ids) == {event.item_id for event in sent}
    assert corpus.content.shape == (len(corpus.item_ids), 256)
    lengths = np.linalg.norm(corpus.content, axis=1)
    bare = corpus.item_ids.index("bare")
    assert lengths[bare] == 0
    np.testing.assert_allclose(np.delete(lengths, bare), 1, atol=1e-5)
    told = {
        (corpus.item_ids[item], int(time), float(weight))
        for item, time, weight in zip(
            corpus.log.items, corpus.log.timestamps, corpus.log.weights, strict=True
        )
    }
    assert told == {(event.item_id, event.timestamp, event.weight) for event in sent}
    assert len(corpus.log) == len(sent)
    for user in range(corpus.log.n_users):
        times = corpus.log.timestamps[corpus.log.offsets[user] : corpus.log.offsets[user + 1]]
        assert np.all(np.diff(times) >= 0)


def test_embeddings_of_another_dimension_do_not_stop_it(
    store: SQLiteStore, embeddings: EmbeddingCache
) -> None:
    odd = replace(items()[0], embedding=np.ones(3, np.float32))
    fill(store, events(), [odd, *items()[1:]])
    corpus = training_corpus.read_store(store, embeddings)
    assert np.linalg.norm(corpus.content[corpus.item_ids.index(odd.item_id)]) > 0


def shopping(users: int = 40, baskets: int = 10) -> list[Event]:
    """Baskets a week apart, of two of a user's three staples and of what is new that month."""
    rng = np.random.default_rng(0)
    sent = []
    for user in range(users):
        staples = rng.permutation(20)[:3]
        for week in range(baskets):
            time = NOON + week * 7 * 86_400 * SECOND + user * SECOND
            for at, item in enumerate([*rng.permutation(staples)[:2].tolist(), 20 + week // 4]):
                event_id = f"{user}-{week}-{at}"
                sent.append(Event(f"u{user}", f"p{item}", event_id, timestamp=time))
    return sent


def test_users_forgotten_during_a_training_are_counted_in_its_model(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache
) -> None:
    fill(store, shopping(users=20))
    preset = replace(QUICK, train_config=replace(QUICK.train_config, batch_tokens=480))
    told = []
    for user_id in ("u3", None):
        earlier = asyncio.run(store.count_forgotten(0))
        corpus = training_corpus.read_store(store, embeddings)
        if user_id is not None:
            assert asyncio.run(store.forget(user_id)) == 30
        counted = partial(lambda since: asyncio.run(store.count_forgotten(0)) - since, earlier)
        done = train(corpus, registry, preset, count_forgotten=counted)
        published = {each.version: each.metadata or {} for each in registry.versions()}
        metadata = published[done["version"]]
        told.append((metadata["events"], metadata.get("forgotten_users")))
    assert told == [(600, 1), (570, None)]


def test_a_log_of_baskets_is_trained_and_served_as_one(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache
) -> None:
    fill(store, shopping())
    corpus = training_corpus.read_store(store, embeddings)
    preset = replace(QUICK, train_config=replace(QUICK.train_config, batch_tokens=480))
    done = train(corpus, registry, preset)
    assert done["metrics"]["cases"] == 40 * 3
    trained = TrainedModel.from_files(registry.load(done["version"]))
    assert (trained.model.config.next_basket, trained.model.config.repeat_consumption) == (
        True,
        True,
    )


def test_a_log_without_times_is_no_log_of_baskets(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache
) -> None:
    fill(store, [replace(event, timestamp=NOON) for event in events()])
    corpus = training_corpus.read_store(store, embeddings)
    done = train(corpus, registry, QUICK)
    assert done["metrics"]["cases"] == corpus.log.n_users
    assert "popularity of 7 days" not in done["baselines"]
    assert (
        "held-out events, drawn at random since most have no time of their own" in done["sentence"]
    )
    assert "basket" not in done["sentence"]
    config = TrainedModel.from_files(registry.load(done["version"])).model.config
    assert not config.next_basket


def test_ratings_without_times_are_not_newer_than_dated_orders(
    store: SQLiteStore, embeddings: EmbeddingCache
) -> None:
    """Events that a file gave no time are counted, and no user's last event is one of them."""
    orders = events()
    fill(store, orders)
    ratings = [replace(e, event_id=None, type="rating", timestamp=None) for e in orders[::3]]
    asyncio.run(store.append(ratings))
    corpus = training_corpus.read_store(store, embeddings)
    assert corpus.has_times
    assert corpus.without_time == len(ratings)
    last = corpus.log.types[corpus.log.offsets[1:] - 1]
    assert "rating" not in {corpus.types[kind] for kind in last}


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ([], "there are no events to learn from: import some with `heed import`"),
        (events()[: train_and_publish.MIN_EVENTS - 1], "99 events are too few to train on; 100"),
        (events(users=80, each=2), "no user has three events"),
        (
            [replace(event, type="dislike") for event in events(users=60)],
            "every event is a dislike or a return:",
        ),
    ],
)
def test_a_log_with_nothing_to_learn_is_refused(
    store: SQLiteStore,
    registry: Registry,
    embeddings: EmbeddingCache,
    sent: list[Event],
    why: str,
) -> None:
    fill(store, sent)
    with pytest.raises(ModelRejected, match=f"^{why}"):
        train(training_corpus.read_store(store, embeddings), registry)
    assert registry.versions() == []


def test_one_user_proves_nothing(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache
) -> None:
    fill(store, [replace(event, user_id="u0") for event in events(users=12)])
    corpus = training_corpus.read_store(store, embeddings)
    try:
        said = train(corpus, registry)["sentence"]
    except ModelRejected as error:  # popularity ranks the one event as well
        said = error.detail
    assert registry.current() is None
    assert "of 100" not in said
    assert "1 user are too few to tell" in said or "popularity stays served" in said


def crowd() -> list[Event]:
    """Every user's last item is the only unseen one, so no model can beat popularity."""
    return [
        Event(
            f"u{user}",
            item_id(0, (n + 5 * (user % 2)) % 6),
            f"{user}-{n}",
            timestamp=NOON + n * SECOND,
        )
        for user in range(60)
        for n in range(6)
    ]


def test_a_model_that_does_not_beat_popularity(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache, checkpoint: Path
) -> None:
    """It is not published, leaves no checkpoint, and both figures are reported."""
    fill(store, crowd())
    corpus = training_corpus.read_store(store, embeddings)
    with pytest.raises(ModelRejected, match=r"NDCG@10 1\.0000 .* popularity 1\.0000"):
        train(corpus, registry, checkpoint=checkpoint)
    assert registry.versions() == []
    assert not checkpoint.exists()


# ------------------------------------------------------------------ what it publishes


def test_published_metadata_describe_the_model(world: World) -> None:
    registry = Registry(world.data / MODELS_FOLDER)
    listed = {version.version: version for version in registry.versions()}
    assert listed.keys() == {world.first, world.second}
    assert listed[world.first].current
    metadata = listed[world.first].metadata
    assert metadata is not None
    assert (metadata["items"], metadata["events"]) == (60, 480)
    assert metadata["seed"] == 1
    assert 1 <= metadata["epoch"] <= QUICK.train_config.epochs + QUICK.train_config.attention_epochs
    assert metadata["preset"] == QUICK.name
    metrics = metadata["metrics"]
    assert metrics["ndcg"] > metrics["popularity_ndcg"]
    assert metrics["hr"] > metrics["popularity_hr"]
    assert metrics["cases"] == 40
    assert metrics["user_hr"] == metrics["hr"]  # one case each
    names = ["popularity", "popularity of 7 days", "EASE", "transition counts"]
    assert sorted(metadata["baselines"]) == sorted(names)
    best = max(names, key=lambda name: metadata["baselines"][name]["ndcg"])
    assert metadata["best_baseline"] == best
    model = TrainedModel.from_files(registry.load(world.first))
    assert set(model.item_ids) == {item.item_id for item in items()}
    assert model.text_encoder == StaticEncoder.name
    assert model.model.config.as_dict() == metadata["model_config"]
    # The events it was judged on are learned from at last.
    assert int(model.item_counts.sum()) == 480


def test_the_seed_decides_the_model(
    store: SQLiteStore, registry: Registry, embeddings: EmbeddingCache
) -> None:
    """Equal seeds give equal bytes, and progress rises through all stages."""
    fill(store, events())
    stages: list[tuple[str, int, int]] = []
    epochs: list[TrainingProgress] = []

    def told(stage: str, done: int, total: int, progress: TrainingProgress | None) -> None:
        stages.append((stage, done, total))
        if progress is not None:
            epochs.append(progress)

    corpus = training_corpus.read_store(store, embeddings, told)
    weights = []
    for seed in (3, 3, 4):
        result = train(corpus, registry, seed=seed, activate=False, progress=told)
        weights.append(registry.load(result["version"])[WEIGHTS_FILE])
        assert registry.current() is None
    assert weights[0] == weights[1] != weights[2]
    assert list(dict.fromkeys(stage for stage, *_ in stages)) == [
        "reading events", "reading items", "encoding texts", "training",
        "baseline: popularity", "baseline: popularity of 7 days", "baseline: EASE",
        "baseline: transition counts", "comparing with what is served",
    ]  # fmt: skip
    one = [(done, total) for stage, done, total in stages if stage == "training"][
        : len(epochs) // 3
    ]
    shares = [done / total for done, total in one]
    assert shares == sorted(set(shares))
    assert (shares[0] > 0, shares[-1]) == (True, 1.0)
    assert {progress.epochs for progress in epochs} == {4}
    assert list(dict.fromkeys(progress.epoch for progress in epochs)) == [1, 2, 3, 4]


# ------------------------------------------------------------------ what it keeps meanwhile


class Killed(BaseException):
    """In place of SIGKILL."""


class Killing:
    """Progress callback that raises `Killed` at the first step of an epoch."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.stages: list[str] = []
        self.epochs: list[int] = []

    def __call__(
        self, stage: str, done: int, total: int, progress: TrainingProgress | None
    ) -> None:
        self.stages.append(stage)
        if progress is not None:
            self.epochs.append(progress.epoch)
            if progress.epoch == self.epoch:
                raise Killed


@pytest.fixture
def corpus(store: SQLiteStore, embeddings: EmbeddingCache) -> training_corpus.TrainingCorpus:
    """What is learned of the small world."""
    fill(store, events())
    return training_corpus.read_store(store, embeddings)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / CHECKPOINT_FILE


def test_killed_training_is_resumed(
    corpus: training_corpus.TrainingCorpus, registry: Registry, tmp_path: Path, checkpoint: Path
) -> None:
    def weights_of(registry: Registry, told: Killing, path: Path | None) -> bytes:
        result = train(corpus, registry, seed=9, progress=told, checkpoint=path)
        return bytes(registry.load(result["version"])[WEIGHTS_FILE])

    for epoch in (2, 3, 4):
        with pytest.raises(Killed):
            weights_of(registry, Killing(epoch), checkpoint)
        assert Checkpoint.from_bytes(checkpoint.read_bytes()).history[-1]["epoch"] == epoch - 1
        assert registry.versions() == []
    told = Killing()
    weights = weights_of(registry, told, checkpoint)
    assert told.stages[0] == "resuming from the checkpoint"
    assert set(told.epochs) == {4}
    assert not checkpoint.exists()
    whole = Killing()
    assert weights_of(Registry(tmp_path / "other"), whole, None) == weights
    assert set(whole.epochs) == {1, 2, 3, 4}
    assert "resuming from the checkpoint" not in whole.stages


def test_checkpoint_of_other_events_is_ignored(
    corpus: training_corpus.TrainingCorpus,
    registry: Registry,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The training starts from the beginning and logs it; also when the checkpoint is damaged."""
    with pytest.raises(Killed):
        train(corpus, registry, progress=Killing(2), checkpoint=checkpoint)
    left, times = checkpoint.read_bytes(), corpus.log.timestamps + SECOND
    later = replace(corpus, log=replace(corpus.log, timestamps=times))
    for data, why, which in (
        (left, "of another training", later),
        (left[:-9], "damaged", corpus),
        (b"", "no checkpoint", corpus),
    ):
        checkpoint.write_bytes(data)
        caplog.clear()
        told = Killing()
        train(which, registry, progress=told, checkpoint=checkpoint)
        assert why in caplog.text
        assert "training starts from the beginning" in caplog.text
        assert set(told.epochs) == {1, 2, 3, 4}
        assert not checkpoint.exists()


def test_a_model_that_cannot_be_published_keeps_its_checkpoint(
    corpus: training_corpus.TrainingCorpus,
    registry: Registry,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> str:
        raise StoreFull("the disk has no room for a model")

    with monkeypatch.context() as patched:
        patched.setattr(registry, "publish", full)
        with pytest.raises(StoreFull):
            train(corpus, registry, checkpoint=checkpoint)
    told = Killing()
    train(corpus, registry, progress=told, checkpoint=checkpoint)
    assert told.epochs == []
    assert len(registry.versions()) == 1
    assert not checkpoint.exists()


def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_training(
    corpus: training_corpus.TrainingCorpus,
    registry: Registry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nowhere = tmp_path / "missing" / "folder"
    train(corpus, registry, checkpoint=nowhere)
    assert caplog.text.count("the checkpoint could not be written") == 4
    assert len(registry.versions()) == 1
