"""Data of the peers: MovieLens without the held-out events, and a model trained on it.

Everyone fits on the same events, chooses by the same validation events, and serves the same
histories; what each user did last is in none of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.recommender.artifact import TrainedModel
from models.training.presets import Preset, choose_preset
from service.datasets.movielens import fetch as fetch_movielens
from service.domain.records import Event
from service.domain.settings import Settings
from service.lab.protocols import EvaluationTask, leave_one_out_5_core
from service.runtime.data_layout import CACHE_FOLDER, EMBEDDINGS_FILE, MODELS_FOLDER
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache, open_encoder
from service.training import training_corpus
from service.training.train_and_publish import fit_model
from service.training.training_corpus import TrainingCorpus
from tests.benchmarks.harness.data import fill
from tests.benchmarks.harness.tables import OUT

PEERS_FOLDER = "peers"
ARRAYS = "arrays.npz"  # what peers read: they import nothing of Heed's
USER = "user {}".format


@dataclass(frozen=True, slots=True)
class PeerData:
    """A data directory to serve, and beside it what peers read."""

    data: Path
    preset: Preset
    task: EvaluationTask
    item_ids: tuple[str, ...]  # rows of the task's items

    @property
    def arrays(self) -> Path:
        """Events to fit on, cases to choose by, and histories to serve."""
        return self.data / ARRAYS


def prepare(dataset: str, data: Path) -> PeerData:
    """Import and train, unless that was done here before.

    Args:
        dataset: of MovieLens, fetched if it is missing.
        data: a folder for caches and for what is made.

    Raises:
        Unavailable: when it could not be fetched.
    """
    source = fetch_movielens(dataset, data / CACHE_FOLDER)
    encoder = open_encoder(Settings.read().encoder)
    corpus = training_corpus.read_dataset(source, EmbeddingCache(encoder, data / EMBEDDINGS_FILE))
    task = leave_one_out_5_core(corpus.log)
    preset = choose_preset(len(task.train), task.train.n_items)
    item_ids = tuple(corpus.item_ids[row] for row in task.items)
    folder = data / PEERS_FOLDER / f"{dataset}-{preset.name}"
    ground = PeerData(folder, preset, task, item_ids)
    if folder.is_dir():
        return ground
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        with OUT.status(f"importing {dataset}, and training Heed"):
            kept = frozenset(item_ids)
            items = (item for item in source.items() if item.item_id in kept)
            fill(temporary, items, _events(ground))
            _train(temporary, ground, corpus, encoder.name)
            _save(temporary / ARRAYS, task)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ground


def _events(ground: PeerData) -> Iterator[Event]:
    """The events that may be seen."""
    log = ground.task.test.history
    rows = zip(log.users.tolist(), log.items.tolist(), log.timestamps.tolist(), strict=True)
    for user, item, time in rows:
        yield Event(USER(user), ground.item_ids[item], None, "rating", 1.0, time)


def _train(folder: Path, ground: PeerData, corpus: TrainingCorpus, encoder: str) -> None:
    task = ground.task
    content = corpus.content[task.items]
    done = fit_model(ground.preset.plan(task.train, content, task.validation))
    counts = task.train.liked().item_counts()
    types = corpus.types[: done.model.config.n_event_types]
    trained = TrainedModel(done.model, ground.item_ids, counts, encoder, {}, types)
    Registry(folder / MODELS_FOLDER).publish(trained.to_files(), {})


def _save(path: Path, task: EvaluationTask) -> None:
    assert task.validation is not None  # leave-one-out has cases to choose by
    arrays: dict[str, NDArray[np.generic]] = {
        f"{name}_{column}": getattr(log, column)
        for name, log in (("train", task.train), ("history", task.test.history))
        for column in ("users", "items", "timestamps")
    }
    arrays["chosen_users"] = task.validation.users
    arrays["chosen_targets"] = task.validation.targets
    arrays["items"] = np.array(task.train.n_items)
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stubs know no keywords
