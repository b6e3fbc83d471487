"""Comparison of Heed with the baselines, and ablations, on the same cases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation import baselines
from models.text.encoders import StaticEncoder
from models.training.presets import TrainingPlan
from service.domain.errors import ModelRejected
from service.lab import comparison
from service.lab.protocols import leave_one_out_5_core
from service.runtime.data_layout import STORE_FILE
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from tests.support.tiny import QUICK, World

FAST = replace(QUICK, train_config=replace(QUICK.train_config, epochs=6, attention_epochs=1))


@pytest.fixture(scope="module")
def corpus(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> training_corpus.TrainingCorpus:
    data = world.copy(tmp_path_factory.mktemp("compared") / "data", trained=False)
    store = SQLiteStore(data / STORE_FILE)
    try:
        return training_corpus.read_store(store, EmbeddingCache(StaticEncoder()))
    finally:
        asyncio.run(store.close())


def test_ablations_train_without_each_part(
    corpus: training_corpus.TrainingCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking: list[list[str]] = []
    real = train_and_publish.fit_model

    def seen(plan: TrainingPlan, *more: Any) -> Any:
        logs = (plan.log, plan.validation, plan.every_event)
        lacks = {
            "transitions": not plan.model_config.transitions_per_item,
            "times": not any(each.timestamps.any() for each in logs if each is not None),
            "times of requests": plan.train_config.request_time_share == 0,
            "requests at no time": plan.train_config.request_time_share == 1,
            "text": not plan.content.any(),
            "the encoder": not plan.model_config.blocks,
        }
        lacking.append([name for name, lacks_it in lacks.items() if lacks_it])
        return real(plan, *more)

    monkeypatch.setattr(comparison, "fit_model", seen)
    task = leave_one_out_5_core(corpus.log)
    short = replace(FAST, train_config=replace(FAST.train_config, epochs=1))
    table = comparison.compare(task, corpus.content[task.items], short, ablate=True)
    assert lacking[0] == []
    names = [name for (name,) in lacking[1:]]
    rows = [name.removeprefix("heed without ") for name in list(table)[4:]]
    assert rows == ["heed", "final epochs", "the target in the query", *names]
    assert len(set(names)) == 6
    assert {metrics.n_cases for row in table.values() for metrics in row.test} == {40}


def test_recent_popularity_needs_times_and_ease_a_small_catalogue(
    corpus: training_corpus.TrainingCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log without times has no last week, and a catalogue too large for EASE goes without it."""
    log = replace(corpus.log, timestamps=np.zeros_like(corpus.log.timestamps))
    task = leave_one_out_5_core(log)
    short = replace(FAST, train_config=replace(FAST.train_config, epochs=1, attention_epochs=0))
    monkeypatch.setattr(baselines, "MAX_EASE_ITEMS", task.train.n_items - 1)
    table = comparison.compare(task, corpus.content[task.items], short)
    assert list(table) == ["popularity", "transition counts", "heed", "heed without final epochs"]


@pytest.mark.parametrize("again", [False, True])
def test_seen_items_stay_candidates_where_they_come_back(again: bool) -> None:
    """A split at a date ranks seen items, and personal repeats, only if users take items again."""
    users, steps = np.repeat(np.arange(5), 10), np.tile(np.arange(10), 5)
    log = Interactions.from_columns(
        users, steps % 4 if again else steps, steps, n_users=5, n_items=10
    )
    (task,) = comparison.split(log, "global-time", date=8)
    assert task.exclude_seen is not again
    assert task.date == 8
    assert set(task.test.timestamps.tolist()) <= {8, 9}


def test_a_date_without_events_is_rejected() -> None:
    log = Interactions.from_columns([0, 0], [0, 1], [1, 2], n_users=1, n_items=2)
    with pytest.raises(ModelRejected, match="no user to test on"):
        comparison.split(log, "global-time", date=3)
