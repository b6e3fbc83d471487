"""Training and serving on unusual logs: every loss, weight and score is finite."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.evaluation.full_ranking import evaluate
from models.evaluation.model_ranker import ModelRanker
from models.evaluation.splits import leave_one_out
from models.recommender.artifact import TrainedModel
from models.text.encoders import StaticEncoder
from service.domain.records import Event
from service.domain.settings import Settings
from service.engine.engine import Engine, open_engine
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from tests.support import asking
from tests.support.small import events_of
from tests.support.tiny import DAY, NOON, QUICK, SECOND, events, item_id, items

TINY = replace(
    QUICK,
    dim=16,
    blocks=1,
    train_config=replace(
        QUICK.train_config,
        epochs=1,
        attention_epochs=1,
        batch_tokens=1600,
        attention_batch_tokens=1600,
    ),
)
NAMES = [item.item_id for item in items()]


RNG = np.random.default_rng(0)
MADE = events(users=20)


def of_kinds(kind: Callable[[int, Event], str]) -> list[Event]:
    return [replace(event, type=kind(n, event)) for n, event in enumerate(MADE)]


HARD: dict[str, list[Event]] = {
    "more users who did one thing than others": [
        *(Event(f"once{n}", item_id(n % 4, n), f"o{n}", timestamp=NOON - n) for n in range(50)),
        *MADE,
    ],
    "half of all events on items that nobody else touched": [
        replace(event, item_id=f"rare{n}") if n % 2 else event for n, event in enumerate(MADE)
    ],
    "everything at once, in the order of arrival": [replace(e, timestamp=NOON) for e in MADE],
    "the newest events first": MADE[::-1],
    "waits from a microsecond to half a century": [
        replace(event, timestamp=NOON - int(10 ** RNG.uniform(0, 15.2))) for event in MADE
    ],
    "the same ten items": [
        Event(f"u{n % 20}", item_id(0, int(RNG.integers(10))), f"e{n}", timestamp=NOON + n * SECOND)
        for n in range(600)
    ],
    "one item": [
        Event(f"u{n % 20}", item_id(0, 0), f"e{n}", timestamp=NOON + n) for n in range(200)
    ],
    "one user with twenty times the events of all others": [
        *(
            Event("giant", NAMES[item], f"g{n}", timestamp=NOON - DAY + n * SECOND)
            for n, item in enumerate(RNG.integers(0, len(NAMES), 10_000).tolist())
        ),
        *events(users=40),
    ],
    "weights from nearly nothing to very much": [
        replace(event, weight=float(10.0 ** RNG.uniform(-20, 20))) for event in MADE
    ],
    "more types than a model distinguishes": of_kinds(
        lambda n, _: "dislike" if n % 40 == 0 else f"type {n % 100}"
    ),
    "two thirds dislikes, and users of dislikes only": of_kinds(
        lambda n, event: "dislike" if n % 3 or event.user_id in {"u3", "u7"} else event.type
    ),
}


def read(data: Path, sent: list[Event]) -> training_corpus.TrainingCorpus:
    """What is learned from a store that these events were sent to."""
    store = SQLiteStore(data / STORE_FILE)

    async def fill() -> None:
        await store.put_items(items())
        for first in range(0, len(sent), 10_000):
            await store.append(sent[first : first + 10_000])

    try:
        asyncio.run(fill())
        return training_corpus.read_store(store, EmbeddingCache(StaticEncoder()))
    finally:
        asyncio.run(store.close())


async def answers(engine: Engine, user: str) -> list[Any]:
    """One answer to each kind of question, with reasons."""
    requester = asking.who(user_id=user, explain=5)
    return [
        await asking.ask(engine, asking.score(requester, tuple(NAMES[::5]))),
        await asking.ask(
            engine, asking.score({**requester, "at": NOON + 900 * DAY}, tuple(NAMES[::9]))
        ),
        await asking.ask(engine, asking.recommend(requester, exclude_seen=False)),
        await asking.ask(engine, asking.search(requester, "rocket")),
        await asking.ask(engine, asking.similar(item_id(0, 0))),
    ]


@pytest.mark.parametrize("name", HARD)
def test_a_hard_log_is_learned_from_and_served(name: str, tmp_path: Path) -> None:
    """A model of an unusual log has finite losses and weights and answers every request."""
    made = HARD[name]
    corpus = read(tmp_path, made)
    assert len(corpus.log) == len(made)
    for user in range(corpus.log.n_users):
        assert (np.diff(events_of(corpus.log, user).timestamps) >= 0).all()
    split = leave_one_out(corpus.log)
    done = train_and_publish.fit_model(TINY.plan(split.test.history, corpus.content, split.test))
    assert all(math.isfinite(record["loss"]) for record in done.history)
    for part, weight in done.model.state_dict().items():
        assert torch.isfinite(weight).all(), part
    for told in (False, True):
        found = evaluate(ModelRanker(done.model, corpus.content), split.test, use_target_time=told)
        assert 0 <= found.ndcg <= found.hr <= 1
        assert found.n_cases == len(split.test) > 0

    counts = split.test.history.item_counts()
    types = corpus.types[: done.model.config.n_event_types]
    model = TrainedModel(done.model, corpus.item_ids, counts, StaticEncoder.name, {}, types)
    version = Registry(tmp_path / MODELS_FOLDER).publish(model.to_files(), {})
    active = Counter(event.user_id for event in made).most_common()
    asking = (active[0][0], active[-1][0], "nobody")

    async def ask() -> None:
        engine = await open_engine(Settings(data=tmp_path))
        try:
            for user in asking:
                for answer in await answers(engine, user):
                    assert answer.model_version == version
                    assert not answer.degraded
                    for item in answer.items:
                        parts = list(item.get("parts", {}).values())
                        reasons = [one.contribution for one in item.get("explanation", ())]
                        assert all(map(math.isfinite, [item["score"], *parts, *reasons]))
        finally:
            await engine.close()

    asyncio.run(ask())
