"""Event types from the store through training to the explanation of a score."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import interactions
from models.encoder.event_bias import MASKED, UNKNOWN
from models.history.user_history import UserHistory
from models.recommender import artifact
from models.recommender.artifact import TrainedModel
from models.text.encoders import StaticEncoder
from service.domain import records
from service.domain.records import Event
from service.domain.settings import Settings
from service.engine.engine import Engine, open_engine
from service.histories.event_columns import EventColumns
from service.runtime.data_layout import MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from tests.support import asking
from tests.support.tiny import NOON, QUICK, SECOND, events, item_id, items

FAST = replace(QUICK, train_config=replace(QUICK.train_config, epochs=4, attention_epochs=1))
NAMES = tuple(item.item_id for item in items())
KINDS = ("purchase", "dislike", "view")


def of_kinds() -> list[Event]:
    """Events of the small world as purchases, views and dislikes of different weights."""
    kinds = ["purchase", "purchase", "view", "purchase", "dislike", "purchase", "purchase"]
    return [
        replace(event, type=kinds[number % 7], weight=1 + number % 3)
        for number, event in enumerate(events())
    ]


def fill(path: Path, sent: list[Event]) -> training_corpus.TrainingCorpus:
    """Store the events and return the training corpus."""
    store = SQLiteStore(path / STORE_FILE)

    async def put() -> None:
        await store.put_items(items())
        await store.append(sent)

    try:
        asyncio.run(put())
        return training_corpus.read_store(store, EmbeddingCache(StaticEncoder()))
    finally:
        asyncio.run(store.close())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a model that knows three types of events."""
    path = tmp_path_factory.mktemp("told")
    corpus = fill(path, of_kinds())
    registry = Registry(path / MODELS_FOLDER)
    train_and_publish.train(corpus, registry, StaticEncoder.name, preset=FAST, processes=1)
    return path


@pytest.fixture
async def engine(told: Path) -> AsyncIterator[Engine]:
    opened = await open_engine(Settings(data=told))
    yield opened
    await opened.close()


# ------------------------------------------------------------------ what is learned from


def test_a_return_is_learned_from_as_a_dislike(tmp_path: Path) -> None:
    """A return is no sample, and adds nothing to the counts of items."""
    sent = [replace(e, type="return") if n % 5 == 0 else e for n, e in enumerate(of_kinds())]
    corpus = fill(tmp_path, sent)
    assert set(corpus.types) == set(KINDS)
    liked = [event.item_id for event in sent if event.type in ("purchase", "view")]
    assert int(corpus.log.disliked.sum()) == len(sent) - len(liked)
    counts = corpus.log.liked().item_counts().tolist()
    assert counts == [liked.count(item) for item in corpus.item_ids]


def test_only_frequent_event_types_get_an_id(tmp_path: Path) -> None:
    made = events()
    sent = [
        replace(event, type=f"t{number % 80}" if number % 100 else "dislike")
        for number, event in enumerate(made)
    ]
    log = (corpus := fill(tmp_path, sent)).log
    assert len(corpus.types) == 64
    assert corpus.types[log.dislike_type] == "dislike"
    assert int(log.disliked.sum()) == sum(event.type == "dislike" for event in sent)
    counts = {kind: sum(event.type == kind for event in sent) for kind in {e.type for e in sent}}
    left_out = set(counts) - set(corpus.types)
    assert int((log.types == UNKNOWN).sum()) == sum(counts[kind] for kind in left_out)
    kept = min(
        count for kind, count in counts.items() if kind in corpus.types and kind != "dislike"
    )
    assert kept >= max(counts[kind] for kind in left_out)


def test_the_service_and_the_models_mean_the_same_by_a_dislike() -> None:
    assert records.DISLIKE == interactions.DISLIKE
    assert records.NEGATIVE == interactions.NEGATIVE


def test_the_model_names_its_types(told: Path) -> None:
    registry = Registry(told / MODELS_FOLDER)
    files = registry.load(registry.current() or "")
    made = TrainedModel.from_files(files)
    assert artifact.ARTIFACT_FORMAT == 5
    assert set(made.event_types) == set(KINDS)
    shape = made.model.config
    assert (shape.n_event_types, shape.dislike_type, shape.dislike_heads) == (
        3,
        made.event_types.index("dislike"),
        1,
    )
    liked = [event for event in of_kinds() if event.type != "dislike"]
    assert len(liked) == int(made.item_counts.sum())


