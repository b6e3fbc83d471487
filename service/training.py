"""From the store's log to a published model: read, fit, judge, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.baselines import EASE, Popularity, TransitionCounts
from models.catalogue import Catalogue
from models.data import Interactions
from models.evaluate import Metrics, Ranker, evaluate
from models.recommender import RecommenderConfig
from models.splits import leave_one_out, min_counts
from models.train import Fitted, Progress, RecommenderRanker, TrainConfig, fit
from models.trained import Trained
from models.vocabulary import Vocabulary
from service.embeddings import Embeddings
from service.errors import ModelRejected
from service.registry import Registry
from service.serving import entry_of
from service.stores.base import Store

Told = Callable[[str, int, int, Progress | None], None]
"""Called as work goes on: the stage, how much is done, of how much, and the training's own."""

ENOUGH_EVENTS = 100  # fewer say nothing that content does not say better


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """What is learned from: the log over item rows, and each row's text."""

    log: Interactions
    item_ids: tuple[str, ...]  # row order
    content: NDArray[np.float32]  # [N, D]


def read(store: Store, embeddings: Embeddings, told: Told | None = None) -> Corpus:
    """The whole log and the text of its items.

    Items of the catalogue that nobody has touched are left out: they have nothing to learn from,
    and serving them needs their text alone.
    """
    total = 0
    parts: list[Any] = []
    columns = None
    for columns in store.scan():
        parts.append(columns)
        total += len(columns)
        if told is not None:
            told("reading events", total, 0, None)
    if columns is None or not total:
        raise ModelRejected(
            "there are no events to learn from: import some with `heed import` or POST /v1/events"
        )
    item_ids = tuple(columns.item_ids)
    log = Interactions.from_columns(
        np.concatenate([part.users for part in parts]),
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        np.concatenate([part.weights for part in parts]),
        np.concatenate([part.types for part in parts]).astype(np.int16),
        n_users=len(columns.user_ids),
        n_items=len(item_ids),
    )
    if told is not None:
        told("reading items", 0, 0, None)
    catalogue = Catalogue.empty(embeddings.dimension, Vocabulary(item_ids))
    entries = (entry_of(item, embeddings.dimension) for item in store.scan_items())
    touched = [entry for entry in entries if entry.item_id in catalogue.vocabulary]
    catalogue = catalogue.updated(touched, [], embeddings.encode)
    return Corpus(log, item_ids, catalogue.content)


def train(
    corpus: Corpus,
    registry: Registry,
    encoder: str,
    *,
    config: TrainConfig,
    seed: int = 0,
    activate: bool = True,
    told: Told | None = None,
) -> dict[str, Any]:
    """Fit on all but each user's last event, judge on those, publish what beats popularity.

    Returns:
        dict: the version and its metrics.

    Raises:
        ModelRejected: when there is too little to learn from, or the model does not beat
            popularity; nothing is published.
    """
    if len(corpus.log) < ENOUGH_EVENTS:
        raise ModelRejected(
            f"{len(corpus.log)} events are too few to train on; {ENOUGH_EVENTS} are needed"
        )
    split = leave_one_out(corpus.log)
    # The newest event of each user is the validation case: the service has no use for a test set.
    history, cases = split.test.history, split.test
    if not len(cases):
        raise ModelRejected("no user has three events: there is no order to learn or to judge by")
    fitted = fit(
        history,
        corpus.content,
        config=config,
        validation=cases,
        seed=seed,
        progress=None if told is None else lambda p: _pass_on(told, p),
    )
    popularity = evaluate(Popularity.fit(history), cases)
    judged = evaluate(RecommenderRanker(fitted.model, corpus.content), cases)
    metrics = _numbers(judged) | {
        "popularity_ndcg": popularity.ndcg,
        "popularity_hr": popularity.hr,
    }
    if judged.ndcg <= popularity.ndcg:
        raise ModelRejected(
            f"the model reaches NDCG@10 {judged.ndcg:.4f} on validation, popularity "
            f"{popularity.ndcg:.4f}: it is not published"
        )
    trained = Trained(
        fitted.model, corpus.item_ids, history.item_counts(), encoder, _described(fitted, seed)
    )
    version = registry.publish(
        trained.pack(),
        {"metrics": metrics, "items": len(corpus.item_ids), "events": len(corpus.log),
         **_described(fitted, seed)},
        activate=activate,
    )  # fmt: skip
    return {"version": version, "metrics": metrics, "seconds": fitted.seconds}


def compare(
    corpus: Corpus, *, config: TrainConfig, seed: int = 0, told: Told | None = None
) -> tuple[dict[str, tuple[Metrics, Metrics, float]], dict[str, int]]:
    """Heed and the baselines on a benchmark's terms: test and validation metrics and seconds.

    Items and users with fewer than five events are left out, the last event of each user is the
    test case, the one before the validation case, and the whole catalogue is ranked.

    Raises:
        ModelRejected: when nothing is left.
    """
    log = corpus.log
    keep = min_counts(log.users, log.items, 5)
    users, items = np.unique(log.users[keep]), np.unique(log.items[keep])
    if not len(users):
        raise ModelRejected("no users and items have five events each: there is nothing to compare")
    small = Interactions.from_columns(
        np.searchsorted(users, log.users[keep]),
        np.searchsorted(items, log.items[keep]),
        log.timestamps[keep],
        log.weights[keep],
        log.types[keep],
        n_users=len(users),
        n_items=len(items),
    )
    content = corpus.content[items]
    split = leave_one_out(small)
    table: dict[str, tuple[Metrics, Metrics, float]] = {}

    def judge(name: str, make: Callable[[], Ranker]) -> None:
        started = time.monotonic()
        ranker = make()
        seconds = time.monotonic() - started
        table[name] = (evaluate(ranker, split.test), evaluate(ranker, split.validation), seconds)

    makers: Mapping[str, Callable[[], Ranker]] = {
        "popularity": lambda: Popularity.fit(split.train),
        "EASE": lambda: EASE.fit(split.train),
        "transition counts": lambda: TransitionCounts.fit(split.train),
    }
    for at, (name, make) in enumerate(makers.items()):
        if told is not None:
            told(f"baseline: {name}", at, len(makers), None)
        judge(name, make)

    def heed() -> Ranker:
        fitted = fit(
            split.train,
            content,
            shape=RecommenderConfig(items=len(items), content=content.shape[1]),
            config=config,
            validation=split.validation,
            seed=seed,
            progress=None if told is None else lambda p: _pass_on(told, p),
        )
        return RecommenderRanker(fitted.model, content)

    judge("heed", heed)
    return table, {"users": len(users), "items": len(items), "events": len(small)}


def _pass_on(told: Told, progress: Progress) -> None:
    done = (progress.epoch - 1) * progress.steps + progress.step
    told("training", done, progress.epochs * progress.steps, progress)


def _described(fitted: Fitted, seed: int) -> dict[str, Any]:
    return {
        "epoch": fitted.epoch,
        "seconds": round(fitted.seconds, 1),
        "seed": seed,
        "shape": fitted.model.config.as_dict(),
    }


def _numbers(metrics: Metrics) -> dict[str, float]:
    return {
        "hr": metrics.hr,
        "ndcg": metrics.ndcg,
        "mrr": metrics.mrr,
        "coverage": metrics.coverage,
        "cases": float(metrics.n),
    }
