"""Cold start: quality for items that training never saw, and for users with few events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.catalogue.catalogue import Catalogue
from models.catalogue.item_values import ItemEntry
from models.catalogue.snapshot import Snapshot
from models.data.interactions import DISLIKE, Interactions
from models.data.vocabulary import Vocabulary
from models.evaluation.baselines import Popularity
from models.evaluation.full_ranking import Ranker, evaluate
from models.recommender.artifact import TrainedModel
from models.training.presets import Preset
from service.lab.comparison import Comparison, ModelResults
from service.lab.protocols import EvaluationTask
from service.training.judgement import HEED
from service.training.train_and_publish import fit_model
from service.training.training_corpus import StageProgressCallback
from tests.benchmarks.studies.cold_start_rankers import (
    Among,
    AtRandom,
    ColdItems,
    Likeness,
    Shortened,
    cold_items,
)
from tests.support.snapshot_ranker import SnapshotRanker

EVENTS = (1, 2, 3, 5)  # that are shown of a user
KNOWN = f"{HEED}, trained on them"


class NewItems(NamedTuple):
    """Cases whose target was in no event of training."""

    hidden: int  # how many there are
    everything: Comparison  # the whole catalogue ranked
    unseen: Comparison  # these items ranked alone


class ColdStart(NamedTuple):
    """Both halves of it."""

    items: NewItems
    users: Mapping[int | None, Comparison]  # by events shown, None = all; the same cases in all


def measure(
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    table: Comparison,
    *,
    seed: int = 0,
    told: StageProgressCallback | None = None,
) -> ColdStart:
    """Hide a tenth of the items from a training of its own, then users' histories but the newest.

    Args:
        task: from `models.evaluation.splits`.
        content: text embeddings of the task's items [N, D].
        preset: of Heed's training.
        table: from `benchmarking.compare`, whose rankers are asked again.
        seed: of the training, and of which items are hidden.
        told: called as work goes on.

    Raises:
        ValueError: when no test case has a hidden item as its target.
    """
    items = new_items(task, content, preset, table[HEED].ranker, seed=seed, told=told)
    if told is not None:
        told("users with few events", 0, 0, None)
    known = {
        name: row.ranker
        for name, row in table.items()
        if row.ranker is not None and (name == HEED or not name.startswith(HEED))
    }
    return ColdStart(items, new_users(task, known))


def new_items(
    task: EvaluationTask,
    content: NDArray[np.float32],
    preset: Preset,
    trained_on_all: Ranker | None = None,
    *,
    seed: int = 0,
    told: StageProgressCallback | None = None,
) -> NewItems:
    """Judge by targets that were hidden from training and have their text alone.

    Args:
        task: from `models.evaluation.splits`.
        content: text embeddings of the task's items [N, D].
        preset: of the training.
        trained_on_all: what would be answered had the items been trained; judged as well.
        seed: of the training, and of which items are hidden.
        told: called as work goes on.

    Raises:
        ValueError: when no test case has a hidden item as its target.
    """
    cold = cold_items(task, seed=seed)
    if not len(cold.test):
        raise ValueError("no test case has an item as its target that could be hidden")
    log, cases = cold.fitting()
    done = fit_model(preset.plan(log, content[~cold.hidden], cases, seed=seed), told)
    if told is not None:
        told("items never seen", 0, 0, None)
    ids = tuple(str(row) for row in np.flatnonzero(~cold.hidden).tolist())
    shape, counts = done.model.config, log.liked().item_counts()
    # Rankers know types by their numbers: any names do.
    types = [
        DISLIKE if row == shape.dislike_type else str(row) for row in range(shape.n_event_types)
    ]
    trained = TrainedModel(done.model, ids, counts, "", {}, tuple(types))
    served = SnapshotRanker(_snapshot(cold, trained, content))
    rankers: dict[str, Ranker] = {
        "random": AtRandom(seed),
        "popularity": Popularity.fit(cold.train),
        "likeness of texts": Likeness(content),
        HEED: _Once(served, cold.test.history, cold.test.users),
    }
    if trained_on_all is not None:
        rankers[KNOWN] = trained_on_all
    seconds = {HEED: done.seconds}

    def judged(ranker: Ranker, name: str) -> ModelResults:
        found = evaluate(ranker, cold.test, exclude_seen=task.exclude_seen, max_seen=task.max_seen)
        return ModelResults([found], seconds=[seconds.get(name, 0.0)])

    return NewItems(
        int(cold.hidden.sum()),
        {name: judged(ranker, name) for name, ranker in rankers.items()},
        {name: judged(Among(ranker, cold.hidden), name) for name, ranker in rankers.items()},
    )


def new_users(task: EvaluationTask, rankers: Mapping[str, Ranker]) -> dict[int | None, Comparison]:
    """Judge by users of whom the newest events are shown, and by the same with all shown.

    Cases are those with as many events before them as are ever shown. What is ranked stays the
    same however few are shown: what the user had before is left out of all rankings.
    """
    history = task.test.history
    cases = task.test.where(history.lengths[task.test.users] >= max(EVENTS))

    def judged(ranker: Ranker) -> ModelResults:
        found = evaluate(ranker, cases, exclude_seen=task.exclude_seen, max_seen=task.max_seen)
        return ModelResults([found])

    return {
        shown: {
            name: judged(ranker if shown is None else Shortened(ranker, shown))
            for name, ranker in rankers.items()
        }
        for shown in (*EVENTS, None)
    }


def _snapshot(cold: ColdItems, trained: TrainedModel, content: NDArray[np.float32]) -> Snapshot:
    """Build the snapshot to serve: all items with texts, the hidden ones without training."""
    ids = [str(row) for row in range(len(content))]
    entries = [
        ItemEntry(id_, embedding=vector)
        for id_, vector in zip(ids, content, strict=True)
        if vector.any()
    ]
    width = content.shape[1]
    empty = Catalogue.empty(width, Vocabulary(tuple(ids)))
    catalogue = empty.updated(entries, [], lambda texts: np.zeros((len(texts), width), np.float32))
    return Snapshot.build("cold", trained, catalogue, cold.train.liked().item_counts())


class _Once:
    """Another ranker's scores of some users, computed when first asked for and then kept."""

    def __init__(self, ranker: Ranker, history: Interactions, users: NDArray[np.int32]) -> None:
        self._ranker, self._history = ranker, history
        self._users = np.unique(users)
        self._scores: NDArray[np.float32] | None = None

    def scores(
        self,
        history: Interactions,
        users: NDArray[np.int32],
        request_times: NDArray[np.int64] | None,
    ) -> NDArray[np.float32]:
        """[B, n_items] of some of the users, over the history that was given, at no time."""
        if history is not self._history or request_times is not None:
            raise ValueError("scores are kept of one history, at no time")
        if self._scores is None:
            self._scores = self._ranker.scores(history, self._users, None)
        return self._scores[np.searchsorted(self._users, users)]
