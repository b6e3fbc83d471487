"""What a training must be better than to be served: the same held-out cases, one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data.interactions import Interactions
from models.evaluation.full_ranking import RankingMetrics, ndcg_gains
from models.evaluation.splits import leave_one_out
from models.text.encoders import StaticEncoder
from models.training.presets import Preset
from service.domain.records import Event
from service.runtime.data_layout import EMBEDDINGS_FILE, MODELS_FOLDER, STORE_FILE
from service.snapshots.registry import Registry
from service.snapshots.text_embeddings import EmbeddingCache
from service.stores.sqlite.store import SQLiteStore
from service.training import train_and_publish, training_corpus
from service.training.judgement import CurrentModel, QuestionMetrics, _compare
from service.training.train_and_publish import training_sentence
from tests.support.tiny import NOON, QUICK, SECOND, World, events, item_id

# What has learned next to nothing.
WEAK = replace(
    QUICK,
    transitions_per_item=0,
    train_config=replace(
        QUICK.train_config, epochs=1, attention_epochs=0, final_epochs=1, learning_rate=1e-6
    ),
)

FEW = replace(
    QUICK, train_config=replace(QUICK.train_config, epochs=2, attention_epochs=0, final_epochs=1)
)


def train(data: Path, preset: Preset, more: list[Event] | None = None) -> dict[str, Any]:
    """Train on a data directory, with some more events."""
    store = SQLiteStore(data / STORE_FILE)
    try:
        if more:
            asyncio.run(store.append(more))
        embeddings = EmbeddingCache(StaticEncoder(), data / EMBEDDINGS_FILE)
        corpus = training_corpus.read_store(store, embeddings)
        registry = Registry(data / MODELS_FOLDER)
        return train_and_publish.train(corpus, registry, embeddings.encoder.name, preset=preset)
    finally:
        asyncio.run(store.close())


# ------------------------------------------------------------------ the measure


def metrics(first: set[int], users: int) -> RankingMetrics:
    """One case a user, of which these rank first and the others nowhere."""
    ranks = np.array([0 if case in first else 99 for case in range(users)], np.int64)
    return RankingMetrics(10, 0.0, float(ndcg_gains(ranks).mean()), 0.0, 0.0, users, ranks)


@pytest.mark.parametrize(
    ("ours", "theirs", "users", "outcome"),
    [
        (range(30), range(10), 100, "better"),
        (range(10), range(30), 100, "worse"),
        (range(10), range(10), 100, "no better"),  # a tie
        (range(12), range(2, 12), 100, "no better"),  # two cases more are within the noise
        (range(10, 30), range(20), 100, "no better"),
        (range(19), range(0), 19, "unknown"),
        (range(1), range(0), 1, "unknown"),
    ],
)
def test_a_difference_within_its_interval_is_none(
    ours: range, theirs: range, users: int, outcome: str
) -> None:
    log = Interactions.from_columns(
        np.repeat(np.arange(users), 3), [0, 1, 2] * users, [1, 2, 3] * users,
        n_users=users, n_items=3,
    )  # fmt: skip
    question = QuestionMetrics(leave_one_out(log).test, metrics(set(ours), users), {})
    found = _compare(
        question, ndcg_gains(metrics(set(theirs), users).ranks), np.ones(users, np.bool_),
        against="v", against_model=True, new_items=False,
    )  # fmt: skip
    assert found.outcome == outcome
    gains = np.array([(n in ours) - float(n in theirs) for n in range(users)])
    assert found.ndcg - found.other == pytest.approx(gains.mean())
    if users > 1:
        error = gains.std(ddof=1) / np.sqrt(users)
        assert (found.low, found.high) == pytest.approx(
            (gains.mean() - 1.96 * error, gains.mean() + 1.96 * error)
        )


VERDICT: dict[str, Any] = {
    "against": "v1", "against_model": True, "new_items": False, "cases": 943, "users": 943,
    "ndcg": 0.12, "other": 0.137, "low": -0.0281, "high": -0.0059,
}  # fmt: skip


FIGURES = (
    "NDCG@10 0.1200 instead of 0.1370 on 943 held-out events (difference -0.0170, 95 % interval "
    "-0.0281 to -0.0059)"
)
SHARE = "Its ten recommendations hold the next item for 54 of 100 users."


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"outcome": "worse", "is_served": False},
            (f"Worse than the served model v1: {FIGURES}; v1 stays served, and this version is "
            f"kept: heed models activate serves it. {SHARE}"),
        ),
        (
            {"outcome": "better", "is_served": True},
            f"Better than v1, served until now: {FIGURES}; it is served. {SHARE}",
        ),
        (
            {"outcome": "no better", "against": "EASE", "against_model": False, "is_served": True},
            (f"No better than the best baseline, EASE: {FIGURES}; it is served, since popularity, "
            f"which answers without a model, has 0.0500. {SHARE}"),
        ),
        (
            {"outcome": "unknown", "users": 1, "is_served": False, "against": "popularity",
             "against_model": False},
            ("The held-out events of 1 user are too few to tell whether it is better than "
            "popularity, which answers without a model; popularity stays served, and this "
            "version is kept: heed models activate serves it."),
        ),
    ],
)  # fmt: skip
def test_one_sentence_says_it(changes: dict[str, Any], said: str) -> None:
    """The sentence has the measure that decided, its interval, and what is served."""
    result = {
        "served": "heed", "next_basket": False, "has_times": True, "without_time": 0,
        "epochs": 7, "epochs_asked": None, "verdict": VERDICT | changes,
        "metrics": {"user_hr": 0.54, "popularity_ndcg": 0.05},
    }  # fmt: skip
    assert training_sentence(result) == said
    added = " Events without a time of their own were learned from as older than all others: 1,200."
    assert training_sentence(result | {"without_time": 1_200}) == said + added


def test_few_users_are_counted_and_a_log_without_times_has_no_next_item() -> None:
    """Below 100 users a share is said of those that there are."""
    result = {
        "served": "heed", "next_basket": False, "has_times": False, "without_time": 9,
        "epochs": 7, "epochs_asked": 9,
        "verdict": VERDICT | {"outcome": "worse", "is_served": False, "users": 40},
        "metrics": {"user_hr": 0.5, "popularity_ndcg": 0.05},
    }  # fmt: skip
    said = training_sentence(result)
    assert "held-out events, drawn at random since most have no time of their own (" in said
    assert said.endswith(
        "Its ten recommendations hold the held-out item for 20 of 40 users. The training stopped "
        "after 7 of 9 epochs, since the validation did not improve any more."
    )


# ------------------------------------------------------------------ what is served


def poison() -> list[Event]:
    """Users of two events, too few for a case, each of which contradicts what follows what."""
    return [
        Event(f"x{user}", item_id((user + 2 * step) % 4, 5 * user + 7 * step), f"x{user}-{step}",
              timestamp=NOON - 90 * 86_400 * SECOND + (60 * user + step) * SECOND)
        for user in range(300) for step in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "more"), [(WEAK, None), (FEW, poison)], ids=["few epochs", "poisoned events"]
)
def test_a_worse_training_is_kept_and_a_better_one_served(
    world: World, tmp_path: Path, preset: Preset, more: Callable[[], list[Event]] | None
) -> None:
    data = world.copy(tmp_path / "data")
    registry = Registry(data / MODELS_FOLDER)
    done = train(data, preset, more() if more is not None else None)
    verdict = done["verdict"]
    assert (verdict["against"], verdict["is_served"]) == (world.first, False)
    assert verdict["outcome"] in ({"worse"} if more is None else {"worse", "no better"})
    said = f"{verdict['outcome'].capitalize()} than the served model {world.first}: NDCG@10 "
    assert done["sentence"].startswith(said)
    assert f"; {world.first} stays served, and this version is kept" in done["sentence"]
    assert registry.current() == world.first
    by_name = {each.version: each.metadata or {} for each in registry.versions()}
    assert by_name[done["version"]]["sentence"] == done["sentence"]
    # The cases are the same: the served model has what it had before it learned from them.
    first = by_name[world.first]["metrics"]["ndcg"]
    assert verdict["other"] == pytest.approx(first)
    if more is not None:
        return
    registry.activate(done["version"])
    better = train(data, QUICK)
    assert better["verdict"]["outcome"] == "better"
    assert better["sentence"].startswith(f"Better than {done['version']}, served until now: ")
    assert registry.current() == better["version"]


def test_what_the_served_model_has_not_learned_it_ranks_now(world: World, tmp_path: Path) -> None:
    data = world.copy(tmp_path / "data")
    more = [
        Event(f"u{user}", "fresh" if user == 2 else item_id(user % 4, 3), f"n{user}",
              timestamp=NOON)
        for user in range(20)
    ]  # fmt: skip
    store = SQLiteStore(data / STORE_FILE)
    asyncio.run(store.append(more))
    corpus = training_corpus.read_store(store, EmbeddingCache(StaticEncoder()))
    asyncio.run(store.close())
    cases = leave_one_out(corpus.log).test
    registry = Registry(data / MODELS_FOLDER)
    served = CurrentModel.read(registry, StaticEncoder.name, corpus.log.shards)
    assert served is not None
    assert served.judged is not None
    ranks, fair = served.ranks(cases, corpus, exclude_seen=True)
    assert fair.all()
    names = [event.user_id for event in events(each=1)]
    kept = [served.judged.get(key, -1) for key in (corpus.case_keys(cases) ^ np.uint64(1)).tolist()]
    assert sorted(np.array(kept) >= 0) == [False] * 20 + [True] * (len(names) - 20)
    assert [rank for rank, old in zip(ranks.tolist(), kept, strict=True) if old >= 0] == [
        old for old in kept if old >= 0
    ]
    assert ranks[cases.targets == corpus.item_ids.index("fresh")] > 30  # nothing is known of it
    # Of an earlier version's cases nothing is known: newer ones remain.
    old = replace(served, created=NOON - 1, judged=None)
    again, fair = old.ranks(cases, corpus, exclude_seen=True)
    assert fair.sum() == 20
    np.testing.assert_array_equal(again[fair], ranks[fair])
    # Of the same events its mean is known: each of both means has an error.
    question = QuestionMetrics(cases, metrics(set(range(20)), 40), {})
    same = replace(old, metadata={"events": corpus.events, "metrics": {"ndcg": 0.25}})
    found = same.compare(question, corpus, exclude_seen=True, is_new=False)
    error = np.sqrt(2) * np.std([1, 0], ddof=0) * np.sqrt(40 / 39) / np.sqrt(40)
    assert found.outcome == "better"
    assert found.other == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25 - 1.96 * error)
    assert found.users == 40