# ------------------------------------------------------------------ what is asked with


async def events_of(
    engine: Engine, user: str, session: tuple[Any, ...] = ()
) -> tuple[EventColumns, UserHistory]:
    """The events that this user's requests attend to, as stored and as the model reads them."""
    events = await engine.parts.memories.load(user, now=NOON, session=session)
    snapshot = await engine.parts.live.current()
    return events, engine.parts.memories.history(snapshot, events)


async def test_a_history_has_the_models_numbers(engine: Engine) -> None:
    """Stored and inline events get the model's type ids; unknown types get -1."""
    names = engine.parts.live.snapshot.trained.event_types  # type: ignore[union-attr]
    sent = sorted((e for e in of_kinds() if e.user_id == "u3"), key=lambda e: e.timestamp or 0)
    middle = (sent[4].timestamp or 0) + SECOND
    inline = (
        asking.inline(NAMES[1], "share"),
        asking.inline(NAMES[2], "dislike", timestamp=middle),
        asking.inline(NAMES[3], "return", timestamp=middle),
    )
    events, history = await events_of(engine, "u3", inline)
    kinds = [event.type for event in sent]
    kinds[5:5] = ["dislike", "return"]
    kinds.append("share")
    assert [events.type_names[code] for code in events.types] == kinds
    kinds[6] = "dislike"  # as which the model reads a return
    expected = [names.index(kind) if kind in names else UNKNOWN for kind in kinds]
    assert history.types.tolist() == expected
    _, alone = await events_of(engine, "u3")
    assert alone.types.tolist() == [e for n, e in enumerate(expected[:-1]) if n not in (5, 6)]


async def test_answers_add_up_and_name_the_type(engine: Engine) -> None:
    """Parts sum to the score, contributions to their parts, and each reason names its type."""
    requester = asking.who(user_id="u3", explain=50, explain_exact=True)
    answer = await asking.ask(engine, asking.score(requester, NAMES[::30]))
    kinds = {event.item_id: event.type for event in of_kinds() if event.user_id == "u3"}
    said = set()
    for item in answer.items:
        parts = item["parts"]
        assert item["score"] == pytest.approx(sum(parts.values()), abs=1e-4)
        reasons = item.get("explanation", ())
        told = sum(reason.contribution for reason in reasons)
        assert told == pytest.approx(parts["attention"] + parts["transitions"], abs=1e-4)
        assert all(reason.row.type == kinds[reason.row.item_id or ""] for reason in reasons)
        said |= {reason.row.type for reason in reasons}
        assert all(reason.effect is not None and reason.effect_is_exact for reason in reasons)
    assert said == set(KINDS)


async def test_a_disliked_item_was_seen(engine: Engine) -> None:
    history = (asking.inline(item_id(0, 3), "dislike"), asking.inline(item_id(0, 4)))
    answer = await asking.ask(engine, asking.recommend(asking.who(history=history), limit=60))
    found = {item["item_id"] for item in answer.items}
    assert len(found) == 58
    assert item_id(0, 3) not in found


async def test_before_training_dislikes_are_not_taken_for_likes(tmp_path: Path) -> None:
    opened = await open_engine(Settings(data=tmp_path))
    try:
        await opened.live.catalogue.put_items(items())
        await opened.store.append(of_kinds())
        liked = asking.inline(item_id(1, 2), timestamp=NOON)
        disliked = asking.inline(item_id(0, 3), "dislike", timestamp=NOON)

        async def scores(*history: Any) -> list[float]:
            requester = asking.who(history=history, at=NOON)
            answer = await asking.ask(opened, asking.score(requester, NAMES))
            return [item["score"] for item in answer.items]

        for kind in ("dislike", "return"):
            same = disliked.model_copy(update={"type": kind})
            assert await scores(liked, same) == await scores(liked)
        viewed = disliked.model_copy(update={"type": "view"})
        assert await scores(liked, viewed) != await scores(liked)
        _, history = await events_of(opened, "u3")
        assert set(np.unique(history.types).tolist()) == {UNKNOWN, MASKED}
    finally:
        await opened.close()
