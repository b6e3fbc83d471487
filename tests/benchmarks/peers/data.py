"""Data of the peers: MovieLens without the held-out events, and a model trained on it.

Everyone fits on the same events, chooses by the same validation events, and serves the same
histories; what each user did last is in none of them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from models.data.interactions import Interactions
from models.recommender.artifact import TrainedModel
from models.training.presets import Preset, choose_preset
from service.cli import progress_bars
from service.cli.console import open_store
from service.datasets import imports
from service.datasets.base import Dataset
from service.datasets.movielens import fetch as fetch_movielens
from service.domain.records import Event, Item
from service.domain.settings import Settings
from service.lab.protocols import EvaluationTask, leave_one_out_5_core
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, MODELS_FOLDER
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.training import training_corpus
from service.training.train_and_publish import fit_model
from service.training.training_corpus import TrainingCorpus
from tests.support.small import events_of

PEERS_FOLDER = "peers"
ARRAYS = "arrays.npz"  # what peers read: they import nothing of Heed's
USER = "user {}".format
# 2030, the time of all questions, microseconds: so long after all events that it says nothing of
# when the held-out event came, which alone would say much of what it is.
ASKED = 1_893_456_000_000_000


@dataclass(frozen=True, slots=True)
class PeerData:
    """A data directory to serve, and beside it what peers read."""

    data: Path
    dataset: str
    preset: Preset
    task: EvaluationTask
    item_ids: tuple[str, ...]  # rows of the task's items

    @property
    def arrays(self) -> Path:
        """Events to fit on, cases to choose by, histories to serve, and the items' texts."""
        return self.data / ARRAYS

    def history(self, user: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Item rows and microseconds of all that may be seen of a user, oldest first."""
        seen = events_of(self.task.test.history, user)
        return seen.items, seen.timestamps


def prepare_data(
    dataset: str, data: Path, preset: str | None, epochs: int | None, console: Console
) -> PeerData:
    """Import and train, unless that was done here before with the same options.

    Args:
        dataset: of MovieLens, fetched where it is not there.
        data: where caches are and a folder is made.
        preset: of Heed's training; None = by the size of the log.
        epochs: instead of the preset's.
        console: for progress.

    Raises:
        Unavailable: when it could not be fetched.
    """
    source = fetch_movielens(dataset, data / CACHE_FOLDER)
    encoder = open_encoder(Settings.read().encoder)
    corpus = training_corpus.read_dataset(source, EmbeddingCache(encoder, data / EMBEDDINGS_FILE))
    task = leave_one_out_5_core(corpus.log)
    chosen = choose_preset(len(task.train), task.train.n_items, preset, epochs=epochs)
    item_ids = tuple(corpus.item_ids[row] for row in task.items)
    name = f"{dataset}-{chosen.name}-{chosen.train_config.epochs}-epochs"
    folder = data / PEERS_FOLDER / name
    ground = PeerData(folder, dataset, chosen, task, item_ids)
    if folder.is_dir():
        return ground
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        with open_store(temporary) as store:
            asyncio.run(imports.import_dataset(store, _Shown(source, ground)))
        content = corpus.content[task.items]
        _train(temporary, ground, corpus, content, encoder.name, console)
        arrays: dict[str, Any] = _arrays(task, content)
        np.savez(temporary / ARRAYS, **arrays)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ground


# ------------------------------------------------------------------------------ the parts


class _Shown(Dataset):
    """The items of a task, and the events that may be seen."""

    def __init__(self, source: Dataset, ground: PeerData) -> None:
        super().__init__(source.name)
        self._source, self._ground = source, ground
        self.progress = source.progress

    def items(self) -> Iterator[Item]:
        kept = frozenset(self._ground.item_ids)
        return (item for item in self._source.items() if item.item_id in kept)

    def events(self) -> Iterator[Event]:
        log = self._ground.task.test.history
        rows = zip(log.users.tolist(), log.items.tolist(), log.timestamps.tolist(), strict=True)
        for number, (user, item, time) in enumerate(rows):
            ids = self._ground.item_ids
            yield Event(USER(user), ids[item], f"{self.name}:{number}", "rating", 1.0, time)


def _train(
    folder: Path,
    ground: PeerData,
    corpus: TrainingCorpus,
    content: NDArray[np.float32],
    encoder: str,
    console: Console,
) -> None:
    """Publish the model of `heed evaluate`."""
    task, preset = ground.task, ground.preset
    with progress_bars.stage_bars(console) as progress:
        done = fit_model(preset.plan(task.train, content, task.validation), progress)
    counts = task.train.liked().item_counts()
    types = corpus.types[: done.model.config.n_event_types]
    trained = TrainedModel(done.model, ground.item_ids, counts, encoder, {}, types)
    described = {"preset": str(preset), "epoch": done.epoch, "seconds": round(done.seconds, 1)}
    Registry(folder / MODELS_FOLDER).publish(trained.to_files(), described)


def _arrays(task: EvaluationTask, content: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    def log(name: str, events: Interactions) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {
            "users": events.users,
            "items": events.items,
            "timestamps": events.timestamps,
        }
        return {f"{name}_{column}": values for column, values in columns.items()}

    assert task.validation is not None  # leave-one-out has cases to choose by
    return {
        **log("train", task.train),
        **log("history", task.test.history),
        "chosen_users": task.validation.users,
        "chosen_targets": task.validation.targets,
        "content": content,
    }
