"""A small seeded world: 60 items of four genres, 40 users who walk through the genre they like."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.text.encoders import StaticEncoder
from models.training.presets import Preset, TrainConfig
from service.domain.records import Event, Item
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from tests.support.stores import run_on

WORDS = {
    "space": "rocket planet orbit astronaut comet galaxy telescope moon",
    "cooking": "soup bread oven recipe garlic pepper dough sauce",
    "history": "empire castle king medieval war treaty dynasty ruins",
    "music": "guitar violin melody orchestra drum choir rhythm jazz",
}
GENRES = tuple(WORDS)
EACH = 15  # items of a genre
SECOND = 1_000_000  # microseconds
DAY = 86_400 * SECOND
NOON = 1_767_268_800 * SECOND  # after everything that happened
AT = "2026-01-01T12:00:00Z"  # the same, as the wire has it

# A whole training in a few seconds: the batches are as small as the world.
QUICK = Preset(
    "tiny",
    dim=32,
    blocks=2,
    dropout=0.1,
    transitions_per_item=20,
    train_config=TrainConfig(
        epochs=10,
        attention_epochs=4,
        batch_tokens=120,
        attention_batch_tokens=120,
        warmup_steps=20,
        learning_rate=3e-3,
        ema_decay=0.9,
    ),
)


@dataclass(frozen=True)
class World:
    """A data directory that must stay as it is, and the two models published in it."""

    data: Path
    first: str  # the current one
    second: str

    def copy(self, path: Path, *, trained: bool = True) -> Path:
        """A data directory of one's own, with the models or without."""
        shutil.copytree(self.data, path)
        if not trained:
            shutil.rmtree(path / MODELS_FOLDER)
        return path


def item_id(genre: int, number: int) -> str:
    """The id of an item: its genre and its place in the walk."""
    return f"{GENRES[genre]}-{number % EACH:02}"


def items(seed: int = 0) -> list[Item]:
    """All items, the genres one after the other."""
    random = np.random.default_rng(seed)

    def item(genre: int, number: int) -> Item:
        name = GENRES[genre]
        words = WORDS[name].split()
        return Item(
            item_id(genre, number),
            title=" ".join(random.choice(words, 3, replace=False)),
            description=f"all about {' and '.join(random.choice(words, 2))}",
            tags=(str(random.choice(words)),),
            categories=(name, "even" if number % 2 == 0 else "odd"),
            attributes={"number": number, "language": ("en", "de")[number % 2]},
            published_at=NOON - (1 + number) * DAY,
        )

    return [item(genre, number) for genre in range(len(GENRES)) for number in range(EACH)]


def events(seed: int = 0, users: int = 40, each: int = 12) -> list[Event]:
    """Events of each user: mostly the next item of their genre, a minute to a day later."""
    random = np.random.default_rng(seed)
    made = []
    for user in range(users):
        genre, place = user % len(GENRES), int(random.integers(EACH))
        time = NOON - 40 * DAY
        for number in range(each):
            stray = random.random() < 0.1
            item = item_id(int(random.integers(len(GENRES))) if stray else genre, place + number)
            time += int(random.integers(60, 86_400)) * SECOND
            made.append(Event(f"u{user}", item, f"e{user}-{number}", timestamp=time))
    return made


def populate(data: Path) -> None:
    data.mkdir(parents=True, exist_ok=True)
    run_on(
        SQLiteStore(data / STORE_FILE),
        lambda store: store.put_items(items()),
        lambda store: store.append(events()),
    )


def train(data: Path, preset: Preset = QUICK, *, seed: int = 0, activate: bool = True) -> str:
    """Publish a model trained on a data directory; its version."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        embeddings = EmbeddingCache(StaticEncoder(), data / EMBEDDINGS_FILE)
        corpus = training_corpus.read_store(store, embeddings)
        result = train_and_publish.train(
            corpus,
            Registry(data / MODELS_FOLDER),
            embeddings.encoder.name,
            preset=preset,
            seed=seed,
            activate=activate,
        )
    finally:
        asyncio.run(store.close())
    return str(result["version"])


def make(data: Path) -> World:
    """The world in a new data directory, with two models trained on it."""
    populate(data)
    return World(data, train(data, seed=1), train(data, seed=2, activate=False))
